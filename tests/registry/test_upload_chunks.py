"""Chunked uploads and their resumption, with strict and forgetful registries.

Tests with a real registry: tests/e2e/test_upload_faults.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clowder_aimage.content import build_bytes_body, copy
from clowder_aimage.errors import NetworkError, RegistryError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import ClientOptions, Repository, upload
from clowder_aimage.registry.host_settings import HostSettings
from clowder_aimage.registry.retry import ATTEMPTS
from tests.memory_store import MemoryStore
from tests.scripted import Answer, ScriptedRegistry, artifact, skip_waiting

if TYPE_CHECKING:
    from clowder_aimage.content.copy_option import CopyEvent


UNIT = 256 * 1024
BLOB = hashlib.shake_128(b"a blob in pieces").digest(6 * UNIT + 123)
SIZE = len(BLOB)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the delay between retries."""
    skip_waiting(monkeypatch)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use chunks of 4, 1 and 0.25 units in place of 64, 16, 4 and 1 MiB."""
    monkeypatch.setattr(upload, "FIRST_CHUNK", 4 * UNIT)
    monkeypatch.setattr(upload, "SMALLEST_CHUNK", UNIT // 4)


@dataclass
class Strict:
    """A registry that accepts bodies of up to ``limit`` bytes, in order, and reports its offset.

    ``fails(seen)`` answers first; ``keeps(count)`` is the number of bytes kept of a chunk;
    ``least`` is the minimum chunk size, except for the last.
    """

    limit: int = 1 << 40
    least: int = 0
    fails: Any = lambda seen: None
    keeps: Any = lambda count: count
    here: bytearray = field(default_factory=bytearray)
    blobs: dict[str, bytes] = field(default_factory=dict)
    begun: int = 0
    sizes: list[int] = field(default_factory=list)

    def __call__(self, seen: Any) -> Any:
        path, _, query = seen.path.partition("?")
        answer = self.fails(seen)
        if answer is not None:
            return answer
        if seen.method == "POST":
            self.begun += 1
            self.here.clear()
            return self.where(202, begun=True)
        if "/upload/" not in path:
            encoded = path.rpartition(":")[2]
            return Answer(201 if seen.method == "PUT" else 200 if encoded in self.blobs else 404)
        if path != f"/upload/{self.begun}":
            return Answer(404)
        if seen.method == "GET":
            return self.where(204)
        return self.take(seen, query)

    def where(self, status: int, *, begun: bool = False) -> Answer:
        headers = {
            "Location": f"/upload/{self.begun}",
            "Range": f"0-{max(0, len(self.here) - 1)}",
        }
        if begun and self.least:
            headers["OCI-Chunk-Min-Length"] = str(self.least)
        return Answer(status, headers)

    def take(self, seen: Any, query: Any) -> Answer:
        if len(seen.body) > self.limit:
            return Answer(413)
        span = seen.headers.get("Content-Range")
        if span is not None:
            start, end = map(int, span.split("-"))
            if start != len(self.here) or end - start + 1 != len(seen.body):
                return Answer(416, self.where(416).headers)
        elif self.here and seen.body:
            return Answer(416, self.where(416).headers)
        self.sizes.append(len(seen.body))
        if seen.method == "PATCH":
            self.here += seen.body[: self.keeps(len(seen.body))]
            return self.where(202)
        self.here += seen.body
        encoded = hashlib.sha256(self.here).hexdigest()
        if query.rpartition("%3A")[2] != encoded:
            return Answer(400, {}, b'{"errors": [{"code": "DIGEST_INVALID"}]}')
        self.blobs[encoded] = bytes(self.here)
        return Answer(201)


def push(strict: Strict, tmp_path: Path, *blobs: bytes, chunk: int = 0) -> ScriptedRegistry:
    """Push an artifact of blobs from a layout; return the registry.

    ``chunk`` is the largest body that it is known to accept.
    """
    raw, _ = artifact(b"{}", *blobs)
    layout = ImageLayout(tmp_path / "store")
    here = Reference(None, "x", "v1")
    store = MemoryStore()
    for blob in (b"{}", *blobs):
        content = Descriptor.of("application/vnd.example.blob", blob)
        layout.push(content, build_bytes_body(blob))
        store.push(content, build_bytes_body(blob))
    manifest = Descriptor.of("application/vnd.oci.image.manifest.v1+json", raw)
    layout.push(manifest, build_bytes_body(raw), here)
    counts = []
    with ScriptedRegistry(strict).running() as registry:
        name = Reference.parse(f"{registry.host}/team/x:v1")

        def on_event(event: CopyEvent) -> None:
            if event.kind == "progress" and event.content and event.content.size > UNIT:
                counts.append(event.count)

        settings = {registry.host: HostSettings(chunk_size=chunk)}
        connection = ClientOptions(docker_config=tmp_path, registries=settings)
        with Repository(name, connection) as target:
            copy(layout, here, target, name, concurrency=1, on_event=on_event)
    for blob in blobs:
        assert strict.blobs[hashlib.sha256(blob).hexdigest()] == blob
    total = sum(len(blob) for blob in blobs)
    assert sum(counts) == max(sum(counts[: i + 1]) for i in range(len(counts))) == total
    return registry


def pieces(registry: ScriptedRegistry) -> list[Any]:
    """Return the method, range and size of every request with bytes of a large blob."""
    return [
        (seen.method, seen.headers.get("Content-Range"), len(seen.body))
        for seen in registry.seen
        if "/upload/" in seen.path and len(seen.body) > UNIT // 8
    ]


# -- too large


def test_chunks_are_sent_in_order(tmp_path: Path) -> None:
    """As ghcr.io requires: at most 4 units, each starting where the previous ended."""
    registry = push(Strict(limit=4 * UNIT), tmp_path, BLOB)
    assert pieces(registry) == [
        ("PUT", None, SIZE),
        ("PATCH", f"0-{4 * UNIT - 1}", 4 * UNIT),
        ("PUT", f"{4 * UNIT}-{SIZE - 1}", SIZE - 4 * UNIT),
    ]


def test_the_learned_chunk_size_is_used_for_the_next_blob(tmp_path: Path) -> None:
    """The limit of a registry is probed once."""
    other = BLOB[::-1]
    registry = push(Strict(limit=UNIT), tmp_path, BLOB, other)
    sizes = [size for _, _, size in pieces(registry)]
    assert sizes == [SIZE, 4 * UNIT, *[UNIT] * 6, *[UNIT] * 6]


@pytest.mark.parametrize("limit", [UNIT // 4, UNIT // 4 + 1, UNIT - 1])
def test_every_chunk_size_is_tried(limit: int, tmp_path: Path) -> None:
    """All sizes are tried, whatever their number; they do not count as failed attempts."""
    registry = push(Strict(limit=limit), tmp_path, BLOB)
    sizes = [size for _, _, size in pieces(registry)]
    assert sizes[:3] == [SIZE, 4 * UNIT, UNIT]
    assert set(sizes[3:]) == {UNIT // 4}


def test_a_limit_below_the_smallest_chunk_fails(tmp_path: Path) -> None:
    strict = Strict(limit=UNIT // 8)
    with pytest.raises(RegistryError, match="413"):
        push(strict, tmp_path, BLOB)
    assert strict.begun <= 5
    assert not strict.blobs


@pytest.mark.parametrize("least", [UNIT // 2, 3 * UNIT])
def test_the_minimum_chunk_size_is_respected(least: int, tmp_path: Path) -> None:
    """Chunks lie between the minimum and the limit; the last may be smaller."""
    strict = Strict(limit=4 * UNIT - 1, least=least)
    push(strict, tmp_path, BLOB)
    *body, last = [size for size in strict.sizes if size > 2]
    assert min(body) >= least
    assert sum(body) + last == SIZE


def test_a_minimum_chunk_size_above_the_limit_fails(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="413"):
        push(Strict(limit=UNIT, least=2 * UNIT), tmp_path, BLOB)


@pytest.mark.parametrize("least", ["-1", "x", "", "9" * 40])
def test_an_invalid_minimum_chunk_size_is_ignored(least: Any, tmp_path: Path) -> None:
    strict = Strict(limit=4 * UNIT)
    strict.least = least
    push(strict, tmp_path, BLOB)


def test_a_minimum_chunk_size_does_not_cause_chunking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry that accepts any size gets a large blob in one request."""
    monkeypatch.setattr(upload, "RESUMABLE", 2 * UNIT)
    monkeypatch.setattr(upload, "LARGEST_PUT", 2 * UNIT)
    registry = push(Strict(least=UNIT), tmp_path, BLOB)
    assert pieces(registry) == [("PATCH", None, SIZE)]


