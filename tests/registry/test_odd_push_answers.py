"""Answers to a push that differ from the specified ones, from registries and what is before them.

What counts is the content that the registry has afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.content import build_bytes_body, copy
from clowder_aimage.errors import (
    AImageError,
    ManifestRefusedError,
    RegistryError,
    UnauthorizedError,
)
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.registry import ClientOptions, Repository, upload
from clowder_aimage.registry.retry import ATTEMPTS
from tests.memory_store import MemoryStore
from tests.registry.storing import Odd, Storing
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, skip_waiting

CONFIG, BLOB = b"{}", hashlib.shake_128(b"a blob").digest(3 * 4096 + 5)
MANIFEST, _ = artifact(CONFIG, BLOB)
HEALTH = Answer(200, {}, b"Healthcheck requested")
OTHER_DIGEST = {"Docker-Content-Digest": str(Digest.of(b"other"))}
PAGE = Answer(200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>\nSign in</html>")
LOGIN = Answer(302, {"Location": "https://login.example/?state=secret"}, b"<html>Found</html>")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the waits, and use chunks of some KiB in place of MiB."""
    skip_waiting(monkeypatch)
    monkeypatch.setattr(upload, "FIRST_CHUNK", 8192)
    monkeypatch.setattr(upload, "SMALLEST_CHUNK", 1024)


def is_put(seen: Seen, kind: str = "/manifests/") -> bool:
    return seen.method == "PUT" and kind in seen.path


def push(registry: Storing, tmp_path: Path) -> ScriptedRegistry:
    """Push an artifact with a config and a blob."""
    store = MemoryStore()
    for blob in (CONFIG, BLOB):
        content = Descriptor.of("application/vnd.example.blob", blob)
        store.push(content, build_bytes_body(blob))
    name = Reference(None, "x", "v1")
    root = Descriptor.of(mediatype.OCI_MANIFEST, MANIFEST)
    store.push(root, build_bytes_body(MANIFEST), name)
    with ScriptedRegistry(registry).running() as scripted:
        target = Reference.parse(f"{scripted.host}/team/x:v1")
        connection = ClientOptions(docker_config=tmp_path, patience=0.1)
        with Repository(target, connection) as repository:
            copy(store, name, repository, target, concurrency=1)
    return scripted


def is_complete(registry: Storing) -> bool:
    digests = {str(Digest.of(blob)) for blob in (CONFIG, BLOB)}
    return registry.manifests.get("v1") == MANIFEST and digests <= registry.blobs.keys()


def accept(condition: Callable[[Seen], bool], answer: Answer) -> Odd:
    """Do what is requested, and answer otherwise."""

    def odd(seen: Seen, registry: Storing) -> Answer | None:
        if not condition(seen):
            return None
        registry.answer(seen)
        return answer

    return odd


def refuse(condition: Callable[[Seen], bool], *answers: Answer, times: int = 1 << 30) -> Odd:
    """Answer ``times`` requests otherwise, without doing what is requested."""
    left = [answer for answer in answers for _ in range(min(times, 1000))]

    def odd(seen: Seen, _: Storing) -> Answer | None:
        return left.pop(0) if left and condition(seen) else None

    return odd


def is_post(seen: Seen) -> bool:
    return seen.method == "POST"


def is_blob_put(seen: Seen) -> bool:
    return is_put(seen, "/upload?")


def is_patch(seen: Seen) -> bool:
    return seen.method == "PATCH"


def is_blob_head(seen: Seen) -> bool:
    return seen.method == "HEAD" and "/blobs/" in seen.path


def is_blob_read(seen: Seen) -> bool:
    return seen.method in ("HEAD", "GET") and "/blobs/" in seen.path


def is_offset(seen: Seen) -> bool:
    return seen.method == "GET" and seen.path == "/upload"


def either(first: Odd, second: Odd) -> Odd:
    return lambda seen, registry: first(seen, registry) or second(seen, registry)


def lose(condition: Callable[[Seen], bool]) -> Odd:
    """End the connection without an answer, as proxies do that refuse a body."""

    def odd(seen: Seen, _: Storing) -> Answer | None:
        if condition(seen):
            raise ConnectionResetError
        return None

    return odd


def accept_and_lose(condition: Callable[[Seen], bool]) -> Odd:
    """Do what is requested, and end the connection without an answer."""

    def odd(seen: Seen, registry: Storing) -> Answer | None:
        if condition(seen):
            registry.answer(seen)
            raise ConnectionResetError
        return None

    return odd


