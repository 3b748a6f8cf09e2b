"""Registries that answer otherwise than specified about referrers, and tags that have other uses.

Lists, attached manifests, copies and deletions use the same way, whatever the registry answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.attach import attach
from clowder_aimage.errors import AImageError, NetworkError, RegistryError, UnauthorizedError
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.push import transfer
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.referrers import UnlistedReferrerError, build_tag
from tests.registry.storing import Odd, Storing
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, skip_waiting

MANIFEST, BLOBS = artifact(b"{}")
SUBJECT = Digest.of(MANIFEST)
TAG = build_tag(SUBJECT)
PAGE = {"Content-Type": "text/html"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_waiting(monkeypatch)


def lose(seen: Seen, _: Storing) -> Answer | None:
    """End the connection without an answer, as firewalls do."""
    if is_list(seen):
        raise ConnectionResetError
    return None


def storing(odd: Odd, *, has_api: bool = False) -> Storing:
    """Return a registry with the subject under the tag v1."""
    manifests = {"v1": MANIFEST, str(SUBJECT): MANIFEST}
    return Storing(odd, has_api, dict(BLOBS), manifests)


def is_list(seen: Seen) -> bool:
    return "/referrers/" in seen.path


def is_tag(seen: Seen) -> bool:
    return "/manifests/sha256-" in seen.path


def answer(condition: Callable[[Seen], bool], reply: Answer) -> Odd:
    return lambda seen, _: reply if condition(seen) else None


class Client:
    """A client that opens a new session for each operation."""

    def __init__(self, host: str, tmp_path: Path) -> None:
        self.name = Reference.parse(f"{host}/team/x:v1")
        self._directory = tmp_path
        self.connection = ClientOptions(docker_config=tmp_path, patience=0.1)

    def attach(self, text: str) -> Digest:
        """Attach a file to the subject."""
        file = self._directory / "file"
        file.write_text(text)
        return attach(self.name, [file], self.connection, artifact_type="a/b")[0].digest

    def list(self) -> list[Digest]:
        """Return the digests of the subject's referrers."""
        with Repository(self.name, self.connection) as repository:
            return [entry.digest for entry in repository.list_referrers(SUBJECT)]

    def delete(self, digest: Digest) -> None:
        """Delete a manifest."""
        with Repository(self.name, self.connection) as repository:
            repository.delete(self.name.with_digest(digest))


def index(*entries: dict[str, object], **fields: object) -> bytes:
    document = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": entries}
    return json.dumps(document | fields).encode()


def entry(raw: bytes = MANIFEST, **fields: object) -> dict[str, object]:
    return {**Descriptor.of(mediatype.OCI_MANIFEST, raw).to_json(), **fields}


LINUX = {"os": "linux", "architecture": "amd64"}
IMAGES = index(entry(platform=LINUX))
EMPTY = "an empty index"
REFUSALS = {
    "400": Answer(400, JSON, b'{"errors": [{"code": "UNSUPPORTED"}]}'),
    "401": Answer(401, PAGE),
    "403": Answer(403, PAGE),
    "404 with a page": Answer(404, PAGE, b"<html>Not Found</html>"),
    "405": Answer(405),
    "406": Answer(406),
    "410": Answer(410),
    "414": Answer(414),
    "500": Answer(500, PAGE, b"<html>Error</html>"),
    "501": Answer(501),
    "a page": Answer(200, PAGE, b"<html>The registry's interface</html>"),
    "a page of JSON type": Answer(200, JSON, b"<html></html>"),
    "no content": Answer(204),
    "a text": Answer(200, {}, b"ok"),
    "a redirect to a login": Answer(302, {"Location": "/login"}),
    "JSON that is no index": Answer(200, JSON, b'{"status": "ok"}'),
    "a JSON list": Answer(200, JSON, b"[]"),
    "the subject": Answer(200, {"Content-Type": mediatype.OCI_MANIFEST}, MANIFEST),
    "an index of images": Answer(200, {"Content-Type": mediatype.OCI_INDEX}, IMAGES),
    EMPTY: Answer(200, {"Content-Type": mediatype.OCI_INDEX}, index()),
}


