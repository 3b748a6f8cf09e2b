"""Responses to a pull: correct, broken and wrong ones."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clowder_aimage.content import chunk, copy
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NetworkError,
    NotFoundError,
    RegistryError,
    VerificationError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry import ClientOptions, Repository, download
from tests.memory_store import MemoryStore
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving, skip_waiting

if TYPE_CHECKING:
    from clowder_aimage.content.copy_option import CopyEvent


BLOB = bytes(range(256)) * 4096  # 1 MiB
MANIFEST, BLOBS = artifact(b"{}", BLOB)
NAME = str(Digest.of(BLOB))
KIND = {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the delay between retries."""
    skip_waiting(monkeypatch)


def pull(
    script: Callable[[Seen], Answer], tmp_path: Path, reference: str = "{host}/team/x:v1"
) -> tuple[MemoryStore, Descriptor, ScriptedRegistry]:
    """Pull from a scripted registry into memory; return the requests as well."""
    store = MemoryStore()
    with ScriptedRegistry(script).running() as registry:
        name = Reference.parse(reference.format(host=registry.host))
        connection = ClientOptions(docker_config=tmp_path)
        with Repository(name, connection) as repository:
            descriptor = copy(repository, name, store, concurrency=2)
    return store, descriptor, registry


def changed(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Return the correct script with responses altered by ``change(seen, answer)``."""
    right = serving(MANIFEST, BLOBS)

    def script(seen: Any) -> Any:
        answer = right(seen)
        return change(seen, answer) or answer

    return script


def is_blob(seen: Seen) -> bool:
    return seen.path.endswith(NAME)


class Once:
    """Acts on the first call only."""

    def __init__(self) -> None:
        self.left = 1

    def __bool__(self) -> bool:
        self.left -= 1
        return self.left >= 0


def test_a_pull_from_a_correct_registry(tmp_path: Path) -> None:
    store, descriptor, registry = pull(serving(MANIFEST, BLOBS), tmp_path)
    assert descriptor.digest == Digest.of(MANIFEST)
    assert all(Digest.parse(name) in store._blobs for name in BLOBS)
    assert len([path for path in registry.asked("GET") if "/manifests/" in path]) == 1


@pytest.mark.parametrize("cut", [0, 1, 4096, 1_000_000])
def test_a_dropped_connection_is_resumed(cut: int, tmp_path: Path) -> None:
    once = Once()

    def change(seen: Any, answer: Any) -> Any:
        if is_blob(seen) and once:
            answer.headers["Content-Length"] = str(len(answer.body))
            answer.cut = cut
        return answer

    _, _, registry = pull(changed(change), tmp_path)
    ranges = [seen.headers.get("Range") for seen in registry.seen if is_blob(seen)]
    assert len(ranges) == 2
    start = int(ranges[1].partition("=")[2].partition("-")[0]) if ranges[1] else 0
    assert start <= cut  # no byte is skipped
    assert cut - start <= 1 << 20  # and at most one read is repeated


@pytest.mark.parametrize(
    "bad",
    [
        Answer(206, {"Content-Range": f"bytes 7-{len(BLOB) - 1}/{len(BLOB)}"}, BLOB[7:]),
        Answer(206, {}, BLOB[7:]),
        Answer(206, {"Content-Range": "nonsense"}, BLOB),
        Answer(416),
        Answer(501),
        Answer(200, {}, BLOB),
    ],
    ids=["another", "unnamed", "nonsense", "416", "501", "ignored"],
)
def test_a_wrong_content_range_is_refused(bad: Answer, tmp_path: Path) -> None:
    """The blob is then read from the start, and the bytes already received are discarded."""
    once = Once()

    def change(seen: Any, answer: Any) -> Answer | None:
        if is_blob(seen) and once:
            return Answer(200, {"Content-Length": str(len(BLOB))}, BLOB, 500_000)
        return bad if is_blob(seen) and "Range" in seen.headers else None

    store, *_ = pull(changed(change), tmp_path)
    assert store._blobs[Digest.of(BLOB)] == BLOB


@pytest.mark.parametrize(
    ("small", "span"),
    [(len(BLOB), None), (len(BLOB) - 1, f"bytes=0-{len(BLOB) - 1}")],
    ids=["small", "large"],
)
def test_a_large_blob_is_requested_as_a_range(
    small: int, span: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even for the whole blob: the response shows whether the server supports ranges."""
    monkeypatch.setattr(download, "SMALL", small)
    _, _, registry = pull(serving(MANIFEST, BLOBS), tmp_path)
    assert [seen.headers.get("Range") for seen in registry.seen if is_blob(seen)] == [span]


def without_ranges(manifest: bytes, blobs: dict[str, bytes]) -> Callable[[Any], Answer]:
    """Return a script that ignores Range headers."""
    right = serving(manifest, blobs)
    return lambda seen: right(replace(seen, headers={}))


def test_a_server_without_ranges_is_detected_by_its_first_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "SMALL", len(BLOB) - 1)
    with ScriptedRegistry(without_ranges(MANIFEST, BLOBS)).running() as registry:
        name = Reference.parse(f"{registry.host}/team/x:v1")
        with (
            Repository(name, ClientOptions(docker_config=tmp_path)) as repository,
            repository.open(Descriptor.of("", BLOB)) as reader,
        ):
            assert not repository.supports_ranges(Descriptor.of("", BLOB))
            assert reader.read() == BLOB
        assert len(registry.seen) == 1