def begin_with(status: int) -> Odd:
    return accept(is_post, Answer(status, {"Location": "/upload"}))


PUSHED: dict[str, Odd] = {
    **{
        f"manifest PUT answered {status}": accept(is_put, Answer(status))
        for status in (200, 202, 203, 204, 206, 500, 502, 504)
    },
    "manifest PUT ends the connection, but stored": accept_and_lose(is_put),
    "manifest PUT answered by a page, once": refuse(is_put, PAGE, times=1),
    "manifest PUT answered by a page, but stored": accept(is_put, PAGE),
    "manifest PUT redirected to a login, once": refuse(is_put, LOGIN, times=1),
    "manifest PUT answered 202, stored the second time": refuse(is_put, Answer(202), times=1),
    **{
        f"blob PUT answered {status}": accept(is_blob_put, Answer(status))
        for status in (200, 202, 204, 409)
    },
    "blob PUT answered by a page, once": refuse(is_blob_put, HEALTH, PAGE, times=1),
    "blob PUT redirected, but stored": accept(is_blob_put, LOGIN),
    "manifest PUT answered with another digest": accept(is_put, Answer(201, OTHER_DIGEST)),
    "upload begun with 200": begin_with(200),
    "upload begun with 201": begin_with(201),
    "upload begun with 204": begin_with(204),
    "POST answered by a health check, once": refuse(is_post, HEALTH, times=1),
    "POST answered by pages": refuse(is_post, HEALTH, PAGE, LOGIN, times=1),
    "POST answered 202 without a Location, once": refuse(is_post, Answer(202), times=1),
    **{
        f"HEAD of a blob answered {status}": refuse(is_blob_head, Answer(status))
        for status in (400, 403, 405, 406, 500, 501, 503)
    },
    "HEAD of a blob answered by a page": refuse(is_blob_head, PAGE),
    "HEAD of a blob ends the connection": lose(is_blob_head),
    "HEAD of a blob redirected without end": refuse(is_blob_head, Answer(302)),
    **{
        f"HEAD and GET of a blob answered {status}": refuse(is_blob_read, Answer(status))
        for status in (400, 403, 405)
    },
    **{
        f"PUT with a body answered {status}": refuse(
            lambda seen: is_blob_put(seen) and bool(seen.body), Answer(status)
        )
        for status in (400, 405, 411, 415, 501)
    },
    "bodies above 2 KiB end the connection": lose(lambda seen: len(seen.body) > 2048),
    "bodies above 2 KiB are answered 400": refuse(lambda seen: len(seen.body) > 2048, Answer(400)),
    "bodies above 2 KiB are answered 504": refuse(lambda seen: len(seen.body) > 2048, Answer(504)),
    "bodies above 2 KiB are answered 413": refuse(lambda seen: len(seen.body) > 2048, Answer(413)),
}


@pytest.mark.parametrize("situation", PUSHED)
def test_a_push_succeeds(situation: str, tmp_path: Path) -> None:
    registry = Storing(PUSHED[situation])
    push(registry, tmp_path)
    assert is_complete(registry)


PATCHED: dict[str, Odd] = {
    "PATCH answered 200": accept(is_patch, Answer(200, {"Location": "/upload"})),
    "PATCH answered 201": accept(is_patch, Answer(201)),
    "PATCH answered by a page, once": refuse(is_patch, PAGE, times=1),
    "PATCH answered by a health check, once": refuse(is_patch, HEALTH, times=1),
    **{
        f"PATCH answered {status}": refuse(is_patch, Answer(status))
        for status in (400, 403, 405, 411, 415, 416, 501)
    },
    **{
        f"PATCH above 2 KiB answered {status}": refuse(
            lambda seen: is_patch(seen) and len(seen.body) > 2048, Answer(status)
        )
        for status in (400, 403, 405, 416)
    },
    **{
        f"PATCH above 2 KiB answered {status}, PUT 413": either(
            refuse(lambda seen: is_patch(seen) and len(seen.body) > 2048, Answer(status)),
            refuse(lambda seen: is_blob_put(seen) and len(seen.body) > 2048, Answer(413)),
        )
        for status in (400, 403, 413, 416)
    },
    "PATCH unsupported": refuse(
        is_patch, Answer(405, {}, b'{"errors": [{"code": "UNSUPPORTED"}]}')
    ),
    "offset answered by a page, once": either(
        refuse(is_patch, Answer(502), times=1), refuse(is_offset, HEALTH, times=1)
    ),
}


