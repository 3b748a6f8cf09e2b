"""Responses to a push, and those that cause another dialect to be tried."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.content import build_bytes_body
from clowder_aimage.dialect import DIALECTS, AImage, Layer
from clowder_aimage.errors import (
    AImageError,
    ManifestRefusedError,
    NotFoundError,
    RegistryError,
    UnauthorizedError,
    VerificationError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.push import push
from clowder_aimage.registry import ClientOptions, Repository
from tests.scripted import Answer, ScriptedRegistry, Seen, skip_waiting

FILE = b'{"model_type": "test"}'


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_waiting(monkeypatch)


def error(status: int, code: str, message: str = "", detail: Any = None) -> Answer:
    """Return an error response in the specification's form."""
    body = {"errors": [{"code": code, "message": message, "detail": detail}]}
    return Answer(status, {}, json.dumps(body).encode())


def test_the_airplay_receiver_of_macos_is_named(tmp_path: Path) -> None:
    answer = Answer(403, {"Server": "AirTunes/845.5.1"})
    with ScriptedRegistry(lambda _: answer).running() as receiver:
        reference = Reference.parse(f"{receiver.host}/team/x:v1")
        store = store_with(tmp_path, reference)
        with pytest.raises(RegistryError, match="is the AirPlay receiver of macOS") as caught:
            push(store, reference, ClientOptions(docker_config=tmp_path))
    assert caught.value.exit_code == 1 and "another port" in str(caught.value.hint)


def taking(refuse: Callable[..., Answer | None]) -> Callable[[Any], Answer]:
    """Return a registry that accepts blobs and applies ``refuse(media type)`` to manifests."""
    blobs: set[str] = set()

    def script(seen: Any) -> Answer:
        if seen.method == "POST":
            return Answer(202, {"Location": "/upload/1"})
        if "/manifests/" in seen.path and seen.method == "PUT":
            return refuse(seen.headers["Content-Type"], json.loads(seen.body)) or Answer(201)
        if seen.method == "PUT":
            encoded = seen.path.rpartition("%3A")[2]
            if Digest.of(seen.body).encoded != encoded:
                return error(400, "DIGEST_INVALID", "provided digest did not match")
            blobs.add(encoded)
            return Answer(201)
        return Answer(200 if seen.path.rpartition(":")[2] in blobs else 404)

    return script


def store_with(tmp_path: Path, reference: Reference, dialect: str = "clowder") -> ImageLayout:
    layout = ImageLayout(tmp_path / "store")
    layer = Layer(Descriptor.of(mediatype.AIMAGE_FILE, FILE), "model_index.json")
    aimage = AImage(b'{"schemaVersion":1,"components":{}}', (layer,))
    manifest, config = DIALECTS[dialect].write(aimage)
    layout.push(layer.descriptor, build_bytes_body(FILE))
    layout.push(manifest.config, build_bytes_body(config))
    layout.push(manifest.descriptor, build_bytes_body(manifest.raw), reference)
    return layout


def try_push(
    script: Any, tmp_path: Path, dialect: str = "clowder", **options: Any
) -> tuple[ScriptedRegistry, list[str]]:
    """Push a small AImage; return the registry and the dialects tried after the first."""
    tried = []
    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/team/x:v1")
        layout = store_with(tmp_path, reference, dialect)
        push(
            layout,
            reference,
            ClientOptions(docker_config=tmp_path, patience=1.0),
            on_fallback=lambda name, _: tried.append(name),
            **options,
        )
    return registry, tried