def test_a_server_without_ranges_gets_one_connection_per_blob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connection has a large blob left while another is idle."""
    monkeypatch.setattr(chunk, "WORTH_SHARING", 0.01)
    large = BLOB * 20
    manifest, blobs = artifact(b"{}", large, *(str(i).encode() for i in range(30)))
    digest, right = Digest.of(large), without_ranges(manifest, blobs)
    left, lock, asked = set(blobs) - {str(digest)}, threading.Lock(), []
    idle, joined = threading.Event(), threading.Event()

    def script(seen: Seen) -> Any:
        if seen.path.endswith(str(digest)):
            asked.append(seen)
            if len(asked) > 1:
                joined.set()
        return right(seen)

    def on_event(event: CopyEvent) -> None:
        if not event.content:
            return
        if event.kind == "done":
            with lock:
                left.discard(str(event.content.digest))
                if not left:
                    idle.set()
        elif event.kind == "progress" and event.content.digest == digest and not idle.is_set():
            assert idle.wait(60)
            joined.wait(0.5)

    with ScriptedRegistry(script).running() as registry:
        name = Reference.parse(f"{registry.host}/team/x:v1")
        layout = ImageLayout(tmp_path / "store")
        with Repository(name, ClientOptions(docker_config=tmp_path)) as repository:
            copy(repository, name, layout, concurrency=2, on_event=on_event)
    assert layout.exists(Descriptor.of("", large))
    assert len(asked) == 1


# -- redirects


def redirecting(answer: Answer) -> Callable[[Any], Answer]:
    """Redirect every blob to the address that ``answer`` gives."""
    right = serving(MANIFEST, BLOBS)

    def script(seen: Any) -> Answer:
        if "/blobs/" in seen.path:
            return answer
        return right(replace(seen, path=seen.path.replace("/there/", "/blobs/")))

    return script


def test_the_body_of_a_redirect_is_not_read_in_full(tmp_path: Path) -> None:
    """A short body is read; it could be endless."""
    headers = {"Location": f"/there/{NAME}", "Content-Length": str(1 << 40)}
    script = redirecting(Answer(307, headers, b"gone", flood=64 << 20))
    with ScriptedRegistry(script).running() as registry:
        name = Reference.parse(f"{registry.host}/team/x:v1")
        with (
            Repository(name, ClientOptions(docker_config=tmp_path)) as repository,
            repository.open(Descriptor.of("", BLOB)) as reader,
        ):
            assert reader.read() == BLOB
    assert registry.flooded < 32 << 20


def test_a_short_redirect_keeps_the_connection(tmp_path: Path) -> None:
    headers = {"Location": f"/there/{NAME}"}
    script = redirecting(Answer(307, headers, b"<a href>elsewhere</a>"))
    with ScriptedRegistry(script).running() as registry:
        name = Reference.parse(f"{registry.host}/team/x:v1")
        with Repository(name, ClientOptions(docker_config=tmp_path)) as repository:
            repository.resolve(name)
            with repository.open(Descriptor.of("", BLOB)) as reader:
                assert reader.read() == BLOB
        assert len({seen.client for seen in registry.seen}) == 1


@pytest.mark.parametrize(
    "location",
    [
        "http://[::1",
        "http://",
        "ftp://h/",
        "http://a..b/",
    ],
)
@pytest.mark.parametrize("what", ["/manifests/", "/blobs/"])
def test_a_redirect_to_an_invalid_url_fails(what: str, location: str, tmp_path: Path) -> None:
    right = serving(MANIFEST, BLOBS)

    def script(seen: Seen) -> Answer:
        return Answer(307, {"Location": location}) if what in seen.path else right(seen)

    with pytest.raises(NetworkError):
        pull(script, tmp_path)


def test_a_connection_that_always_drops_fails(tmp_path: Path) -> None:
    def change(seen: Any, answer: Any) -> Answer | None:
        return Answer(200, {"Content-Length": "9"}, b"", 0) if is_blob(seen) else None

    with pytest.raises(NetworkError, match="ended after 0 of"):
        pull(changed(change), tmp_path)


@pytest.mark.parametrize("status", [429, 502])
@pytest.mark.parametrize("what", ["/manifests/", NAME])
def test_a_transient_error_is_retried(status: int, what: str, tmp_path: Path) -> None:
    once = Once()
    pull(changed(lambda seen, _: Answer(status) if what in seen.path and once else None), tmp_path)


def test_a_permanent_error_includes_the_registry_s_message(tmp_path: Path) -> None:
    body = json.dumps({"errors": [{"code": "UNKNOWN", "message": "the disk burns"}]}).encode()
    with pytest.raises(RegistryError, match=r"500 UNKNOWN for blob .*: the disk burns"):
        pull(changed(lambda seen, _: Answer(500, {}, body) if is_blob(seen) else None), tmp_path)


def test_a_missing_blob_fails(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=NAME):
        pull(changed(lambda seen, _: Answer(404) if is_blob(seen) else None), tmp_path)


@pytest.mark.parametrize(
    "body", [BLOB[:-1] + b"?", BLOB + b"?", BLOB[:-1], b""], ids=["bit", "long", "short", "empty"]
)
def test_wrong_blob_bytes_fail_verification(body: bytes, tmp_path: Path) -> None:
    def change(seen: Any, answer: Any) -> Answer | None:
        return Answer(200, {}, body) if is_blob(seen) and "Range" not in seen.headers else None

    if not body:
        with pytest.raises(NetworkError, match="ended after 0 of"):
            pull(changed(change), tmp_path)
        return
    if body == BLOB[:-1]:  # a short body looks like a dropped connection: the rest is requested
        store, *_ = pull(changed(change), tmp_path)
        assert Digest.parse(NAME) in store._blobs
        return
    if len(body) > len(BLOB):  # the expected bytes are complete; further bytes are not read
        pull(changed(change), tmp_path)
        return
    with pytest.raises(VerificationError, match="digest mismatch"):
        pull(changed(change), tmp_path)


def test_a_manifest_pulled_by_digest_is_verified(tmp_path: Path) -> None:
    digest = Digest.of(MANIFEST)
    reference = "{host}/team/x@" + str(digest)
    _, descriptor, _ = pull(serving(MANIFEST, BLOBS), tmp_path, reference)
    assert descriptor.digest == digest
    other = MANIFEST + b" "
    with pytest.raises(VerificationError, match=str(digest)):
        pull(serving(other, BLOBS), tmp_path, reference)


def test_a_manifest_that_contradicts_its_headers_is_refused(tmp_path: Path) -> None:
    header = KIND | {"Docker-Content-Digest": str(Digest.of(b"other"))}
    script = changed(
        lambda seen, _: Answer(200, header, MANIFEST) if "/manifests/" in seen.path else None
    )
    with pytest.raises(VerificationError, match="with Docker-Content-Digest"):
        pull(script, tmp_path)


def evil(**fields: Any) -> bytes:
    document = json.loads(MANIFEST) | fields
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("manifest", "error"),
    [
        (evil(manifests=[]), FormatError),
        (evil(mediaType="application/vnd.oci.image.index.v1+json"), FormatError),
        (evil(schemaVersion=1), FormatError),
        (b"[" * 100_000, FormatError),
        (b"", RegistryError),
        (b" " * (4 * 1024 * 1024 + 1), VerificationError),
    ],
)
def test_an_invalid_manifest_is_refused(
    manifest: bytes, error: type[AImageError], tmp_path: Path
) -> None:
    with pytest.raises(error):
        pull(serving(manifest, BLOBS), tmp_path)


@pytest.mark.parametrize(
    ("digest", "field"),
    [("sha256:../../../../etc/passwd", "config"), ("", "layers"), (None, "subject"), (7, "config")],
)
def test_a_bad_digest_is_refused_before_any_request(
    digest: str | int | None, field: str, tmp_path: Path
) -> None:
    descriptor = {"mediaType": "text/plain", "digest": digest, "size": 1}
    manifest = evil(**{field: [descriptor] if field == "layers" else descriptor})
    store = MemoryStore()
    with ScriptedRegistry(serving(manifest, BLOBS)).running() as registry:
        name = Reference.parse(f"{registry.host}/x")
        with (
            Repository(name, ClientOptions(docker_config=tmp_path)) as repository,
            pytest.raises(FormatError),
        ):
            copy(repository, name, store)
        assert len(registry.seen) == 1
    assert not store._blobs


@pytest.mark.parametrize("size", [1 << 60, -1, 1.5, "9", None, True])
def test_an_absurd_size_is_refused(size: float | str | None, tmp_path: Path) -> None:
    layer = {"mediaType": "text/plain", "digest": NAME, "size": size}
    with pytest.raises(AImageError):
        pull(serving(evil(layers=[layer]), BLOBS), tmp_path)


def test_a_compressed_manifest_is_decompressed_to_the_limit(tmp_path: Path) -> None:
    header = KIND | {"Content-Encoding": "gzip"}
    bomb = gzip.compress(b" " * 50_000_000)
    with pytest.raises(VerificationError, match="exceeds 4194304 bytes"):
        pull(lambda _: Answer(200, header, bomb), tmp_path)


def test_urls_of_foreign_layers_are_never_followed(tmp_path: Path) -> None:
    """CVE-2020-15157."""
    with ScriptedRegistry(lambda _: Answer(200, {}, BLOB)).running() as other:
        layer = json.loads(MANIFEST)["layers"][0] | {"urls": [f"http://{other.host}/x"]}
        pull(serving(evil(layers=[layer]), BLOBS), tmp_path)
    assert not other.seen