@pytest.mark.parametrize("situation", PATCHED)
def test_a_push_in_patches_succeeds(
    situation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "RESUMABLE", 4096)
    monkeypatch.setattr(upload, "LARGEST_PUT", 4096)
    registry = Storing(PATCHED[situation])
    push(registry, tmp_path)
    assert is_complete(registry)


def answer_error(status: int, code: str, message: str) -> Answer:
    error = f'{{"errors": [{{"code": "{code}", "message": "{message}"}}]}}'
    return Answer(status, {"Content-Type": "application/json"}, error.encode())


DENIED = answer_error(403, "DENIED", "requested access to the resource is denied")
FAILURES: dict[str, tuple[Odd, type[AImageError], str, int]] = {
    "POST answered by health checks": (
        refuse(is_post, HEALTH),
        RegistryError,
        "answered 200 OK for the upload of blob .*: Healthcheck requested",
        ATTEMPTS,
    ),
    "POST redirected to a login": (
        refuse(is_post, LOGIN),
        RegistryError,
        r"302 Found for the upload .*: a redirect to https://login.example/\?state=\.\.\.$",
        ATTEMPTS,
    ),
    "manifest PUT answered by pages": (
        refuse(is_put, PAGE),
        RegistryError,
        "answered 200 OK for manifest .*: Sign in",
        ATTEMPTS,
    ),
    "manifest PUT answered 202, never stored": (
        refuse(is_put, Answer(202)),
        RegistryError,
        "answered 202 Accepted for manifest",
        ATTEMPTS,
    ),
    "manifest PUT answered with the digest of what is stored instead": (
        refuse(is_put, Answer(201, OTHER_DIGEST)),
        RegistryError,
        "answered 201 Created for manifest",
        ATTEMPTS,
    ),
    "blob PUT answered by pages": (
        refuse(is_blob_put, PAGE),
        RegistryError,
        "answered 200 OK for the upload .*: Sign in",
        ATTEMPTS,
    ),
    "no permission": (
        refuse(lambda _: True, DENIED),
        UnauthorizedError,
        "denied access to the upload",
        1,
    ),
    "no permission, without a code": (
        refuse(lambda _: True, Answer(403)),
        UnauthorizedError,
        "denied access to the upload",
        1,
    ),
    "too many requests, by 403": (
        refuse(is_post, Answer(403, {"Retry-After": "3600"}, b'{"message": "secondary limit"}')),
        RegistryError,
        "answered 403 Forbidden for the upload",
        1,
    ),
    "too many requests, by 403 without a time": (
        refuse(is_post, Answer(403, {}, b'{"message": "You have exceeded a rate limit"}')),
        RegistryError,
        "answered 403 Forbidden for the upload",
        1,
    ),
    "neither method is accepted": (
        refuse(lambda seen: is_patch(seen) or is_blob_put(seen), Answer(405)),
        RegistryError,
        "answered 405 Method Not Allowed for the upload",
        1,
    ),
}


@pytest.mark.parametrize("situation", FAILURES)
def test_a_push_fails_with_the_text_of_the_answer(situation: str, tmp_path: Path) -> None:
    odd, kind, text, attempts = FAILURES[situation]
    registry, seen = Storing(odd), list[Seen]()

    def record(request: Seen, storing: Storing) -> Answer | None:
        answer = odd(request, storing)
        seen.extend([request] * (answer is not None and request.method in ("POST", "PUT")))
        return answer

    registry.odd = record
    with pytest.raises(kind, match=text):
        push(registry, tmp_path)
    assert len(seen) == attempts
    assert not is_complete(registry)


IMMUTABLE = {
    "ECR": answer_error(400, "TAG_INVALID", "the image tag already exists and is immutable"),
    "Harbor": answer_error(412, "PRECONDITION", "configured as immutable, cannot be updated"),
    "Quay": answer_error(409, "TAG_IMMUTABLE", "tag v1 is immutable"),
    "as a refused kind": answer_error(400, "MANIFEST_INVALID", "cannot overwrite the tag"),
    "Artifactory": answer_error(403, "DENIED", "not enough permissions to overwrite"),
    "locked": Answer(405),
    "without a body": Answer(409),
}


