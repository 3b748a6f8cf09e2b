"""Refuse an oversized manifest before any request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.dialect import DIALECTS, AImage, Layer
from clowder_aimage.errors import ManifestRefusedError, ModelError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import MAX_MANIFEST_SIZE, Descriptor, Reference, mediatype
from clowder_aimage.push import push
from clowder_aimage.registry import ClientOptions, DialectCache
from tests.process import Aimage
from tests.scripted import Answer, ScriptedRegistry

OTHER = "application/vnd.example"
# Layers' annotations make the clowder and container dialects large: with this many layers
# the manifest fits in the ollama dialect alone.
LAYERS = 18_000


def put(layout: ImageLayout, media_type: str, data: bytes) -> Descriptor:
    """Store bytes in a layout without checks, as another tool might."""
    descriptor = Descriptor.of(media_type, data)
    path = layout.root / "blobs" / "sha256" / descriptor.digest.encoded
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return descriptor


def name(layout: ImageLayout, descriptor: Descriptor, reference: Reference) -> None:
    """Tag it in index.json."""
    entry = descriptor.to_json()
    entry["annotations"] = {"org.opencontainers.image.ref.name": str(reference)}
    (layout.root / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    index = {"schemaVersion": 2, "manifests": [entry]}
    (layout.root / "index.json").write_text(json.dumps(index))


def foreign(layout: ImageLayout, size: int, *, config: str = f"{OTHER}.config") -> Descriptor:
    """Return a manifest of exactly ``size`` bytes."""
    document: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "config": put(layout, config, b"{}").to_json(),
        "layers": [put(layout, f"{OTHER}.layer", b"x").to_json()],
        "annotations": {"padding": ""},
    }
    document["annotations"]["padding"] = "x" * (size - len(json.dumps(document)))
    return put(layout, mediatype.OCI_MANIFEST, json.dumps(document).encode())


@pytest.fixture(scope="module")
def large() -> AImage:
    """Return an AImage of many small files, whose manifest fits in the ollama dialect only."""
    layers = []
    for i in range(LAYERS):
        file = Descriptor.of(mediatype.AIMAGE_FILE, str(i % 10).encode())
        layers.append(Layer(file, f"transformer/{'block' * 8}.{i}.json"))
    return AImage(b'{"schemaVersion":1,"components":{}}', tuple(layers))


@pytest.fixture
def layout(tmp_path: Path) -> ImageLayout:
    return ImageLayout(tmp_path / "store")


def stored(layout: ImageLayout, aimage: AImage, reference: Reference) -> None:
    """Store ``aimage`` in the ollama dialect, as another tool might."""
    for i in range(10):
        put(layout, mediatype.AIMAGE_FILE, str(i).encode())
    manifest, config = DIALECTS["ollama"].write(aimage)
    assert len(manifest.raw) <= MAX_MANIFEST_SIZE
    layout.push(manifest.config, build_bytes_body(config))
    layout.push(manifest.descriptor, build_bytes_body(manifest.raw), reference)


def taking(status: int = 201) -> Callable[[Any], Answer]:
    """Return a registry that accepts blobs, and answers ``status`` to manifests."""

    def script(seen: Any) -> Answer:
        if "/manifests/" in seen.path:
            return Answer(status)
        if seen.method == "POST":
            return Answer(202, {"Location": "/upload/1"})
        return Answer(201 if seen.method == "PUT" else 200)

    return script


def test_a_manifest_at_the_limit_is_sent(layout: ImageLayout, tmp_path: Path) -> None:
    with ScriptedRegistry(taking()).running() as registry:
        reference = Reference.parse(f"{registry.host}/x:v1")
        name(layout, foreign(layout, MAX_MANIFEST_SIZE), reference)
        push(layout, reference, ClientOptions(docker_config=tmp_path))
        assert registry.asked("PUT")[-1] == "/v2/x/manifests/v1"


@pytest.mark.parametrize("config", [f"{OTHER}.config", mediatype.AIMAGE_CONFIG])
@pytest.mark.parametrize("by_digest", [False, True])
def test_a_manifest_over_the_limit_fails_before_any_request(
    config: str, by_digest: bool, layout: ImageLayout, tmp_path: Path
) -> None:
    """For an AImage and a foreign artifact, by tag and by digest."""
    with ScriptedRegistry(taking()).running() as registry:
        reference = Reference.parse(f"{registry.host}/x:v1")
        descriptor = foreign(layout, MAX_MANIFEST_SIZE + 1, config=config)
        name(layout, descriptor, reference)
        if by_digest:
            reference = reference.with_digest(descriptor.digest)
        with pytest.raises(ModelError, match=f"{MAX_MANIFEST_SIZE + 1} bytes") as caught:
            push(layout, reference, ClientOptions(docker_config=tmp_path))
        assert "fewer layers" in (caught.value.hint or "")
        assert registry.seen == []


@pytest.mark.parametrize("depth", [1, 2])
def test_an_oversized_manifest_in_an_index_fails(
    depth: int, layout: ImageLayout, tmp_path: Path
) -> None:
    with ScriptedRegistry(taking()).running() as registry:
        reference = Reference.parse(f"{registry.host}/x:v1")
        child = foreign(layout, MAX_MANIFEST_SIZE + 1)
        for _ in range(depth):
            index = {"schemaVersion": 2, "manifests": [child.to_json()]}
            child = put(layout, mediatype.OCI_INDEX, json.dumps(index).encode())
        name(layout, child, reference)
        with pytest.raises(ModelError, match="too large"):
            push(layout, reference, ClientOptions(docker_config=tmp_path))
        assert registry.seen == []


def test_an_oversized_blob_in_an_index_is_accepted(layout: ImageLayout, tmp_path: Path) -> None:
    """An index may list blobs; only manifests have the limit."""
    with ScriptedRegistry(taking()).running() as registry:
        reference = Reference.parse(f"{registry.host}/x:v1")
        blob = put(layout, f"{OTHER}.blob", b"x" * (MAX_MANIFEST_SIZE + 1))
        index = {"schemaVersion": 2, "manifests": [blob.to_json()]}
        name(layout, put(layout, mediatype.OCI_INDEX, json.dumps(index).encode()), reference)
        push(layout, reference, ClientOptions(docker_config=tmp_path))
        assert registry.asked("PUT")


@pytest.mark.integration
def test_push_fails_without_requests_when_no_dialect_fits(
    layout: ImageLayout, large: AImage, tmp_path: Path
) -> None:
    """container is the last dialect, so none is left to try."""
    with ScriptedRegistry(taking()).running() as registry:
        reference = Reference.parse(f"{registry.host}/x:v1")
        stored(layout, large, reference)
        for options in ({"dialect": "container"}, {"dialect": "clowder", "fallback": False}):
            with pytest.raises(ModelError, match="too large") as caught:
                push(layout, reference, ClientOptions(docker_config=tmp_path), **options)
            assert f"the {options['dialect']} dialect" in str(caught.value)
            assert "fewer layers" in (caught.value.hint or "")
        assert registry.seen == []


def test_an_oversized_dialect_is_skipped(
    layout: ImageLayout, large: AImage, tmp_path: Path
) -> None:
    said = []
    with ScriptedRegistry(taking()).running() as registry:
        reference = Reference.parse(f"{registry.host}/x:v1")
        stored(layout, large, reference)
        push(
            layout,
            reference,
            ClientOptions(docker_config=tmp_path),
            dialect="clowder",
            on_fallback=lambda name, error: said.append((name, str(error))),
        )
        (sent,) = [seen for seen in registry.seen if "/manifests/" in seen.path]
    assert sent.headers["Content-Type"] == mediatype.DOCKER_MANIFEST
    ((chosen, why),) = said
    assert chosen == "ollama"
    assert "clowder dialect" in why
    assert "too large" in why


@pytest.mark.integration
def test_the_refusal_is_raised_when_no_other_dialect_fits(
    layout: ImageLayout, large: AImage, tmp_path: Path
) -> None:
    """The error explains why; an oversized dialect is not cached as refused."""
    ladder = DialectCache(tmp_path / "state.json")
    with ScriptedRegistry(taking(415)).running() as registry:
        reference = Reference.parse(f"{registry.host}/x:v1")
        stored(layout, large, reference)
        with pytest.raises(ManifestRefusedError, match="415") as caught:
            push(layout, reference, ClientOptions(docker_config=tmp_path), ladder=ladder)
        assert "container dialect" in (caught.value.hint or "")
        assert len([path for path in registry.asked("PUT") if "/manifests/" in path]) == 1
        assert ladder.list_refused(registry.host) == frozenset()


def test_the_command_reports_an_oversized_manifest(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    here = aimage()
    with ScriptedRegistry(taking()).running() as registry:
        reference = Reference.parse(f"{registry.host}/x:v1")
        layout = ImageLayout(here.store)
        name(layout, foreign(layout, MAX_MANIFEST_SIZE + 1), reference)
        done = here("push", str(reference), code=1)
        assert registry.seen == []
    assert f"is too large: it has {MAX_MANIFEST_SIZE + 1} bytes" in done.err
    assert "pack the model into fewer layers" in done.err