REFUSALS = {
    "distribution 2.8": error(400, "MANIFEST_INVALID", "manifest invalid", {}),
    "distribution 3 by class": error(403, "DENIED", "unknown manifest class for application/x"),
    "zot": error(415, "MANIFEST_INVALID", "manifest invalid", {"mediaType": "application/x"}),
    "Quay": error(415, "MANIFEST_INVALID", "manifest schema version not supported"),
    "ECR": error(405, "UNSUPPORTED", "Invalid parameter at 'ImageManifest'"),
    "Artifactory": Answer(406, {}, b"Not Acceptable"),
    "422": error(422, "MANIFEST_INVALID", "manifest invalid"),
    "422 without a body": Answer(422),
    "409": error(409, "MANIFEST_INVALID", "manifest invalid"),
    "UNSUPPORTED": error(400, "UNSUPPORTED", "the operation is unsupported"),
    "501": error(501, "UNSUPPORTED", "the operation is unsupported"),
    "a type in the message": error(400, "BAD_REQUEST", "application/vnd.clowder.x is not allowed"),
    "a type in the detail": error(403, "DENIED", "", {"mediaType": "application/x"}),
    "a type in the second error": Answer(
        400, {}, b'{"errors": [{"code": "INVALID"}, {"code": "X", "message": "media type y"}]}'
    ),
    "RFC 9457": Answer(
        422, {"Content-Type": "application/problem+json"}, b'{"title": "Unknown artifact type"}'
    ),
    "plain text": Answer(400, {}, b"unsupported mediatype application/vnd.oci.image.manifest"),
    "HTML": Answer(404, {}, b"<html><p>Config media-type is not accepted</p></html>"),
    "500": Answer(500, {}, b'{"message": "no handler for media type application/x"}'),
}
OTHERS = {
    "too large": (
        error(400, "MANIFEST_INVALID", "x", "http: request body too large"),
        RegistryError,
    ),
    "too large, zot": (error(413, "MANIFEST_INVALID", "manifest too large"), RegistryError),
    "missing blob": (error(400, "MANIFEST_BLOB_UNKNOWN", "blob unknown"), RegistryError),
    "denied": (error(403, "DENIED", "requested access is denied"), UnauthorizedError),
    "no push": (error(405, "METHOD", "read only"), RegistryError),
    "bad name": (error(400, "NAME_INVALID", "invalid name"), RegistryError),
    "not JSON": (Answer(400, {}, b"<html>Bad Request</html>"), RegistryError),
    "missing blob of a type": (
        error(404, "MANIFEST_BLOB_UNKNOWN", "blob unknown", {"mediaType": "application/vnd.x"}),
        RegistryError,
    ),
    "wrong size of a type": (
        error(400, "SIZE_INVALID", "x", {"mediaType": "application/vnd.x"}),
        RegistryError,
    ),
    "a proxy's page of a type": (
        Answer(503, {}, b"<p>media type not available</p>"),
        RegistryError,
    ),
    "no project": (error(404, "NAME_UNKNOWN", "repository name not known"), NotFoundError),
}
# Answers to a manifest that leave the reason open, and a part of the advice.
UNCLEAR = {
    "nothing at all": (Answer(400), "this type of manifest: push with --dialect container"),
    "HTML": (Answer(400, {}, b"<html>Bad Request</html>"), "--dialect container"),
    "404": (Answer(404, {}, b"404 page not found"), "--dialect container"),
    "404 of a manifest": (error(404, "NOT_FOUND", "x"), "--dialect container"),
    "403": (Answer(403), "lack permission, or the registry refuses this type of manifest"),
    "another code": (error(409, "CONFLICT", "no"), "--dialect container"),
    "an error inside": (Answer(500), "--dialect container"),
    "a blob unknown": (error(400, "MANIFEST_BLOB_UNKNOWN", "blob unknown"), ""),
    "an immutable tag": (error(412, "X", "the tag is immutable"), "push another tag"),
    "no permission": (
        error(403, "DENIED", "requested access to the resource is denied"),
        "may lack permission, or the repository may not exist",
    ),
    "no repository": (error(404, "NAME_UNKNOWN", ""), "may have to be created in the registry"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_manifest_type_falls_back(name: str, tmp_path: Path) -> None:
    def refuse(media_type: Any, document: Any) -> Answer | None:
        is_container = document["config"]["mediaType"] == mediatype.OCI_CONFIG
        return None if is_container else REFUSALS[name]

    registry, tried = try_push(taking(refuse), tmp_path)
    assert tried == ["ollama", "container"]
    sent = [
        json.loads(seen.body) for seen in registry.seen if "/manifests/" in seen.path and seen.body
    ]
    assert len(sent) == 3
    puts = [path for path in registry.asked("PUT") if "/upload/" in path]
    assert len(puts) == len(set(puts)) == 4  # one file, and three configs


@pytest.mark.parametrize("name", OTHERS)
def test_other_failures_do_not_fall_back(name: str, tmp_path: Path) -> None:
    answer, kind = OTHERS[name]
    tried = []

    def offer(media_type: Any, document: Any) -> Answer:
        tried.append(document["config"]["mediaType"])
        return answer

    with pytest.raises(kind) as raised:
        try_push(taking(offer), tmp_path)
    assert not isinstance(raised.value, ManifestRefusedError)
    assert set(tried) == {mediatype.AIMAGE_CONFIG}


@pytest.mark.parametrize("name", UNCLEAR)
def test_an_unclear_refusal_names_the_container_dialect(name: str, tmp_path: Path) -> None:
    answer, advice = UNCLEAR[name]
    with pytest.raises(AImageError) as raised:
        try_push(taking(lambda *_: answer), tmp_path)
    advised = format_advice(raised.value) or ""
    assert advice in advised
    assert "spelling" not in advised
    assert bool(advice) == bool(advised)
    # In that dialect there is nothing left to advise.
    with pytest.raises(AImageError) as raised:
        try_push(taking(lambda *_: answer), tmp_path / "again", dialect="container")
    assert "--dialect" not in (format_advice(raised.value) or "")


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        (REFUSALS["zot"], "omit --no-fallback, or push with --dialect container"),
        (Answer(400), "push with --dialect container"),
    ],
)
def test_the_advice_without_fallback(answer: Answer, advice: str, tmp_path: Path) -> None:
    with pytest.raises(RegistryError) as raised:
        try_push(taking(lambda *_: answer), tmp_path, fallback=False)
    assert advice in (format_advice(raised.value) or "")