@pytest.mark.parametrize(
    ("situation", "has_header"),
    # With the header, an API that does not list the manifest yet is believed.
    [(name, has) for name in REFUSALS for has in (False, True) if not has or name != EMPTY],
)
def test_all_operations_use_the_tag(situation: str, has_header: bool, tmp_path: Path) -> None:
    registry = storing(answer(is_list, REFUSALS[situation]), has_api=has_header)
    with ScriptedRegistry(registry).running() as scripted:
        client = Client(scripted.host, tmp_path)
        first, second = client.attach("one"), client.attach("two")
        assert client.attach("one") == first
        assert client.list() == [first, second]
        target = Reference.parse(f"{scripted.host}/team/y:v1")
        transfer(client.name, target, client.connection, recursive=True)
        client.delete(first)
        assert client.list() == [second]


def test_nothing_is_attached_where_the_api_is_refused(tmp_path: Path) -> None:
    for situation in REFUSALS.keys() - {"500"}:
        registry = storing(answer(is_list, REFUSALS[situation]))
        with ScriptedRegistry(registry).running() as scripted:
            assert Client(scripted.host, tmp_path).list() == []


def test_an_api_that_ends_connections_is_refused(tmp_path: Path) -> None:
    with ScriptedRegistry(storing(lose)).running() as scripted:
        client = Client(scripted.host, tmp_path)
        with pytest.raises(NetworkError):
            client.list()
        attached = client.attach("one")
        assert client.list() == [attached]


FAILURES: dict[str, tuple[Odd, type[AImageError], str]] = {
    "denied, as the tag is": (
        answer(lambda seen: is_list(seen) or is_tag(seen), Answer(403)),
        UnauthorizedError,
        "denied access to referrers of sha256:",
    ),
    "500, and nothing under the tag": (
        answer(is_list, Answer(500)),
        RegistryError,
        "answered 500 .* for referrers of sha256:",
    ),
    "an outage": (
        answer(is_list, Answer(503)),
        RegistryError,
        "answered 503 .* for referrers of sha256:",
    ),
    "a page for the tag": (
        answer(is_tag, Answer(200, PAGE, b"<html>Sign in</html>")),
        RegistryError,
        "answered 200 OK for the referrers index sha256-.*: Sign in",
    ),
}


@pytest.mark.parametrize("situation", FAILURES)
def test_a_failure_is_not_an_empty_list(situation: str, tmp_path: Path) -> None:
    odd, kind, text = FAILURES[situation]
    with (
        ScriptedRegistry(storing(odd)).running() as scripted,
        pytest.raises(kind, match=text),
    ):
        Client(scripted.host, tmp_path).list()


TAKEN = {
    "the subject": MANIFEST,
    "another manifest": artifact(b"{}", b"other")[0],
    "an index of images": IMAGES,
    "an index of images, as docker writes it": index(
        entry(platform=LINUX), mediaType=mediatype.DOCKER_MANIFEST_LIST
    ),
    "an index with an artifact type": index(artifactType="application/x"),
    "an index with a subject": index(subject=entry()),
}


@pytest.mark.parametrize("situation", TAKEN)
def test_a_tag_with_other_content_is_neither_listed_nor_changed(
    situation: str, tmp_path: Path
) -> None:
    registry = storing(lambda *_: None)
    registry.manifests[TAG] = TAKEN[situation]
    with ScriptedRegistry(registry).running() as scripted:
        client = Client(scripted.host, tmp_path)
        assert client.list() == []
        with pytest.raises(UnlistedReferrerError, match=r"was pushed, .* has other content") as e:
            client.attach("one")
        assert client.list() == []
        transfer(
            client.name,
            Reference.parse(f"{scripted.host}/team/y:v1"),
            client.connection,
            recursive=True,
        )
    assert registry.manifests[TAG] == TAKEN[situation]
    pushed = str(e.value).partition(" ")[0]
    assert json.loads(registry.manifests[pushed])["subject"]["digest"] == str(SUBJECT)


