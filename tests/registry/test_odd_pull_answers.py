"""Answers to a pull that differ from the specified ones. What counts is the digest of the bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.content import copy
from clowder_aimage.errors import AImageError, RegistryError, VerificationError
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.host_settings import HostSettings
from clowder_aimage.registry.retry import ATTEMPTS
from tests.memory_store import MemoryStore
from tests.registry.storing import Odd, Storing
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, skip_waiting

CONFIG, BLOB = b"{}", hashlib.shake_128(b"a blob").digest(5000)
MANIFEST, BLOBS = artifact(CONFIG, BLOB)
NAME = str(Digest.of(BLOB))
PART = BLOB[1000:3000]
HTML = {"Content-Type": "text/html"}
PAGE = Answer(200, HTML, b"<html>\nUnder maintenance</html>")
HEALTH = Answer(200, {"Content-Type": "text/plain"}, b"Healthcheck requested")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_waiting(monkeypatch)


def storing(odd: Odd = lambda *_: None) -> Storing:
    return Storing(odd, False, dict(BLOBS), {"v1": MANIFEST, str(Digest.of(MANIFEST)): MANIFEST})


def pull(registry: Storing, tmp_path: Path, *mirrors: str, by_digest: bool = False) -> MemoryStore:
    """Pull the artifact; return the store."""
    store = MemoryStore()
    with ScriptedRegistry(registry).running() as scripted:
        settings = {scripted.host: HostSettings(mirrors=mirrors)}
        connection = ClientOptions(docker_config=tmp_path, registries=settings)
        name = Reference.parse(f"{scripted.host}/team/x:v1")
        name = name.with_digest(Digest.of(MANIFEST)) if by_digest else name
        with Repository(name, connection) as repository:
            copy(repository, name, store, concurrency=1)
    return store


def is_manifest(seen: Seen) -> bool:
    return "/manifests/" in seen.path


def is_blob(seen: Seen) -> bool:
    return seen.path.endswith(NAME)


def is_range(seen: Seen) -> bool:
    return is_blob(seen) and "Range" in seen.headers


def is_whole(seen: Seen) -> bool:
    return is_blob(seen) and "Range" not in seen.headers


def refuse(condition: Callable[[Seen], bool], *answers: Answer, times: int = 1000) -> Odd:
    """Answer ``times`` requests with each of the answers."""
    left = [answer for answer in answers for _ in range(times)]
    return lambda seen, _: left.pop(0) if left and condition(seen) else None


def change(condition: Callable[[Seen], bool], status: int = 0, **headers: str) -> Odd:
    """Answer with the content, and another status or other headers."""

    def odd(seen: Seen, registry: Storing) -> Answer | None:
        if not condition(seen):
            return None
        answer = registry.answer(seen)
        answer.status = status or answer.status
        answer.headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        return answer

    return odd


PULLED: dict[str, Odd] = {
    "manifest answered by a page, once": refuse(is_manifest, PAGE, times=1),
    "manifest answered by a health check, once": refuse(is_manifest, HEALTH, times=1),
    "manifest answered with nothing, once": refuse(is_manifest, Answer(200), times=1),
    "manifest answered 204, once": refuse(is_manifest, Answer(204), times=1),
    "manifest answered 203": change(is_manifest, 203),
    "manifest as a page": change(is_manifest, Content_Type="text/html; charset=utf-8"),
    "manifest as a picture": change(is_manifest, Content_Type="image/png"),
    "manifest with a type in capitals": change(
        is_manifest, Content_Type=mediatype.OCI_MANIFEST.upper()
    ),
    "blob answered by pages, twice": refuse(is_blob, PAGE, HEALTH, times=1),
    "blob answered 203": change(is_blob, 203),
    "blob as a page": change(is_blob, Content_Type="text/html"),
    "blob answered 204, once": refuse(is_blob, Answer(204), times=1),
    "blob answered 206 with all of it": change(
        is_whole, 206, Content_Range=f"bytes 0-{len(BLOB) - 1}/{len(BLOB)}"
    ),
}


@pytest.mark.parametrize("situation", PULLED)
def test_a_pull_succeeds(situation: str, tmp_path: Path) -> None:
    store = pull(storing(PULLED[situation]), tmp_path)
    assert Digest.of(BLOB) in store._blobs


def test_a_wrong_header_beside_the_right_digest_is_ignored(tmp_path: Path) -> None:
    wrong = str(Digest.of(b"other"))
    odd = change(is_manifest, Docker_Content_Digest=wrong)
    assert Digest.of(BLOB) in pull(storing(odd), tmp_path, by_digest=True)._blobs
    with pytest.raises(VerificationError, match="Docker-Content-Digest"):
        pull(storing(odd), tmp_path)


RANGES: dict[str, Odd] = {
    **{
        f"a range answered {status}": refuse(is_range, Answer(status))
        for status in (400, 403, 405, 406, 411, 412, 416, 501)
    },
    "a range answered with all of it": change(is_range, 200),
    "a range answered by pages, twice": refuse(is_range, PAGE, HEALTH, times=1),
    "a range with an empty Content-Range": change(is_range, Content_Range=""),
    "a range answered 200, without a Content-Range": refuse(is_range, Answer(200, {}, PART)),
    "a range answered 206, without a Content-Range": refuse(is_range, Answer(206, {}, PART)),
}


@pytest.mark.parametrize("situation", RANGES)
def test_a_range_is_read(situation: str, tmp_path: Path) -> None:
    def odd(seen: Seen, registry: Storing) -> Answer | None:
        if situation.endswith("all of it") and is_range(seen):
            return Answer(200, {}, BLOB)
        return RANGES[situation](seen, registry)

    with ScriptedRegistry(storing(odd)).running() as scripted:
        name = Reference.parse(f"{scripted.host}/team/x:v1")
        with Repository(name, ClientOptions(docker_config=tmp_path)) as repository:
            content = Descriptor.of("application/vnd.example.blob", BLOB)
            with repository.open(content, 1000, 2000) as reader:
                assert reader.read() == PART


FAILURES: dict[str, tuple[Odd, type[AImageError], str]] = {
    "manifest": (
        refuse(is_manifest, PAGE),
        RegistryError,
        "answered 200 OK for manifest .*: Under maintenance",
    ),
    "blob": (
        refuse(is_blob, HEALTH),
        RegistryError,
        "answered 200 OK for blob .*: Healthcheck requested",
    ),
}


@pytest.mark.parametrize("situation", FAILURES)
def test_a_pull_fails_with_the_text_of_the_page(situation: str, tmp_path: Path) -> None:
    odd, kind, text = FAILURES[situation]
    count = []

    def counted(seen: Seen, registry: Storing) -> Answer | None:
        answer = odd(seen, registry)
        count.extend([seen] * (answer is not None))
        return answer

    with pytest.raises(kind, match=text):
        pull(storing(counted), tmp_path)
    assert len(count) == ATTEMPTS


@pytest.mark.parametrize("page", [PAGE, HEALTH], ids=["page", "health check"])
def test_a_page_of_a_mirror_leads_to_the_registry(page: Answer, tmp_path: Path) -> None:
    with ScriptedRegistry(lambda _: page).running() as mirror:
        assert Digest.of(BLOB) in pull(storing(), tmp_path, mirror.host)._blobs
