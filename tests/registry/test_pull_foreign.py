"""Foreign artifacts: fetched byte for byte, tagged, and pushed under the same digest."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.errors import FormatError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.pull import pull
from clowder_aimage.push import push
from clowder_aimage.registry import ClientOptions, Repository
from tests.process import Aimage
from tests.scripted import Answer, ScriptedRegistry

TAR = b"not really a tar, and nobody looks" * 1000
SCHEMA1 = json.dumps(
    {
        "schemaVersion": 1,
        "name": "team/x",
        "tag": "v1",
        "architecture": "amd64",
        "fsLayers": [{"blobSum": str(Digest.of(TAR))}],
        "history": [{"v1Compatibility": "{}"}],
        "signatures": [],
    },
    indent=3,
).encode()


@dataclass
class Foreign:
    """A manifest of another tool, and the blobs that it references."""

    media_type: str
    raw: bytes
    blobs: list[tuple[str, bytes]]


def foreign(
    media_type: str,
    config: tuple[str, bytes],
    *layers: tuple[str, bytes],
    indent: int | None = None,
    **fields: Any,
) -> Foreign:
    """Return a manifest over (media type, bytes) pairs, with unknown fields."""
    blobs = [config, *layers]
    entries = [Descriptor.of(kind, data).to_json() | {"x-other": 1} for kind, data in blobs]
    document = {"x-unknown": [1.0, None], "layers": entries[1:], "config": entries[0]}
    document |= {"schemaVersion": 2, "mediaType": media_type} | fields
    document = {key: value for key, value in document.items() if value is not None}
    return Foreign(media_type, json.dumps(document, indent=indent).encode(), blobs)


def image_config(*layers: bytes) -> bytes:
    value = {"os": "linux", "architecture": "amd64", "config": {}}
    value["rootfs"] = {"type": "layers", "diff_ids": [str(Digest.of(layer)) for layer in layers]}
    return json.dumps(value).encode()


def ollama(**fields: Any) -> Foreign:
    kind = "application/vnd.ollama.image."
    return foreign(
        mediatype.DOCKER_MANIFEST,
        (mediatype.DOCKER_CONFIG, b'{"model_format": "gguf", "model_family": "llama"}'),
        (kind + "model", b"GGUF" + bytes(100_000)),
        (kind + "template", b"{{ .Prompt }}"),
        (kind + "license", b"MIT"),
        (kind + "params", b'{"stop":["x"]}'),
        **fields,
    )


GZIPPED = gzip.compress(TAR, mtime=0)
KINDS = {
    "docker": foreign(
        mediatype.DOCKER_MANIFEST,
        (mediatype.DOCKER_CONFIG, image_config(TAR)),
        ("application/vnd.docker.image.rootfs.diff.tar.gzip", GZIPPED),
        indent=3,
    ),
    "image": foreign(
        mediatype.OCI_MANIFEST,
        (mediatype.OCI_CONFIG, image_config(TAR)),
        (mediatype.OCI_LAYER_TAR_GZIP, GZIPPED),
    ),
    "uncompressed": foreign(
        mediatype.OCI_MANIFEST,
        (mediatype.OCI_CONFIG, image_config(TAR)),
        (mediatype.OCI_LAYER_TAR, TAR),
    ),
    "zstd": foreign(
        mediatype.OCI_MANIFEST,
        (mediatype.OCI_CONFIG, image_config(TAR)),
        (mediatype.OCI_LAYER_TAR_ZSTD, b"(\xb5/\xfd" + TAR),
    ),
    "helm": foreign(
        mediatype.OCI_MANIFEST,
        ("application/vnd.cncf.helm.config.v1+json", b'{"name": "x"}'),
        ("application/vnd.cncf.helm.chart.content.v1.tar+gzip", GZIPPED),
        mediaType=None,
    ),
    "artifact": foreign(
        mediatype.OCI_MANIFEST,
        (mediatype.OCI_EMPTY, b"{}"),
        ("application/vnd.example.weights", b"\x00" * 1000),
        ("text/plain", b"read me\n"),
        artifactType="application/vnd.example.model",
        annotations={"org.example.key": "é"},
    ),
    "no layers": foreign(
        mediatype.OCI_MANIFEST, (mediatype.OCI_EMPTY, b"{}"), artifactType="application/vnd.x"
    ),
    "ollama": ollama(),
}
CUSTOM = foreign(
    mediatype.AIMAGE_MANIFEST,
    ("application/vnd.example.config", b'{"family": "other"}'),
    ("application/vnd.example.tensor", b"\x01" * 1000),
)


def serving(thing: Foreign, content_type: str) -> Callable[[Any], Answer]:
    """Return a registry that serves a foreign artifact, and accepts any push."""
    blobs = {str(Digest.of(data)): data for _, data in thing.blobs}

    def script(seen: Any) -> Answer:
        if seen.method in ("POST", "PATCH"):
            return Answer(202, {"Location": "/v2/upload"})
        if seen.method == "PUT":
            return Answer(201)
        if "/manifests/" in seen.path:
            return Answer(200, {"Content-Type": content_type} if content_type else {}, thing.raw)
        blob = blobs.get(seen.path.rpartition("/")[2])
        return Answer(404) if blob is None else Answer(200, {}, blob)

    return script


def round_trip(script: Any, thing: Foreign, tmp_path: Path) -> tuple[bytes, str]:
    """Pull and push again; return the manifest and media type that the registry received."""
    store = ImageLayout(tmp_path / "store")
    with ScriptedRegistry(script).running() as registry:
        name, reach = (
            Reference.parse(f"{registry.host}/x:v1"),
            ClientOptions(docker_config=tmp_path),
        )
        assert pull(name, store, reach).root.digest == Digest.of(thing.raw)
        check(store, name, thing)
        assert push(store, name, reach, fallback=False).digest == Digest.of(thing.raw)
    (put,) = (seen for seen in registry.seen if seen.method == "PUT" and "/manifests/" in seen.path)
    return put.body, put.headers["Content-Type"]


def check(store: ImageLayout, name: Reference, thing: Foreign) -> None:
    """Verify that the artifact is stored byte for byte and tagged."""
    root = store.resolve(name)
    assert (root.digest, root.media_type) == (Digest.of(thing.raw), thing.media_type)
    assert store.find_path(root).read_bytes() == thing.raw
    for media_type, data in thing.blobs:
        assert store.find_path(Descriptor.of(media_type, data)).read_bytes() == data


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_artifacts_round_trip_through_a_real_registry(
    kind: str, aimage: Callable[..., Aimage], repository: str, tmp_path: Path
) -> None:
    thing, name = KINDS[kind], Reference.parse(f"{repository}:v1")
    digest = str(Digest.of(thing.raw))
    with Repository(name, ClientOptions(docker_config=tmp_path)) as there:
        for media_type, data in thing.blobs:
            there.push(Descriptor.of(media_type, data), build_bytes_body(data))
        there.push(Descriptor.of(thing.media_type, thing.raw), build_bytes_body(thing.raw), name)
    run = aimage()
    assert run("pull", name).line == digest
    check(ImageLayout(run.store), name, thing)
    assert run("ls", "--json").value[0]["reference"] == str(name)
    again = f"{repository}/again:v1"
    run("tag", name, again)
    assert run("push", again, "--no-fallback").line == digest
    other = aimage("other")
    assert other("pull", again).line == digest
    check(ImageLayout(other.store), Reference.parse(again), thing)


def test_an_aimage_type_manifest_that_is_not_an_aimage_round_trips(tmp_path: Path) -> None:
    """Known registries refuse the type, but another might accept it."""
    script = serving(CUSTOM, mediatype.AIMAGE_MANIFEST)
    assert round_trip(script, CUSTOM, tmp_path) == (CUSTOM.raw, mediatype.AIMAGE_MANIFEST)


@pytest.mark.integration
def test_a_custom_type_aimage_is_pulled_from_registry_serve(
    aimage: Callable[..., Aimage], tiny: Path
) -> None:
    """``registry serve`` refuses the type on push, but serves it from a layout."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    maker = aimage("maker")
    custom = ("--whole-files", "--manifest-type", "custom")
    digest = maker("create", "team/tiny:v1", tiny, *custom).line
    with served(maker) as host:
        user, name = aimage("user"), f"{host}/team/tiny:v1"
        assert user("pull", name).line == digest
        assert user("ls", "--json").value[0]["kind"] == "custom"
        raw = [one.store / "blobs" / "sha256" / digest.partition(":")[2] for one in (user, maker)]
        assert raw[0].read_bytes() == raw[1].read_bytes()
        assert json.loads(raw[0].read_bytes())["mediaType"] == mediatype.AIMAGE_MANIFEST
        # Under another name: a refused manifest that the registry has already is not an error.
        user("tag", name, f"{host}/team/other:v1")
        done = user("push", f"{host}/team/other:v1", "--no-fallback", code=1)
        assert "rejected this type" in done.err


