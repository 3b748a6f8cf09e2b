"""The advice on a failed transfer: what that verb can do, and for a damaged store its repair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.attach import fetch_files
from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.content import build_bytes_body, copy
from clowder_aimage.errors import AImageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Manifest, Reference, mediatype
from clowder_aimage.pull import pull
from clowder_aimage.push import push, transfer
from clowder_aimage.registry import ClientOptions
from tests.memory_store import MemoryStore
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving, skip_waiting
from tests.store import unshare

RAW, BLOBS = artifact(b"{}", b"weights")
REPAIR = "aimage verify --repair"
WRONG = "has wrong content"
LOST = "the registry has the manifest, but not this blob"
TITLED = RAW.replace(
    b'"size": 7}', b'"size": 7, "annotations": {"org.opencontainers.image.title": "w"}}'
)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_waiting(monkeypatch)


# the fault of the registry, a verb that reads from it, and the advice
VERBS: dict[str, Callable[[Reference, ClientOptions, Path], object]] = {
    "pull": lambda name, options, path: pull(name, ImageLayout(path / "store"), options),
    "copy": lambda name, options, _: transfer(name, _rename(name), options),
    "attach --get": lambda name, options, path: fetch_files(name, path, options),
}
FAULTS: dict[str, tuple[Callable[[Seen], Answer | None], str]] = {
    "other bytes": (lambda _: Answer(200, {}, b"WEIGHTS"), WRONG),
    "a missing blob": (lambda _: Answer(404), LOST),
    "BLOB_UNKNOWN": (
        lambda _: Answer(404, {}, b'{"errors": [{"code": "BLOB_UNKNOWN", "message": "x"}]}'),
        LOST,
    ),
}


def _rename(name: Reference) -> Reference:
    return Reference(name.registry, "copy", "v1")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_advice_on_a_fault_of_the_registry(verb: str, fault: str, tmp_path: Path) -> None:
    answer, advice = FAULTS[fault]
    inner = serving(TITLED, BLOBS)

    def script(seen: Seen) -> Answer:
        if seen.method == "POST":
            return Answer(202, {"Location": "/upload"})
        if seen.method == "HEAD" or seen.path.startswith("/upload"):
            return Answer(404)
        if "/blobs/" in seen.path and b"weights" in (inner(seen).body, b""):
            return answer(seen) or inner(seen)
        return inner(seen)

    with ScriptedRegistry(script).running() as registry:
        name = Reference.parse(f"{registry.host}/x:v1")
        with pytest.raises(AImageError) as caught:
            VERBS[verb](name, ClientOptions(docker_config=tmp_path), tmp_path)
    said = format_advice(caught.value) or ""
    assert advice in said
    # Nothing is wrong with the store, or with the spelling.
    assert REPAIR not in said
    assert "spelling" not in said


def test_the_advice_on_a_damaged_blob_of_the_store(tmp_path: Path) -> None:
    layout = ImageLayout(tmp_path / "store")
    manifest = Manifest.parse(RAW)
    with ScriptedRegistry(lambda seen: refuse(seen)).running() as registry:

        def refuse(seen: Seen) -> Answer:
            if seen.method == "POST":
                return Answer(202, {"Location": "/upload"})
            is_upload = seen.method == "PUT"
            body = b'{"errors": [{"code": "DIGEST_INVALID"}]}'
            return Answer(400, {}, body) if is_upload else Answer(404)

        name = Reference.parse(f"{registry.host}/x:v1")
        for blob in BLOBS.values():
            layout.push(Descriptor.of("application/x", blob), build_bytes_body(blob))
        layout.push(Descriptor.of(mediatype.OCI_MANIFEST, RAW), build_bytes_body(RAW), name)
        for child in manifest.children:
            path = layout.find_path(child)
            unshare(path)
            path.chmod(0o644)
            path.write_bytes(bytes(child.size))
        for verb in (
            lambda: push(layout, name, ClientOptions(docker_config=tmp_path)),
            lambda: copy(layout, name, MemoryStore()),
        ):
            with pytest.raises(AImageError) as caught:
                verb()
            assert REPAIR in (format_advice(caught.value) or "")