def test_a_push_by_digest_is_told_to_push_a_tag(tmp_path: Path) -> None:
    with ScriptedRegistry(taking(lambda *_: REFUSALS["zot"])).running() as registry:
        reference = Reference.parse(f"{registry.host}/team/x:v1")
        layout = store_with(tmp_path, reference)
        by_digest = reference.with_digest(layout.resolve(reference).digest)
        with pytest.raises(ManifestRefusedError) as raised:
            push(layout, by_digest, ClientOptions(docker_config=tmp_path))
    advice = format_advice(raised.value) or ""
    assert f"aimage push {registry.host}/team/x:TAG" in advice
    assert "--dialect" not in advice


def test_the_last_error_is_raised_when_all_dialects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestRefusedError, match="415"):
        try_push(taking(lambda *_: REFUSALS["zot"]), tmp_path)


def test_custom_falls_back_through_every_dialect(tmp_path: Path) -> None:
    def refuse(media_type: Any, document: Any) -> Answer | None:
        return None if media_type == mediatype.DOCKER_MANIFEST else REFUSALS["distribution 2.8"]

    _, tried = try_push(taking(refuse), tmp_path, dialect="custom")
    assert tried == ["clowder", "ollama"]


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT"])
def test_a_transient_error_is_retried_with_the_whole_body(
    method: str, status: int, tmp_path: Path
) -> None:
    right, left = taking(lambda *_: None), [1]

    def script(seen: Any) -> Any:
        if seen.method == method and left:
            left.clear()
            return Answer(status)
        return right(seen)

    registry, _ = try_push(script, tmp_path)
    bodies = [seen.body for seen in registry.seen if seen.path.startswith("/upload/1?")]
    assert FILE in bodies
    assert all(bodies)  # no attempt resumed where a failed one ended


def test_a_damaged_blob_fails_the_push(tmp_path: Path) -> None:
    with ScriptedRegistry(taking(lambda *_: None)).running() as registry:
        reference = Reference.parse(f"{registry.host}/x")
        layout = store_with(tmp_path, reference)
        path = layout.find_path(Descriptor.of("", FILE))
        path.chmod(0o644)
        path.write_bytes(FILE.replace(b"test", b"fest"))
        with pytest.raises(VerificationError, match="digest mismatch"):
            push(layout, reference, ClientOptions(docker_config=tmp_path))
    assert not [seen for seen in registry.seen if "/manifests/" in seen.path]


def test_an_empty_blob_is_pushed(tmp_path: Path) -> None:
    with ScriptedRegistry(taking(lambda *_: None)).running() as registry:
        reference = Reference.parse(f"{registry.host}/x")
        with Repository(reference, ClientOptions(docker_config=tmp_path)) as repository:
            repository.push(Descriptor.of("text/plain", b""), build_bytes_body(b""))
    (put,) = [seen for seen in registry.seen if seen.method == "PUT"]
    assert put.headers["Content-Length"] == "0"


def test_an_upload_response_without_location_fails(tmp_path: Path) -> None:
    with (
        ScriptedRegistry(lambda _: Answer(202)).running() as registry,
        pytest.raises(AImageError, match="sent no Location"),
    ):
        reference = Reference.parse(f"{registry.host}/x")
        with Repository(reference, ClientOptions(docker_config=tmp_path)) as repository:
            repository.push(Descriptor.of("text/plain", b"x"), build_bytes_body(b"x"))


def test_an_unexpected_response_body_is_not_read_in_full(tmp_path: Path) -> None:
    """An unexpected body of gigabytes closes the connection instead of being read."""
    right = taking(lambda *_: None)

    def script(seen: Seen) -> Any:
        answer = right(seen)
        if seen.method == "POST":
            answer.headers["Content-Length"] = str(1 << 40)
            answer.body, answer.cut, answer.hang = b"x" * 200_000, 200_000, True
        return answer

    with ScriptedRegistry(script).running() as registry:
        reference = Reference.parse(f"{registry.host}/x")
        with Repository(reference, ClientOptions(docker_config=tmp_path)) as repository:
            repository.push(Descriptor.of("text/plain", b"abc"), build_bytes_body(b"abc"))
    assert [seen.body for seen in registry.seen if seen.method == "PUT"] == [b"abc"]
