"""Referrers: the API, the tag schema without it, and malformed responses of both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.attach import attach
from clowder_aimage.content.graph import build_referrer_entry
from clowder_aimage.errors import FormatError, NotFoundError, RegistryError, UsageError
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype, parse_document
from clowder_aimage.oci.artifact import build_artifact
from clowder_aimage.oci.manifest import encode
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.referrers import build_tag, with_entry
from clowder_aimage.registry.retry import ATTEMPTS
from tests.scripted import Answer, ScriptedRegistry, artifact, skip_waiting

SUBJECT, BLOBS = artifact(b"{}")
DIGEST = Digest.of(SUBJECT)
KIND = {"Content-Type": mediatype.OCI_MANIFEST}
INDEX = {"Content-Type": mediatype.OCI_INDEX}
SBOM, REPORT = "application/spdx+json", "application/vnd.example.report"


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return skip_waiting(monkeypatch)


def entry(text: str, kind: str = SBOM) -> dict[Any, Any]:
    """Return a descriptor in a list of referrers."""
    digest = str(Digest.of(text.encode()))
    return {
        "mediaType": mediatype.OCI_MANIFEST,
        "digest": digest,
        "size": 7,
        "artifactType": kind,
        "annotations": {"org.example.text": text},
    }


def index(*entries: Any, **fields: Any) -> bytes:
    document = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": entries}
    return json.dumps(document | fields).encode()


class Keeping:
    """A registry that stores what is pushed; ``api`` enables its referrers API."""

    def __init__(self, api: bool = False) -> None:
        self.api = api
        self.blobs = dict(BLOBS)
        self.manifests = {"v1": SUBJECT, str(DIGEST): SUBJECT}

    def __call__(self, seen: Any) -> Answer:
        place = seen.path.rpartition("/")[2]
        if "/referrers/" in seen.path:
            return Answer(200, INDEX, index()) if self.api else Answer(404)
        if seen.method == "POST":
            return Answer(202, {"Location": "/upload"})
        if seen.path.startswith("/upload"):
            self.blobs[seen.path.partition("digest=")[2].replace("%3A", ":")] = seen.body
            return Answer(201)
        if "/blobs/" in seen.path:
            return Answer(200 if place in self.blobs else 404, {}, self.blobs.get(place, b""))
        if seen.method == "PUT":
            self.manifests[place] = seen.body
            about = json.loads(seen.body).get("subject")
            return Answer(201, {"OCI-Subject": about["digest"]} if about and self.api else {})
        if place not in self.manifests:
            return Answer(404)
        raw = self.manifests[place]
        return Answer(200, {"Content-Type": json.loads(raw)["mediaType"]}, raw)


def asked(script: Any, tmp_path: Path, kind: str = "") -> tuple[list[dict[str, Any]], list[str]]:
    """List the referrers of SUBJECT in a scripted registry; return JSON and request paths."""
    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/team/x:v1")
        with Repository(reference, ClientOptions(docker_config=tmp_path)) as repository:
            found = repository.list_referrers(DIGEST, kind)
    return [each.to_json() for each in found], registry.asked("GET")


def attached(
    script: Any, tmp_path: Path, *names: str, **options: Any
) -> tuple[Descriptor, ScriptedRegistry]:
    """Attach files of those names to SUBJECT; return the new manifest and the requests."""
    files = [tmp_path / name for name in names]
    for file in files:
        file.write_text(file.name)
    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/team/x:v1")
        connection = ClientOptions(docker_config=tmp_path)
        descriptor, _ = attach(reference, files, connection, artifact_type=SBOM, **options)
    return descriptor, registry


def test_api_pages_are_followed_with_the_filter(tmp_path: Path) -> None:
    def script(seen: Any) -> Answer:
        path, _, query = seen.path.partition("?")
        assert path == f"/v2/team/x/referrers/{DIGEST}"
        if "last" in query:
            return Answer(200, INDEX, index(entry("two")))
        assert query == "artifactType=application%2Fspdx%2Bjson"
        link = {"Link": f'<{path}?last=1>; rel="next"', "OCI-Filters-Applied": "artifactType"}
        return Answer(200, INDEX | link, index(entry("one")))

    assert asked(script, tmp_path, SBOM)[0] == [entry("one"), entry("two")]


def test_an_ignored_filter_is_applied_locally(tmp_path: Path) -> None:
    answer = Answer(200, INDEX, index(entry("one"), entry("two", REPORT), entry("one")))
    assert asked(lambda _: answer, tmp_path, REPORT)[0] == [entry("two", REPORT)]
    assert asked(lambda _: answer, tmp_path)[0] == [entry("one"), entry("two", REPORT)]


def test_circular_and_foreign_page_links_fail(tmp_path: Path) -> None:
    def to(link: str) -> Callable[[Any], Answer]:
        return lambda seen: Answer(200, INDEX | {"Link": f'<{link}>; rel="next"'}, index())

    with pytest.raises(RegistryError, match="form a cycle"):
        asked(to(f"/v2/team/x/referrers/{DIGEST}"), tmp_path)
    with pytest.raises(RegistryError, match="at another host"):
        asked(to("http://other.example/v2/"), tmp_path)


@pytest.mark.parametrize("status", [404, 405, 501])
def test_the_referrers_tag_is_read_without_the_api(status: int, tmp_path: Path) -> None:
    def script(seen: Any) -> Answer:
        if "/referrers/" in seen.path:
            return Answer(status)
        assert seen.path == f"/v2/team/x/manifests/sha256-{DIGEST.encoded}"
        return Answer(200, INDEX, index(entry("one"), entry("two", REPORT)))

    assert asked(script, tmp_path, REPORT)[0] == [entry("two", REPORT)]


def test_no_referrers(tmp_path: Path) -> None:
    assert asked(lambda _: Answer(404), tmp_path)[0] == []
    assert asked(lambda _: Answer(200, INDEX, index()), tmp_path)[0] == []


def test_a_missing_page_fails(tmp_path: Path) -> None:
    def script(seen: Any) -> Answer:
        link = {"Link": '<?last=1>; rel="next"'}
        return Answer(404) if "last" in seen.path else Answer(200, INDEX | link, index(entry("a")))

    with pytest.raises(NotFoundError):
        asked(script, tmp_path)


@pytest.mark.parametrize("status", [401, 403, 429, 500])
def test_an_error_is_not_an_empty_list(status: int, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=str(status)):
        asked(lambda _: Answer(status, {"Retry-After": "86400"}), tmp_path)


@pytest.mark.parametrize(
    ("body", "error"),
    [(b"", RegistryError), (b"404 page not found", RegistryError), (b"{}", FormatError)],
)
def test_an_invalid_referrers_list_is_refused(
    body: bytes, error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        asked(lambda _: Answer(200, {}, body), tmp_path)


def test_the_referrers_tag_of_a_subject() -> None:
    assert build_tag(DIGEST) == f"sha256-{DIGEST.encoded}"
    long = Digest.of(b"", "sha512")
    assert build_tag(long) == f"sha512-{long.encoded[:64]}"


def test_an_entry_has_the_artifact_type_and_annotations() -> None:
    about = Descriptor(mediatype.OCI_MANIFEST, DIGEST, len(SUBJECT))
    made = build_artifact(SBOM, [], about, {"a": "b"})
    assert build_referrer_entry(made.descriptor, made).to_json() == {
        "mediaType": mediatype.OCI_MANIFEST,
        "digest": str(made.digest),
        "size": len(made.raw),
        "artifactType": SBOM,
        "annotations": {"a": "b"},
    }
    plain = Manifest.parse(SUBJECT)  # without artifactType, the config's media type is used
    shown = build_referrer_entry(plain.descriptor, plain)
    assert shown.extra == {"artifactType": "application/vnd.example.blob"}
    empty = parse_document(index(artifactType=""))
    assert "artifactType" not in build_referrer_entry(empty.descriptor, empty).to_json()


def test_a_new_entry_keeps_the_other_entries() -> None:
    old = index(entry("one") | {"platform": {"os": "x"}}, annotations={"k": "v"}, other=[1])
    new = Descriptor.from_json(entry("two"))
    document = json.loads(with_entry(old, new))
    before = json.loads(old)
    assert document["manifests"] == [*before["manifests"], entry("two")]
    assert {**document, "manifests": []} == {**before, "manifests": []}
    assert json.loads(with_entry(encode(before | {"manifests": None}), new))["manifests"] == [
        entry("two")
    ]


def test_an_attached_artifact_follows_the_specification(tmp_path: Path) -> None:
    registry = Keeping(api=True)
    descriptor, seen = attached(registry, tmp_path, "b.txt", "a.txt", annotations={"k": "v"})
    document = json.loads(registry.manifests[str(descriptor.digest)])
    assert document == {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "artifactType": SBOM,
        "config": {
            "mediaType": mediatype.OCI_EMPTY,
            "digest": "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
            "size": 2,
        },
        "layers": [
            {
                "mediaType": "application/octet-stream",
                "digest": str(Digest.of(name.encode())),
                "size": 5,
                "annotations": {"org.opencontainers.image.title": name},
            }
            for name in ("b.txt", "a.txt")
        ],
        "subject": {
            "mediaType": mediatype.OCI_MANIFEST,
            "digest": str(DIGEST),
            "size": len(SUBJECT),
        },
        "annotations": {"k": "v"},
    }
    assert set(registry.blobs.values()) == {b"{}", b"a.txt", b"b.txt"}
    # The registry returned OCI-Subject, so no index is maintained.
    assert not [path for path in (each.path for each in seen.seen) if "sha256-" in path]


def test_the_referrers_tag_is_maintained_without_oci_subject(tmp_path: Path) -> None:
    registry = Keeping()
    tag = build_tag(DIGEST)
    registry.manifests[tag] = index(entry("foreign"), annotations={"kept": "yes"})
    one, _ = attached(registry, tmp_path, "one")
    two, _ = attached(registry, tmp_path, "two", annotations={"k": "v"})
    again, seen = attached(registry, tmp_path, "one")
    assert again == one
    assert f"/v2/team/x/manifests/{tag}" not in seen.asked("PUT")
    kept = json.loads(registry.manifests[tag])
    assert kept["annotations"] == {"kept": "yes"}
    listed, _ = asked(registry, tmp_path, SBOM)
    assert listed == kept["manifests"]
    assert [each["digest"] for each in listed] == [
        entry("foreign")["digest"],
        str(one.digest),
        str(two.digest),
    ]
    assert listed[2]["annotations"] == {"k": "v"}


def test_an_index_overwritten_concurrently_is_written_again(tmp_path: Path) -> None:
    registry = Keeping()
    tag, left = build_tag(DIGEST), [1]

    def script(seen: Any) -> Answer:
        answer = registry(seen)
        if seen.method == "PUT" and seen.path.endswith(tag) and left:
            left.clear()
            registry.manifests[tag] = index(entry("faster"))
        return answer

    made, _ = attached(script, tmp_path, "one")
    listed = [each["digest"] for each in json.loads(registry.manifests[tag])["manifests"]]
    assert listed == [entry("faster")["digest"], str(made.digest)]


def test_an_index_that_is_always_overwritten_fails(tmp_path: Path, waits: list[float]) -> None:
    registry, writes = Keeping(), list[str]()

    def script(seen: Any) -> Answer:
        answer = registry(seen)
        if registry.manifests.pop(build_tag(DIGEST), None) is not None:
            writes.append(seen.method)
        return answer

    with pytest.raises(RegistryError, match="new entry is missing"):
        attached(script, tmp_path, "one")
    assert writes == ["PUT"] * ATTEMPTS
    assert len(waits) == ATTEMPTS - 1


def test_a_foreign_manifest_under_the_referrers_tag_is_kept(tmp_path: Path) -> None:
    registry = Keeping()
    registry.manifests[build_tag(DIGEST)] = SUBJECT
    with pytest.raises(
        RegistryError, match=r"was pushed, but this registry cannot list it .* has other content"
    ):
        attached(registry, tmp_path, "one")
    assert registry.manifests[build_tag(DIGEST)] == SUBJECT


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    reference = Reference.parse("127.0.0.1:9/x")
    connection = ClientOptions(docker_config=tmp_path)
    files = [tmp_path / "a" / "x", tmp_path / "b" / "x"]
    with pytest.raises(UsageError, match="have the name x"):
        attach(reference, files, connection, artifact_type=SBOM)


@pytest.mark.parametrize("kind", ["", "spdx", "a/b/c", "a/b; c=d", "/x", "a/ b", "a/b\n"])
def test_an_invalid_media_type_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="invalid media type"):
        attach(Reference.parse("127.0.0.1:9/x"), [], ClientOptions(), artifact_type=kind)
