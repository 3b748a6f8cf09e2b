"""Answers to a pull: honest ones, broken ones, and ones that lie."""

from __future__ import annotations

import gzip
import json
import threading
from dataclasses import replace

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
from clowder_aimage.registry import ClientOptions, Repository, download, retry
from tests.memory_store import MemoryStore
from tests.scripted import Answer, ScriptedRegistry, artifact, serving

BLOB = bytes(range(256)) * 4096  # 1 MiB
MANIFEST, BLOBS = artifact(b"{}", BLOB)
NAME = str(Digest.of(BLOB))
KIND = {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Retries wait; these tests need not."""
    monkeypatch.setitem(retry.retrying.__kwdefaults__, "sleep", lambda _: None)


def pull(script, tmp_path, reference="{host}/team/x:v1"):
    """Pull from a scripted registry into memory; what was asked comes back too."""
    store = MemoryStore()
    with ScriptedRegistry(script).running() as registry:
        name = Reference.parse(reference.format(host=registry.host))
        connection = ClientOptions(docker_config=tmp_path)
        with Repository(name, connection) as repository:
            descriptor = copy(repository, name, store, concurrency=2)
    return store, descriptor, registry


def changed(change):
    """The honest script, with ``change(seen, answer)`` having the last word."""
    right = serving(MANIFEST, BLOBS)

    def script(seen):
        answer = right(seen)
        return change(seen, answer) or answer

    return script


def is_blob(seen):
    return seen.path.endswith(NAME)


class Once:
    """Does something the first time only."""

    def __init__(self):
        self.left = 1

    def __bool__(self):
        self.left -= 1
        return self.left >= 0


def test_an_honest_pull(tmp_path):
    store, descriptor, registry = pull(serving(MANIFEST, BLOBS), tmp_path)
    assert descriptor.digest == Digest.of(MANIFEST)
    assert all(Digest.parse(name) in store._blobs for name in BLOBS)
    assert len([path for path in registry.asked("GET") if "/manifests/" in path]) == 1


@pytest.mark.parametrize("cut", [0, 1, 4096, 1_000_000])
def test_a_dropped_connection_goes_on_where_it_was(cut, tmp_path):
    once = Once()

    def change(seen, answer):
        if is_blob(seen) and once:
            answer.headers["Content-Length"] = str(len(answer.body))
            answer.cut = cut
        return answer

    _, _, registry = pull(changed(change), tmp_path)
    ranges = [seen.headers.get("Range") for seen in registry.seen if is_blob(seen)]
    assert len(ranges) == 2
    start = int(ranges[1].partition("=")[2].partition("-")[0]) if ranges[1] else 0
    assert start <= cut  # nothing is skipped
    assert cut - start <= 1 << 20  # and at most one read is fetched twice


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
def test_a_range_that_is_not_the_one_asked_for_is_never_believed(bad, tmp_path):
    """The rest is then read from the front, and passed over up to where we were."""
    once = Once()

    def change(seen, answer):
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
def test_what_others_may_join_is_asked_for_as_a_range(small, span, tmp_path, monkeypatch):
    """Also where that is all of it: the answer tells what this server does about ranges."""
    monkeypatch.setattr(download, "SMALL", small)
    _, _, registry = pull(serving(MANIFEST, BLOBS), tmp_path)
    assert [seen.headers.get("Range") for seen in registry.seen if is_blob(seen)] == [span]


def without_ranges(manifest, blobs):
    """A script that answers as if nobody had asked for a part."""
    right = serving(manifest, blobs)
    return lambda seen: right(replace(seen, headers={}))


def test_a_server_without_ranges_is_known_by_its_first_answer(tmp_path, monkeypatch):
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


def test_a_server_without_ranges_is_joined_by_nobody(tmp_path, monkeypatch):
    """A slow connection has all of a large blob before it, and another has nothing to do."""
    monkeypatch.setattr(chunk, "WORTH_SHARING", 0.01)
    large = BLOB * 20
    manifest, blobs = artifact(b"{}", large, *(str(i).encode() for i in range(30)))
    digest, right = Digest.of(large), without_ranges(manifest, blobs)
    left, lock, asked = set(blobs) - {str(digest)}, threading.Lock(), []
    idle, joined = threading.Event(), threading.Event()

    def script(seen):
        if seen.path.endswith(str(digest)):
            asked.append(seen)
            if len(asked) > 1:
                joined.set()
        return right(seen)

    def on_event(event):
        if event.kind == "done":
            with lock:
                left.discard(str(event.content.digest))
                if not left:
                    idle.set()
        elif event.kind == "progress" and event.content.digest == digest and not idle.is_set():
            assert idle.wait(20)
            joined.wait(0.5)

    with ScriptedRegistry(script).running() as registry:
        name = Reference.parse(f"{registry.host}/team/x:v1")
        layout = ImageLayout(tmp_path / "store")
        with Repository(name, ClientOptions(docker_config=tmp_path)) as repository:
            copy(repository, name, layout, concurrency=2, on_event=on_event)
    assert layout.exists(Descriptor.of("", large))
    assert len(asked) == 1


# -- redirects


def redirecting(answer):
    """Every blob is elsewhere: where ``answer`` says."""
    right = serving(MANIFEST, BLOBS)

    def script(seen):
        if "/blobs/" in seen.path:
            return answer
        return right(replace(seen, path=seen.path.replace("/there/", "/blobs/")))

    return script


def test_the_body_of_a_redirect_is_not_read_to_its_end(tmp_path):
    """A few words are; it may have no end at all."""
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


def test_a_short_redirect_does_not_cost_a_connection(tmp_path):
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
def test_a_redirect_to_what_is_no_address(what, location, tmp_path):
    right = serving(MANIFEST, BLOBS)

    def script(seen):
        return Answer(307, {"Location": location}) if what in seen.path else right(seen)

    with pytest.raises(NetworkError):
        pull(script, tmp_path)


def test_a_connection_that_always_drops_is_given_up(tmp_path):
    def change(seen, answer):
        return Answer(200, {"Content-Length": "9"}, b"", 0) if is_blob(seen) else None

    with pytest.raises(NetworkError, match="ended after 0 bytes"):
        pull(changed(change), tmp_path)


@pytest.mark.parametrize("status", [429, 502])
@pytest.mark.parametrize("what", ["/manifests/", NAME])
def test_a_passing_error_is_tried_again(status, what, tmp_path):
    once = Once()
    pull(changed(lambda seen, _: Answer(status) if what in seen.path and once else None), tmp_path)


def test_a_lasting_error_is_told_with_what_the_registry_said(tmp_path):
    body = json.dumps({"errors": [{"code": "UNKNOWN", "message": "the disk burns"}]}).encode()
    with pytest.raises(RegistryError, match="500 UNKNOWN the disk burns"):
        pull(changed(lambda seen, _: Answer(500, {}, body) if is_blob(seen) else None), tmp_path)


def test_a_missing_blob(tmp_path):
    with pytest.raises(NotFoundError, match=NAME):
        pull(changed(lambda seen, _: Answer(404) if is_blob(seen) else None), tmp_path)


@pytest.mark.parametrize(
    "body", [BLOB[:-1] + b"?", BLOB + b"?", BLOB[:-1], b""], ids=["bit", "long", "short", "empty"]
)
def test_bytes_that_are_not_the_promised_ones(body, tmp_path):
    def change(seen, answer):
        return Answer(200, {}, body) if is_blob(seen) and "Range" not in seen.headers else None

    if not body:
        with pytest.raises(NetworkError, match="ended after 0 bytes"):
            pull(changed(change), tmp_path)
        return
    if body == BLOB[:-1]:  # it looks like a dropped connection: the rest is asked for
        store, *_ = pull(changed(change), tmp_path)
        assert Digest.parse(NAME) in store._blobs
        return
    if len(body) > len(BLOB):  # the promised bytes were there; what follows is not read
        pull(changed(change), tmp_path)
        return
    with pytest.raises(VerificationError, match="hashes to"):
        pull(changed(change), tmp_path)


def test_a_manifest_by_digest_is_that_digest(tmp_path):
    digest = Digest.of(MANIFEST)
    reference = "{host}/team/x@" + str(digest)
    _, descriptor, _ = pull(serving(MANIFEST, BLOBS), tmp_path, reference)
    assert descriptor.digest == digest
    other = MANIFEST + b" "
    with pytest.raises(VerificationError, match=str(digest)):
        pull(serving(other, BLOBS), tmp_path, reference)


def test_a_manifest_that_is_not_what_its_header_says(tmp_path):
    header = KIND | {"Docker-Content-Digest": str(Digest.of(b"other"))}
    script = changed(
        lambda seen, _: Answer(200, header, MANIFEST) if "/manifests/" in seen.path else None
    )
    with pytest.raises(VerificationError, match="with the header"):
        pull(script, tmp_path)


def evil(**fields):
    document = json.loads(MANIFEST) | fields
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("manifest", "error"),
    [
        (evil(manifests=[]), FormatError),
        (evil(mediaType="application/vnd.oci.image.index.v1+json"), FormatError),
        (evil(schemaVersion=1), FormatError),
        (b"[" * 100_000, FormatError),
        (b"", FormatError),
        (b" " * (4 * 1024 * 1024 + 1), VerificationError),
    ],
)
def test_a_manifest_that_is_none(manifest, error, tmp_path):
    with pytest.raises(error):
        pull(serving(manifest, BLOBS), tmp_path)


@pytest.mark.parametrize(
    ("digest", "field"),
    [("sha256:../../../../etc/passwd", "config"), ("", "layers"), (None, "subject"), (7, "config")],
)
def test_a_bad_digest_is_refused_before_anything_is_asked_for(digest, field, tmp_path):
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
def test_an_absurd_size_is_refused(size, tmp_path):
    layer = {"mediaType": "text/plain", "digest": NAME, "size": size}
    with pytest.raises(AImageError):
        pull(serving(evil(layers=[layer]), BLOBS), tmp_path)


def test_a_compressed_manifest_is_not_unpacked(tmp_path):
    """What we did not ask to be compressed could unpack to anything."""
    header = KIND | {"Content-Encoding": "gzip"}
    bomb = gzip.compress(b" " * 50_000_000)
    with pytest.raises(VerificationError, match="gzip"):
        pull(lambda _: Answer(200, header, bomb), tmp_path)


def test_urls_of_foreign_layers_are_never_followed(tmp_path):
    """CVE-2020-15157."""
    with ScriptedRegistry(lambda _: Answer(200, {}, BLOB)).running() as other:
        layer = json.loads(MANIFEST)["layers"][0] | {"urls": [f"http://{other.host}/x"]}
        pull(serving(evil(layers=[layer]), BLOBS), tmp_path)
    assert not other.seen