def test_a_tag_that_is_resolved_to_the_subject_is_no_list(tmp_path: Path) -> None:
    """As at GitLab: the tag is taken for the digest."""

    def odd(seen: Seen, registry: Storing) -> Answer | None:
        if is_tag(seen) and seen.method in ("GET", "HEAD"):
            digest = seen.path.rpartition("/")[2].replace("-", ":")
            return registry.read(seen, digest)
        return None

    registry = storing(odd)
    registry.manifests["v1"] = registry.manifests[str(Digest.of(IMAGES))] = IMAGES
    with ScriptedRegistry(registry).running() as scripted:
        client = Client(scripted.host, tmp_path)
        with Repository(client.name, client.connection) as repository:
            assert repository.list_referrers(Digest.of(IMAGES)) == []
        with pytest.raises(UnlistedReferrerError):
            client.attach("one")
    assert not [name for name in registry.manifests if name.startswith("sha256-")]


def test_an_immutable_tag_of_referrers_is_named(tmp_path: Path) -> None:
    def odd(seen: Seen, registry: Storing) -> Answer | None:
        is_fixed = seen.path.rpartition("/")[2] in registry.manifests
        is_moved = seen.method == "PUT" and is_tag(seen) and is_fixed
        return Answer(400, JSON, b'{"errors": [{"code": "TAG_INVALID"}]}') if is_moved else None

    registry = storing(odd)
    with ScriptedRegistry(registry).running() as scripted:
        client = Client(scripted.host, tmp_path)
        first = client.attach("one")
        assert client.attach("one") == first
        with pytest.raises(UnlistedReferrerError, match=f"refuses to change the tag {TAG}"):
            client.attach("two")
        with pytest.raises(
            UnlistedReferrerError, match="was deleted, but this registry still lists it"
        ):
            client.delete(first)
        assert client.list() == [first]


def test_an_api_without_the_header_needs_no_tag(tmp_path: Path) -> None:
    def odd(seen: Seen, registry: Storing) -> Answer | None:
        reply = registry.answer(seen)
        reply.headers.pop("OCI-Subject", None)
        return reply

    registry = storing(odd, has_api=True)
    with ScriptedRegistry(registry).running() as scripted:
        client = Client(scripted.host, tmp_path)
        attached = client.attach("one")
        assert client.list() == [attached]
    assert TAG not in registry.manifests


def test_a_copy_goes_on_where_referrers_cannot_be_listed(tmp_path: Path) -> None:
    source = storing(lambda *_: None)
    taken = artifact(b"{}", b"other")[0]
    target = Storing(manifests={TAG: taken})
    with (
        ScriptedRegistry(source).running() as one,
        ScriptedRegistry(target).running() as other,
    ):
        client = Client(one.host, tmp_path)
        attached = [client.attach(text) for text in ("one", "two")]
        name = Reference.parse(f"{other.host}/team/x:v1")
        with pytest.raises(UnlistedReferrerError):
            transfer(client.name, name, client.connection, recursive=True)
    assert target.manifests["v1"] == MANIFEST
    assert {str(digest) for digest in attached} <= target.manifests.keys()
    assert target.manifests[TAG] == taken


def test_a_refused_tag_is_named(tmp_path: Path) -> None:
    registry = storing(answer(is_tag, Answer(400)))
    with ScriptedRegistry(registry).running() as scripted:
        client = Client(scripted.host, tmp_path)
        with pytest.raises(UnlistedReferrerError, match=f"cannot list .* index {TAG}"):
            client.attach("one")


def test_a_registry_with_the_api_needs_no_tag(tmp_path: Path) -> None:
    registry = storing(answer(is_tag, Answer(403)), has_api=True)
    with ScriptedRegistry(registry).running() as scripted:
        client = Client(scripted.host, tmp_path)
        attached = client.attach("one")
        assert client.list() == [attached]
        client.delete(attached)
    assert str(attached) not in registry.manifests


def test_an_index_of_artifacts_with_platforms_and_types_is_a_list(tmp_path: Path) -> None:
    registry = storing(lambda *_: None)
    registry.manifests[TAG] = index(entry(b"one", artifactType="a/b", platform=LINUX))
    with ScriptedRegistry(registry).running() as scripted:
        assert Client(scripted.host, tmp_path).list() == [Digest.of(b"one")]