@pytest.mark.parametrize("name", IMMUTABLE)
def test_an_immutable_tag_with_this_digest_is_pushed(name: str, tmp_path: Path) -> None:
    registry = Storing()
    push(registry, tmp_path)
    registry.odd = refuse(is_put, IMMUTABLE[name])
    seen = push(registry, tmp_path)
    # The blobs by HEAD, the manifest by a PUT and a GET
    assert [request.method for request in seen.seen] == ["HEAD", "HEAD", "PUT", "GET"]


@pytest.mark.parametrize("name", IMMUTABLE)
def test_an_immutable_tag_with_another_digest_stays(name: str, tmp_path: Path) -> None:
    registry = Storing(refuse(is_put, IMMUTABLE[name]))
    other, _ = artifact(CONFIG)
    registry.manifests["v1"] = other
    with pytest.raises((RegistryError, UnauthorizedError)) as caught:
        push(registry, tmp_path)
    assert not isinstance(caught.value, ManifestRefusedError)
    assert registry.manifests["v1"] == other


def test_a_push_asks_nothing_more_of_a_registry_that_answers_as_specified(tmp_path: Path) -> None:
    seen = push(Storing(), tmp_path)
    methods = [request.method for request in seen.seen]
    assert methods == [*["HEAD", "POST", "PUT"] * 2, "PUT"]


@pytest.mark.parametrize("answer", [Answer(403), Answer(200), PAGE], ids=["403", "empty", "page"])
def test_the_size_of_a_blob_is_known_without_head(answer: Answer, tmp_path: Path) -> None:
    odd = refuse(is_blob_head, answer)
    registry = Storing(odd, False, {str(Digest.of(BLOB)): BLOB})
    with ScriptedRegistry(registry).running() as scripted:
        name = Reference.parse(f"{scripted.host}/team/x:v1")
        with Repository(name, ClientOptions(docker_config=tmp_path)) as repository:
            content = Descriptor.of("application/vnd.example.blob", BLOB)
            assert repository.fetch_size(content.digest) == len(BLOB)
            assert repository.exists(content)
            assert not repository.exists(Descriptor.of("application/vnd.example.blob", b"no"))


def test_a_refused_head_is_not_repeated_for_each_blob(tmp_path: Path) -> None:
    seen = push(Storing(refuse(is_blob_head, Answer(403))), tmp_path)
    assert len(seen.asked("HEAD")) == 1


def is_deletion(seen: Seen) -> bool:
    return seen.method == "DELETE"


DELETIONS: dict[str, tuple[Odd, str]] = {
    # What the registry does, and the error
    **{
        f"deleted, {status}": (accept(is_deletion, Answer(status)), "")
        for status in (200, 202, 204, 404, 500, 502, 504)
    },
    "deleted, a page": (accept(is_deletion, PAGE), ""),
    "deleted, the answer is lost": (accept_and_lose(is_deletion), ""),
    "404, not deleted": (refuse(is_deletion, Answer(404)), "404"),
    "502, not deleted": (refuse(is_deletion, Answer(502)), "answered 502"),
    "no permission": (refuse(is_deletion, Answer(403)), "denied access to the deletion"),
    "an immutable tag": (
        refuse(is_deletion, answer_error(412, "PRECONDITION", "configured as immutable")),
        "answered 412",
    ),
    "the connection is lost, not deleted": (lose(is_deletion), "lost"),
    "200 with a page, not deleted": (refuse(is_deletion, PAGE), "answered 200 OK for the deletion"),
    "200, not deleted": (refuse(is_deletion, HEALTH), "answered 200 OK for the deletion"),
}


@pytest.mark.parametrize("by", ["tag", "digest"])
@pytest.mark.parametrize("name", DELETIONS)
def test_a_deletion_is_confirmed(name: str, by: str, tmp_path: Path) -> None:
    odd, text = DELETIONS[name]
    registry = Storing()
    push(registry, tmp_path)
    registry.odd = odd
    with ScriptedRegistry(registry).running() as scripted:
        reference = Reference.parse(f"{scripted.host}/team/x:v1")
        if by == "digest":
            reference = reference.with_digest(Digest.of(MANIFEST))
        with Repository(reference, ClientOptions(docker_config=tmp_path)) as repository:
            if not text:
                repository.delete(reference)
            else:
                with pytest.raises(AImageError, match=text) as caught:
                    repository.delete(reference)
                assert "another tag" not in (caught.value.hint or "")
    assert (reference.target in registry.manifests) == bool(text)