@pytest.mark.parametrize(
    ("chunk", "least", "sizes"),
    [
        (2 * UNIT, UNIT, [2 * UNIT] * 3),
        (UNIT, 2 * UNIT, [2 * UNIT] * 3),
        (UNIT, 4 * UNIT, [4 * UNIT, SIZE - 4 * UNIT]),
        (2 * UNIT, 0, [2 * UNIT] * 3),
    ],
    ids=["largest", "smallest", "rest", "any"],
)
def test_the_minimum_chunk_size_overrides_the_configured_size(
    chunk: int, least: int, sizes: list[int], tmp_path: Path
) -> None:
    """If they contradict each other, the registry's own header is used."""
    registry = push(Strict(least=least), tmp_path, BLOB, chunk=chunk)
    assert [size for method, _, size in pieces(registry) if method == "PATCH"] == sizes


# -- where it is


def test_a_partially_kept_chunk_is_continued_at_the_offset(tmp_path: Path) -> None:
    """The registry reports its offset, and the upload continues there."""
    strict = Strict(limit=UNIT, keeps=lambda count: count - count // 3)
    registry = push(strict, tmp_path, BLOB)
    starts = [int(span.partition("-")[0]) for _, span, _ in pieces(registry)[2:]]
    kept = UNIT - UNIT // 3
    assert starts == [kept * i for i in range(len(starts))]
    assert strict.begun == 4  # whole, 4 units, 1 unit, which was continued; and the config


def failing(condition: Callable[[Any], Any], *answers: Answer) -> Callable[[Any], Answer | None]:
    """Return answers to the first requests that satisfy the condition."""
    left = list(answers)

    def fails(seen: Any) -> Answer | None:
        return left.pop(0) if left and condition(seen) else None

    return fails


def test_a_416_response_queries_the_offset(tmp_path: Path) -> None:
    """Bytes of an earlier, broken request arrived and are not sent again."""
    strict = Strict(limit=UNIT)

    def fails(seen: Any) -> Answer | None:
        if seen.headers.get("Content-Range", "").startswith(f"{2 * UNIT}-"):
            strict.here += seen.body[: UNIT // 2]  # received, then disconnected
            strict.fails = lambda _: None
            return Answer(502)
        return None

    strict.fails = fails
    registry = push(strict, tmp_path, BLOB)
    starts = [int((span or "0-").partition("-")[0]) for _, span, _ in pieces(registry)[2:]]
    assert starts[:5] == [0, UNIT, 2 * UNIT, 2 * UNIT + UNIT // 2, 3 * UNIT + UNIT // 2]


def test_a_missing_upload_is_restarted(tmp_path: Path) -> None:
    strict = Strict(limit=UNIT)

    def fails(seen: Any) -> Answer | None:
        if seen.headers.get("Content-Range", "").startswith(f"{2 * UNIT}-"):
            strict.begun += 1  # the old location is unknown now
            strict.fails = lambda _: None
            return Answer(502)
        return None

    strict.fails = fails
    registry = push(strict, tmp_path, BLOB)
    starts = [int((span or "0-").partition("-")[0]) for _, span, _ in pieces(registry)[2:]]
    assert starts == [0, UNIT, 2 * UNIT, *range(0, 6 * UNIT, UNIT)]


def test_a_registry_that_keeps_losing_uploads_fails(tmp_path: Path) -> None:
    """Reaching the same offset after a loss is not progress."""
    strict = Strict(limit=UNIT)
    asked = []

    def fails(seen: Any) -> Answer | None:
        if seen.headers.get("Content-Range", "").startswith(f"{2 * UNIT}-"):
            asked.append(seen)
            assert len(asked) < 50
            strict.begun += len(asked) % 2  # everything is lost every other time
            return Answer(502)
        return None

    strict.fails = fails
    with pytest.raises(RegistryError, match="502"):
        push(strict, tmp_path, BLOB)
    assert len(asked) <= ATTEMPTS + 1


def test_a_repeated_416_response_fails(tmp_path: Path) -> None:
    strict = Strict(limit=UNIT)
    asked = []

    def fails(seen: Any) -> Answer | None:
        if seen.headers.get("Content-Range", "").startswith(f"{2 * UNIT}-"):
            asked.append(seen)
            return Answer(416)
        return None

    strict.fails = fails
    with pytest.raises(NetworkError, match="is at another offset"):
        push(strict, tmp_path, BLOB)
    # Two chunks of a unit, and three of the smallest size
    assert len(asked) == 5


@pytest.mark.parametrize("said", ["0-999999999", "bytes=0-x", "7-9", "", "0-" + "9" * 30])
def test_an_invalid_offset_is_ignored(said: str, tmp_path: Path) -> None:
    """An offset outside the blob's size is not used."""
    strict = Strict()
    fails = failing(lambda seen: seen.method == "PUT" and len(seen.body) > UNIT, Answer(502))
    answer = failing(lambda seen: seen.method == "GET", Answer(204, {"Range": said}))
    strict.fails = lambda seen: fails(seen) or answer(seen)
    push(strict, tmp_path, BLOB)


@pytest.mark.parametrize("form", ["0-{}", "bytes=0-{}"])
def test_both_forms_of_a_range_are_parsed(form: str, tmp_path: Path) -> None:
    strict = Strict()

    def fails(seen: Any) -> Answer | None:
        if seen.method == "PUT" and len(seen.body) > UNIT and not strict.here:
            strict.here += seen.body[: 5 * UNIT]
            return Answer(503)
        if seen.method == "GET" and "/upload/" in seen.path:
            where = form.format(len(strict.here) - 1)
            return Answer(204, {"Range": where, "Location": f"/upload/{strict.begun}"})
        return None

    strict.fails = fails
    registry = push(strict, tmp_path, BLOB)
    assert pieces(registry)[-1] == ("PUT", f"{5 * UNIT}-{SIZE - 1}", SIZE - 5 * UNIT)


@pytest.mark.parametrize("extra", ["", "other=1&"])
def test_a_failed_offset_query_is_retried_once(extra: str, tmp_path: Path) -> None:
    """Then a new upload begins, as the registry may never answer."""
    strict = Strict()
    puts = failing(lambda seen: seen.method == "PUT" and len(seen.body) > UNIT, Answer(502))
    gets = failing(lambda seen: seen.method == "GET", Answer(500), Answer(500))
    strict.fails = lambda seen: puts(seen) or gets(seen)
    registry = push(strict, tmp_path, BLOB)
    asked = [seen for seen in registry.seen if seen.method == "GET" and "/upload/" in seen.path]
    assert len(asked) == 2


def test_an_upload_whose_last_response_was_lost_is_not_repeated(tmp_path: Path) -> None:
    """The upload is complete and the blob exists."""
    strict = Strict()

    def fails(seen: Any) -> Answer | None:
        if seen.method == "PUT" and len(seen.body) > UNIT:
            strict.blobs[hashlib.sha256(seen.body).hexdigest()] = seen.body
            strict.begun += 1
            return Answer(504)
        return None

    strict.fails = fails
    registry = push(strict, tmp_path, BLOB)
    assert pieces(registry) == [("PUT", None, SIZE)]


# -- uploads that the registry lost


def forgetting(
    method: Any, status: int, then: Callable[[Any], None] = lambda seen: None
) -> Callable[[Any], Any]:
    """Answer the first large request of a method with an unknown upload, after ``then``."""
    answer = failing(lambda seen: seen.method == method and len(seen.body) > UNIT, Answer(status))

    def fails(seen: Any) -> Any:
        found = answer(seen)
        if found is not None:
            then(seen)
        return found

    return fails


@pytest.fixture(params=["PUT", "PATCH"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the method of a large upload."""
    if request.param == "PATCH":
        monkeypatch.setattr(upload, "RESUMABLE", 2 * UNIT)
        monkeypatch.setattr(upload, "LARGEST_PUT", 2 * UNIT)
    return request.param


@pytest.mark.parametrize("status", [404, 410])
def test_a_lost_upload_is_restarted(method: Any, status: int, tmp_path: Path) -> None:
    registry = push(Strict(fails=forgetting(method, status)), tmp_path, BLOB)
    assert pieces(registry) == [(method, None, SIZE)] * 2
    first, second = [number for number, seen in enumerate(registry.seen) if len(seen.body) > UNIT]
    between = [(seen.method, "/upload/" in seen.path) for seen in registry.seen[first + 1 : second]]
    assert between == [("HEAD", False), ("POST", False)]  # the offset is not queried


@pytest.mark.parametrize("status", [404, 410])
def test_a_lost_upload_whose_blob_exists_is_complete(
    method: Any, status: int, tmp_path: Path
) -> None:
    """A request whose response was lost completed it, or another client did."""
    encoded = hashlib.sha256(BLOB).hexdigest()
    strict = Strict()
    strict.fails = forgetting(
        method, status, then=lambda seen: strict.blobs.update({encoded: seen.body})
    )
    registry = push(strict, tmp_path, BLOB)
    assert pieces(registry) == [(method, None, SIZE)]
    large = next(number for number, seen in enumerate(registry.seen) if len(seen.body) > UNIT)
    assert registry.seen[large + 1].method == "HEAD"
    assert registry.seen[large + 1].path.endswith(encoded)


@pytest.mark.parametrize("status", [404, 410])
def test_a_registry_that_loses_every_upload_fails_with_a_hint(
    method: Any, status: int, tmp_path: Path
) -> None:
    """The hint names a load balancer before registries without shared storage."""
    strict = Strict()

    def fails(seen: Any) -> Answer | None:
        assert strict.begun < 50
        return Answer(status) if seen.method == method and len(seen.body) > UNIT else None

    strict.fails = fails
    with pytest.raises(NetworkError, match="the upload of blob sha256:") as raised:
        push(strict, tmp_path, BLOB)
    assert strict.begun == ATTEMPTS
    assert "load balancer" in str(raised.value.hint)


@pytest.mark.parametrize("status", [404, 410])
def test_a_registry_that_loses_each_upload_after_a_chunk_fails(status: int, tmp_path: Path) -> None:
    """Accepting the first chunk each time is not progress."""
    strict = Strict()

    def fails(seen: Any) -> Answer | None:
        assert strict.begun < 50
        second = seen.headers.get("Content-Range", "").startswith(f"{2 * UNIT}-")
        return Answer(status) if second else None

    strict.fails = fails
    with pytest.raises(NetworkError, match="the upload of blob sha256:"):
        push(strict, tmp_path, BLOB, chunk=2 * UNIT)
    assert strict.begun == ATTEMPTS


def closing(strict: Strict, *, stored: bool) -> Callable[[Any], Answer | None]:
    """Answer a PUT without a body with 504 once; the blob may exist or not."""

    def fails(seen: Any) -> Answer | None:
        if seen.method != "PUT" or seen.body or len(strict.here) != SIZE:
            return None
        if stored:
            strict.blobs[hashlib.sha256(strict.here).hexdigest()] = bytes(strict.here)
        strict.fails = lambda _: None
        return Answer(504)

    return fails


def after_the_last_byte(registry: ScriptedRegistry) -> list[Any]:
    """Return the requests after the last byte of a large blob."""
    large = max(number for number, seen in enumerate(registry.seen) if len(seen.body) > UNIT)
    return [
        (seen.method, "/upload/" in seen.path)
        for seen in registry.seen[large + 1 :]
        if "manifests" not in seen.path
    ]


def test_a_completed_upload_is_not_completed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload still exists with all bytes, and so does the blob."""
    monkeypatch.setattr(upload, "RESUMABLE", 2 * UNIT)
    monkeypatch.setattr(upload, "LARGEST_PUT", 2 * UNIT)
    strict = Strict()
    strict.fails = closing(strict, stored=True)
    registry = push(strict, tmp_path, BLOB)
    asked = after_the_last_byte(registry)
    assert asked[:3] == [("PUT", True), ("GET", True), ("HEAD", False)]
    assert [step for step in asked[3:] if step[0] == "PUT"] == [("PUT", True)]  # the config's


def test_the_blob_is_checked_before_the_upload_is_completed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "RESUMABLE", 2 * UNIT)
    monkeypatch.setattr(upload, "LARGEST_PUT", 2 * UNIT)
    strict = Strict()
    strict.fails = closing(strict, stored=False)
    registry = push(strict, tmp_path, BLOB)
    assert after_the_last_byte(registry)[:4] == [
        *(("PUT", True), ("GET", True), ("HEAD", False), ("PUT", True))
    ]
    assert pieces(registry) == [("PATCH", None, SIZE)]


@pytest.mark.parametrize("location", ["http://[::1", "http://h:99999999/"])
@pytest.mark.parametrize("when", ["POST", "PATCH"])
def test_an_invalid_location_in_an_upload_fails(
    when: str, location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not retried: another attempt would not help."""
    monkeypatch.setattr(upload, "RESUMABLE", 2 * UNIT)
    monkeypatch.setattr(upload, "LARGEST_PUT", 2 * UNIT)
    strict = Strict()
    strict.fails = lambda seen: Answer(202, {"Location": location}) if seen.method == when else None
    with pytest.raises(RegistryError, match="invalid URL"):
        push(strict, tmp_path, BLOB)
    assert strict.begun == (when == "PATCH")


# -- other methods


def test_a_large_blob_is_sent_by_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PATCH without a range, as docker sends it, and an empty PUT."""
    monkeypatch.setattr(upload, "RESUMABLE", 2 * UNIT)
    monkeypatch.setattr(upload, "LARGEST_PUT", 2 * UNIT)
    registry = push(Strict(), tmp_path, BLOB)
    assert pieces(registry) == [("PATCH", None, SIZE)]
    assert b"" in [seen.body for seen in registry.seen if seen.method == "PUT"]


def test_a_large_blob_is_sent_by_put_until_a_connection_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registries may drop an upload whose PUT broke; the bytes of a PATCH are kept."""
    monkeypatch.setattr(upload, "RESUMABLE", 2 * UNIT)
    assert pieces(push(Strict(), tmp_path / "whole", BLOB)) == [("PUT", None, SIZE)]
    strict = Strict()
    strict.fails = failing(lambda seen: seen.method == "PUT" and len(seen.body) > UNIT, Answer(502))
    sent = pieces(push(strict, tmp_path / "broken", BLOB))
    assert [method for method, _, _ in sent] == ["PUT", "PATCH"]


def test_a_damaged_blob_in_chunks_fails_without_retry(tmp_path: Path) -> None:
    """The registry detects it, and the error names the local copy."""
    strict = Strict(limit=UNIT)

    def spoiled(seen: Any) -> None:
        path = ImageLayout(tmp_path / "store").find_path(Descriptor.of("", BLOB))
        path.chmod(0o644)
        path.write_bytes(BLOB[: 3 * UNIT] + b"?" + BLOB[3 * UNIT + 1 :])
        strict.fails = lambda _: None

    strict.fails = spoiled
    with pytest.raises(VerificationError, match="digest mismatch"):
        push(strict, tmp_path, BLOB)
    assert list(strict.blobs.values()) in ([], [b"{}"])
    assert strict.sizes.count(UNIT) == 6
