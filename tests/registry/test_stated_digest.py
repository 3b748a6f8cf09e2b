"""A tag has the digest that its registry states: the algorithm is the registry's choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from clowder_aimage.content import build_bytes_body, copy
from clowder_aimage.errors import VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.pull import pull
from clowder_aimage.push import push, transfer
from clowder_aimage.registry import ClientOptions, Repository
from tests.memory_store import MemoryStore
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving

RAW, BLOBS = artifact(b"{}", b"weights")
SHA256, SHA512 = Digest.of(RAW), Digest.of(RAW, "sha512")
# the header of the registry, and the digest of the tag
STATED = [
    (str(SHA512), SHA512),
    (str(SHA256), SHA256),
    (None, SHA256),
    ("", SHA256),
    ("sha512:short", SHA256),
    ("sha384:" + "0" * 96, SHA256),
    ("nonsense", SHA256),
]


def state(header: str | None) -> dict[str, str]:
    return {} if header is None else {"Docker-Content-Digest": header}


@pytest.mark.parametrize(("header", "expected"), STATED)
def test_a_pull_keeps_the_algorithm_of_the_registry(
    header: str | None, expected: Digest, tmp_path: Path
) -> None:
    inner = serving(RAW, BLOBS)

    def script(seen: Seen) -> Answer:
        answer = inner(seen)
        answer.headers |= state(header) if "/manifests/" in seen.path else {}
        return answer

    layout, options = ImageLayout(tmp_path / "store"), ClientOptions(docker_config=tmp_path)
    with ScriptedRegistry(script).running() as registry:
        name = Reference.parse(f"{registry.host}/x:v1")
        assert pull(name, layout, options).root.digest == expected
        assert layout.resolve(name).digest == expected
        with Repository(name, options) as repository:
            # A second look finds nothing new.
            assert repository.resolve_changed(name, expected) is None
            assert repository.resolve(name.with_digest(expected)).digest == expected


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_a_wrong_stated_digest_is_refused(algorithm: str, tmp_path: Path) -> None:
    wrong = {"Docker-Content-Digest": str(Digest.of(b"other", algorithm))}
    kind = {"Content-Type": mediatype.OCI_MANIFEST}
    with ScriptedRegistry(lambda _: Answer(200, kind | wrong, RAW)).running() as registry:
        name = Reference.parse(f"{registry.host}/x:v1")
        with (
            Repository(name, ClientOptions(docker_config=tmp_path)) as repository,
            pytest.raises(VerificationError, match="with Docker-Content-Digest"),
        ):
            repository.resolve(name)


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (str(SHA512), SHA512),
        (str(SHA256), SHA256),
        (None, None),
        ("nonsense", None),
    ],
)
def test_a_push_prints_the_digest_of_the_registry(
    algorithm: str, header: str | None, expected: Digest | None, tmp_path: Path
) -> None:
    own = Digest.of(RAW, algorithm)
    inner = serving(RAW, BLOBS)

    def script(seen: Seen) -> Answer:
        if seen.method == "PUT":
            return Answer(201, state(header))
        if "/from/" in seen.path:
            return inner(seen)
        # The blobs are there: only the manifest is sent.
        size = len(BLOBS.get(seen.path.rpartition("/")[2], b""))
        return Answer(200, {"Content-Length": str(size)})

    layout, options = ImageLayout(tmp_path / "store"), ClientOptions(docker_config=tmp_path)
    with ScriptedRegistry(script).running() as registry:
        name = Reference.parse(f"{registry.host}/x:v1")
        content = Descriptor(mediatype.OCI_MANIFEST, own, len(RAW))
        for blob in BLOBS.values():
            layout.push(Descriptor.of("application/octet-stream", blob), build_bytes_body(blob))
        layout.push(content, build_bytes_body(RAW), name)
        assert push(layout, name, options).digest == (expected or own)
        # By digest the registry has the digest that was asked for.
        assert push(layout, name.with_digest(own), options).digest == own
        source = Reference.parse(f"{registry.host}/from/y").with_digest(own)
        target = Reference.parse(f"{registry.host}/x:v2")
        assert transfer(source, target, options).digest == (expected or own)


def test_a_copy_to_a_store_has_the_stated_digest(tmp_path: Path) -> None:
    inner = serving(RAW, BLOBS)

    def script(seen: Seen) -> Answer:
        answer = inner(seen)
        answer.headers |= state(str(SHA512)) if "/manifests/" in seen.path else {}
        return answer

    with ScriptedRegistry(script).running() as registry:
        name = Reference.parse(f"{registry.host}/x:v1")
        with Repository(name, ClientOptions(docker_config=tmp_path)) as repository:
            assert copy(repository, name, MemoryStore()).digest == SHA512