@contextlib.contextmanager
def served(here: Aimage) -> Iterator[str]:
    """Run ``aimage registry serve`` on a store; yield its host."""
    process = here.start("registry", "serve", "--addr", "127.0.0.1:0", "--log-level", "error")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield line.strip().rpartition("/")[2]
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "application/json; charset=utf-8",
        "application/octet-stream",
        "text/plain",
        "text/plain; charset=utf-8",
        "",
    ],
)
def test_an_ollama_manifest_without_content_type(content_type: str, tmp_path: Path) -> None:
    """ollama's registry sends no Content-Type for manifests."""
    thing = ollama()
    script = serving(thing, content_type)
    assert round_trip(script, thing, tmp_path) == (thing.raw, mediatype.DOCKER_MANIFEST)


@pytest.mark.parametrize("content_type", ["text/plain", "application/json", ""])
@pytest.mark.parametrize("on_layers", [True, False])
def test_an_ollama_manifest_without_media_type(
    on_layers: bool, content_type: str, tmp_path: Path
) -> None:
    """With neither mediaType nor Content-Type, the kind is inferred and kept."""
    thing = ollama(mediaType=None)
    thing.media_type = mediatype.OCI_MANIFEST
    if not on_layers:
        document = json.loads(thing.raw)
        for layer in document["layers"]:
            del layer["mediaType"]
        thing.raw = json.dumps(document).encode()
    script = serving(thing, content_type)
    assert round_trip(script, thing, tmp_path) == (thing.raw, mediatype.OCI_MANIFEST)


@pytest.mark.parametrize("fields", [{"annotations": None}, {"subject": None}, {"urls": ["x"]}])
def test_unknown_fields_are_kept(fields: dict[str, Any], tmp_path: Path) -> None:
    thing = ollama(**fields)
    script = serving(thing, thing.media_type)
    assert round_trip(script, thing, tmp_path) == (thing.raw, mediatype.DOCKER_MANIFEST)


@pytest.mark.parametrize(
    "content_type",
    [
        "application/vnd.docker.distribution.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v1+prettyjws",
        "application/json",
    ],
)
def test_schema_1_is_refused_with_advice(content_type: str, tmp_path: Path) -> None:
    script = serving(Foreign("", SCHEMA1, []), content_type)
    store = ImageLayout(tmp_path / "store")
    with ScriptedRegistry(script).running() as registry:
        name = Reference.parse(f"{registry.host}/x:v1")
        with pytest.raises(FormatError, match="schema 1") as error:
            pull(name, store, ClientOptions(docker_config=tmp_path))
    assert "push" in (error.value.hint or "")
    assert not store.root.exists()
