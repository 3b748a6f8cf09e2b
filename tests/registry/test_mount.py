"""Mounts: candidate repositories, and all responses to a mount request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.content.copy_option import CopyOptions
from clowder_aimage.errors import RegistryError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.push import push
from clowder_aimage.registry import ClientOptions, MountHolders, MountOrigins, Repository
from clowder_aimage.registry.mount import (
    CANDIDATES,
    LEARNED_AFTER,
    list_sibling_repositories,
)
from tests.memory_store import MemoryStore
from tests.registry.storing import Storing
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, skip_waiting

BLOB = Descriptor.of("application/octet-stream", b"a blob")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_waiting(monkeypatch)


class Taking:
    """A registry that accepts blobs, and answers mounts by ``mount(from)``."""

    def __init__(self, mount: Any) -> None:
        self.mount = mount
        self.asked: list[Any] = []

    def __call__(self, seen: Any) -> Any:
        query = parse_qs(urlsplit(seen.path).query)
        if seen.method == "POST" and "mount" in query:
            self.asked.append(query["from"][0])
            return self.mount(query["from"][0])
        if seen.method == "POST":
            return Answer(202, {"Location": "/upload/plain"})
        return Answer(201 if seen.method == "PUT" else 404)


def sent(
    mount: Callable[[Any], Answer],
    tmp_path: Path,
    *places: str,
    blobs: tuple[bytes, ...] = (b"a blob",),
) -> tuple[list[Any], list[str], list[Any], ScriptedRegistry]:
    """Push blobs with candidates ``places``; return the requests and events."""
    told: list[Any] = []
    script = Taking(mount)
    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/team/x:v1")
        origins = MountOrigins(lambda digest: places, told.append)
        with Repository(reference, ClientOptions(docker_config=tmp_path), origins) as repository:
            for blob in blobs:
                content = Descriptor.of("application/octet-stream", blob)
                repository.push(content, build_bytes_body(blob))
                assert repository.exists(content)
    puts = [urlsplit(path).path for path in registry.asked("PUT")]
    return script.asked, puts, [event.kind for event in told], registry


def test_a_mounted_blob_is_not_sent(tmp_path: Path) -> None:
    asked, puts, told, registry = sent(lambda _: Answer(201), tmp_path, "a/b")
    assert (asked, puts, told) == (["a/b"], [], ["skip"])
    (seen,) = registry.seen
    assert seen.path == (
        f"/v2/team/x/blobs/uploads/?mount=sha256%3A{BLOB.digest.encoded}&from=a%2Fb"
    )


def test_a_202_response_continues_as_an_upload(tmp_path: Path) -> None:
    answer = Answer(202, {"Location": "/upload/mount?state=1"})
    asked, puts, told, registry = sent(lambda _: answer, tmp_path, "a/b")
    assert (asked, puts, told) == (["a/b"], ["/upload/mount"], [])
    assert [seen.body for seen in registry.seen if seen.method == "PUT"] == [b"a blob"]
    assert len(registry.asked("POST")) == 1


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_refused_mount_falls_back_to_an_upload(status: int, tmp_path: Path) -> None:
    asked, puts, told, _ = sent(
        lambda _: Answer(status), tmp_path, "a/b", blobs=(b"one", b"two", b"three")
    )
    assert set(asked) == {"a/b"}
    assert len(asked) == (2 if status == 401 else 1)  # each repository is tried once
    assert (puts, told) == (["/upload/plain"] * 3, [])


def test_a_refused_mount_tries_the_next_candidate(tmp_path: Path) -> None:
    def mount(place: Any) -> Answer:
        return Answer(201 if place == "good" else 403)

    asked, puts, *_ = sent(mount, tmp_path, "bad", "good", blobs=(b"one", b"two"))
    assert (asked, puts) == (["bad", "good", "good"], [])


def test_a_repository_without_a_blob_is_tried_last(tmp_path: Path) -> None:
    def mount(place: Any) -> Answer:
        return Answer(201) if place == "full" else Answer(202, {"Location": "/upload/mount"})

    asked, puts, *_ = sent(mount, tmp_path, "empty", "full", blobs=(b"one", b"two", b"three"))
    assert asked == ["empty", "full", "full"]
    assert puts == ["/upload/mount"]


def test_the_number_of_candidates_is_limited(tmp_path: Path) -> None:
    places = [f"p{i}" for i in range(20)]
    asked, puts, *_ = sent(lambda _: Answer(404), tmp_path, *places)
    assert asked == places[:CANDIDATES]
    assert len(puts) == 1


def test_an_upload_that_fails_after_a_mount_is_retried(tmp_path: Path) -> None:
    left = [1]

    def script(seen: Seen) -> Answer:
        if seen.method == "POST":
            return Answer(202, {"Location": "/upload"})
        return Answer(503) if left and left.pop() else Answer(201)

    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/x")
        origins = MountOrigins(lambda digest: ["a"])
        with Repository(reference, ClientOptions(docker_config=tmp_path), origins) as repository:
            repository.push(BLOB, build_bytes_body(b"a blob"))
    assert [seen.body for seen in registry.seen if seen.method == "PUT"] == [b"a blob"] * 2


def test_a_refused_upload_without_a_mount_fails(tmp_path: Path) -> None:
    with (
        ScriptedRegistry(lambda _: Answer(405)).running() as registry,
        pytest.raises(RegistryError, match="405"),
    ):
        reference = Reference.parse(f"{registry.host}/x")
        origins = MountOrigins(lambda digest: ["a"])
        with Repository(reference, ClientOptions(docker_config=tmp_path), origins) as repository:
            repository.push(BLOB, build_bytes_body(b"a blob"))


@pytest.mark.parametrize("grants", [True, False], ids=["granted", "denied"])
def test_a_token_without_the_source_scope(grants: bool, tmp_path: Path) -> None:
    """The service issues tokens for the target only; a wider request gets that scope or none."""

    def script(seen: Seen) -> Answer:
        path, _, query = seen.path.partition("?")
        if path == "/token":
            if "other" in query and not grants:
                return Answer(403)
            return Answer(200, {}, json.dumps({"token": "for-x"}).encode())
        scope = "repository:x:pull,push"
        if "mount=" in query:
            scope += " repository:other:pull"
        elif seen.headers.get("Authorization") == "Bearer for-x":
            if seen.method == "POST":
                return Answer(202, {"Location": "/upload"})
            return Answer(201)
        realm = f"http://{seen.headers['Host']}/token"
        challenge = f'Bearer realm="{realm}",service="s",scope="{scope}"'
        return Answer(401, {"WWW-Authenticate": challenge})

    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/x")
        origins = MountOrigins(lambda digest: ["other"])
        with Repository(reference, ClientOptions(docker_config=tmp_path), origins) as repository:
            for data in (b"a blob", b"another"):
                repository.push(Descriptor.of("text/plain", data), build_bytes_body(data))
    bodies = [seen.body for seen in registry.seen if seen.path.startswith("/upload")]
    assert {b"a blob", b"another"} <= set(bodies)
    assert [path for path in registry.asked("POST") if "mount=" in path]


def manifest(*blobs: bytes) -> Manifest:
    raw, _ = artifact(*blobs)
    return Manifest.parse(raw)


def test_sibling_repositories_are_distinct_and_of_one_registry() -> None:
    content = manifest(b"{}").descriptor
    other = manifest(b"{}", b"x").descriptor
    index = Descriptor(mediatype.OCI_INDEX, Digest.of(b"index"), 5)
    names = [
        ("r.example/a:1", content),
        ("r.example/a:2", content),  # the same manifest
        ("r.example/a:3", other),
        ("r.example/me:old", content),  # the target itself, already checked with HEAD
        ("r.example:5000/b", content),  # another registry
        ("local", content),
        ("r.example/c", index),
        ("Not A Name", content),
    ]
    target = Reference.parse("r.example/me:new")
    assert list_sibling_repositories(names, target) == [("a", content), ("a", other)]


def test_the_store_is_read_lazily_and_once(tmp_path: Path) -> None:
    layout = ImageLayout(tmp_path / "store")
    target = Reference.parse("r.example/new:v1")
    reads = []

    class Counting(MemoryStore):
        def list_tags(self) -> Iterator[tuple[str, Descriptor]]:
            reads.append(1)
            yield from layout.list_tags()

        open = staticmethod(layout.open)

    found = MountHolders(Counting(), target)  # type: ignore[arg-type]
    assert not reads
    made = manifest(b"{}", b"layer")
    layout.push(Descriptor.of("x", b"{}"), build_bytes_body(b"{}"))
    layout.push(Descriptor.of("x", b"layer"), build_bytes_body(b"layer"))
    for name in ("r.example/old:v1", "r.example/older:v1"):
        layout.push(made.descriptor, build_bytes_body(made.raw), Reference.parse(name))
    (tmp_path / "gone").write_bytes(b"")
    broken = manifest(b"broken")
    for blob in (broken.raw, b"broken"):
        layout.push(Descriptor.of("x", blob), build_bytes_body(blob))
    layout.tag(broken.descriptor, Reference.parse("r.example/broken:v1"))
    path = layout.find_path(broken.descriptor)
    path.chmod(0o644)
    path.write_bytes(b"rubbish")  # must not affect a push of another manifest
    assert list(found(Digest.of(b"layer"))) == ["old", "older"]
    assert list(found(Digest.of(b"unknown"))) == []
    assert reads == [1]


def test_a_push_mounts_blobs_of_other_stored_names(tmp_path: Path) -> None:
    made = manifest(b"{}", b"layer")
    script = Taking(lambda place: Answer(201))
    with ScriptedRegistry(script).running() as registry:
        layout = ImageLayout(tmp_path / "store")
        for blob in (b"{}", b"layer"):
            layout.push(Descriptor.of("x", blob), build_bytes_body(blob))
        target = Reference.parse(f"{registry.host}/new:v1")
        for name in (f"{registry.host}/old:v1", str(target), "local:v1"):
            layout.push(made.descriptor, build_bytes_body(made.raw), Reference.parse(name))
        push(layout, target, ClientOptions(docker_config=tmp_path))
    assert script.asked == ["old", "old"]
    assert registry.asked("PUT") == ["/v2/new/manifests/v1"]


@pytest.mark.parametrize("status", [400, 404])
@pytest.mark.parametrize("is_mounted", [True, False])
def test_a_blob_that_a_mount_did_not_bring_is_uploaded(
    status: int, is_mounted: bool, tmp_path: Path
) -> None:
    """Distribution 2.8 answers 201 to a mount of a sha512 blob, and does not have it then."""
    blobs: set[str] = set()
    unknown = {"errors": [{"code": "MANIFEST_BLOB_UNKNOWN", "message": "blob unknown"}]}

    def script(seen: Seen) -> Answer:
        query = parse_qs(urlsplit(seen.path).query)
        if seen.method == "POST":
            is_mount = "mount" in query
            return Answer(201) if is_mount else Answer(202, {"Location": "/upload"})
        if "/manifests/" in seen.path and seen.method == "PUT":
            needed = {str(child.digest) for child in Manifest.parse(seen.body).children}
            return Answer(201 if needed <= blobs else status, {}, json.dumps(unknown).encode())
        if seen.method == "PUT":
            # Only this kind of registry is at fault that has no blob without a mount.
            blobs.update(query["digest"] if is_mounted else [])
            return Answer(201)
        return Answer(200 if seen.path.rpartition("/")[2] in blobs else 404)

    raw, contents = artifact(b"{}", b"weights")
    layout = ImageLayout(tmp_path / "store")
    for content in contents.values():
        layout.push(Descriptor.of("application/octet-stream", content), build_bytes_body(content))
    with ScriptedRegistry(script).running() as registry:
        names = [Reference.parse(f"{registry.host}/{name}:v1") for name in ("team/x", "team/y")]
        for name in names[: 2 if is_mounted else 1]:
            layout.push(Descriptor.of(mediatype.OCI_MANIFEST, raw), build_bytes_body(raw), name)
        connection = ClientOptions(docker_config=tmp_path)
        if is_mounted:
            assert push(layout, names[0], connection).digest == Digest.of(raw)
        else:
            # There was no mount to blame: the error is not hidden by a second attempt.
            with pytest.raises(RegistryError, match="MANIFEST_BLOB_UNKNOWN"):
                push(layout, names[0], connection)
        puts = [path for path in registry.asked("PUT") if "/manifests/" in path]
        assert len(puts) == (2 if is_mounted else 1)


# Answers to a mount from the own repository of a blob that is missing, and of one that is there
HAS, LACKS = Answer(201), Answer(202, {"Location": "/upload"})
OWN_MOUNTS: dict[str, tuple[Answer, Answer, bool]] = {
    "right": (LACKS, HAS, True),
    "never": (LACKS, LACKS, False),
    "always": (HAS, HAS, False),
    "refused": (Answer(405), Answer(405), False),
    "refused later": (LACKS, Answer(404), False),
}
COUNT = 20


def push_many(
    mount: Callable[[bool], Answer], tmp_path: Path, stored: int = 0, is_repeated: bool = False
) -> tuple[list[Seen], Storing, list[Any]]:
    """Push ``COUNT`` blobs one at a time, the last ones of which a registry has."""
    store, told = MemoryStore(), list[Any]()
    blobs = [Descriptor.of("x/y", b"%d" % number) for number in range(COUNT)]
    for number, blob in enumerate(blobs):
        store.push(blob, build_bytes_body(b"%d" % number))

    def odd(seen: Seen, registry: Storing) -> Answer | None:
        query = parse_qs(urlsplit(seen.path).query)
        if "mount" not in query:
            return None
        assert query["from"] == ["team/x"]
        registry.received = b""
        return mount(query["mount"][0] in registry.blobs)

    script = Storing(odd)
    script.blobs |= {str(blob.digest): b"x" for blob in blobs[COUNT - stored :] if stored}
    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/team/x:v1")
        origins = MountOrigins(on_event=told.append)
        with Repository(reference, ClientOptions(docker_config=tmp_path), origins) as repository:
            repository.receive(store, blobs, CopyOptions(1, told.append))
            if is_repeated:
                assert repository.stop_mounting()
                repository.receive(store, blobs, CopyOptions(1))
        return registry.seen, script, told


@pytest.mark.parametrize("case", OWN_MOUNTS)
def test_mounts_replace_head_requests_where_they_are_answered_rightly(
    case: str, tmp_path: Path
) -> None:
    absent, present, is_used = OWN_MOUNTS[case]
    seen, script, _ = push_many(lambda stored: present if stored else absent, tmp_path)
    assert len(script.blobs) == COUNT
    asked = LEARNED_AFTER + 1 if is_used else COUNT
    assert sum(request.method == "HEAD" for request in seen) == asked
    mounts = [request for request in seen if "mount=" in request.path]
    assert len(mounts) == (COUNT - LEARNED_AFTER + 1 if is_used else 1 + (absent is LACKS))
    # An upload that was begun in vain is cancelled
    assert any(request.method == "DELETE" for request in seen) == (case == "never")


def test_a_blob_that_is_there_is_mounted_from_its_repository(tmp_path: Path) -> None:
    seen, _, told = push_many(lambda stored: HAS if stored else LACKS, tmp_path, stored=3)
    skipped = {event.content.digest for event in told if event.kind == "skip"}
    assert len(skipped) == 3
    assert sum(request.method == "PUT" for request in seen) == COUNT - 3


def test_blobs_of_mounts_that_were_confirmed_wrongly_are_sent(tmp_path: Path) -> None:
    answers = iter([LACKS, HAS])
    _, script, _ = push_many(lambda _: next(answers, HAS), tmp_path, is_repeated=True)
    assert len(script.blobs) == COUNT
