"""The examples of the specifications are read, keep their bytes, and lose no field."""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.dialect import DIALECTS, AImage, detect
from clowder_aimage.document.schema import validate
from clowder_aimage.errors import FormatError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.index import edit_index
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, Reference, parse_document
from clowder_aimage.tensor import parse_header, read_header
from tests.memory_store import MemoryStore
from tests.store import read
from tests.vectors.vector import HERE, raw, value

MANIFESTS = [
    "oci-manifest",
    "oci-artifact",
    "oci-unknown-fields",
    "docker-manifest",
    "storage-manifest-standard",
    "storage-manifest-custom",
    "ollama-first",
    "ollama-second",
    "ollama-gguf",
    "modelpack",
    "docker-model",
    "kitops",
    "ep-layer",
]
WITH_CONFIGS = ["ollama-gguf", "modelpack", "docker-model", "kitops", "ep-layer"]
INDEXES = ["oci-index", "storage-index-standard", "storage-index-custom"]
HEADERS = value("safetensors-headers")


def test_every_vector_is_used() -> None:
    configs = {f"{name}-config" for name in WITH_CONFIGS}
    others = {"safetensors-headers", "chat-template-digests"}
    used = {*MANIFESTS, *INDEXES, *configs, *others}
    assert {path.stem for path in HERE.glob("*.json")} == used


@pytest.mark.parametrize("name", MANIFESTS + INDEXES)
def test_a_document_keeps_its_bytes_and_fields(name: str, tmp_path: Path) -> None:
    document, written = parse_document(raw(name)), value(name)
    assert document.raw == raw(name)
    assert str(document.digest) == f"sha256:{hashlib.sha256(raw(name)).hexdigest()}"
    assert document.descriptor.size == len(raw(name))
    assert document.descriptor.media_type == document.media_type
    if isinstance(document, Index):
        assert [entry.to_json() for entry in document.manifests] == written["manifests"]
        return
    assert document.config.to_json() == written["config"]
    assert [layer.to_json() for layer in document.layers] == written["layers"]
    assert dict(document.annotations) == (written.get("annotations") or {})
    assert document.artifact_type == written.get("artifactType", "")
    subject = document.subject.to_json() if document.subject else None
    assert subject == written.get("subject")
    for store in (MemoryStore(), ImageLayout(tmp_path)):
        reference = Reference.parse(f"vectors/{name}")
        store.push(document.descriptor, build_bytes_body(document.raw), reference)
        assert read(store, store.resolve(reference)) == raw(name)


def test_detect() -> None:
    dialects = {
        "ollama-first": "ollama",
        "ollama-second": "ollama",
        "storage-manifest-standard": "container",
        "storage-manifest-custom": "custom",
        "docker-manifest": "container",
        "ollama-gguf": "ollama",
        "modelpack": "modelpack",
        "docker-model": "docker",
        "kitops": "kitops",
        "ep-layer": "clowder",
    }
    assert {name: detect(Manifest.parse(raw(name))).name for name in dialects} == dialects


@pytest.mark.parametrize("name", ["oci-artifact", "oci-unknown-fields"])
def test_detect_refuses_another_artifact(name: str) -> None:
    with pytest.raises(FormatError, match="is not an AImage"):
        detect(Manifest.parse(raw(name)))


def test_a_container_images_layers_are_not_guessed() -> None:
    manifest = Manifest.parse(raw("storage-manifest-standard"))
    config = b'{"rootfs":{"type":"layers","diff_ids":[%s]}}' % b",".join(
        f'"{layer.digest}"'.encode() for layer in manifest.layers
    )
    with pytest.raises(FormatError, match="container image, not an AImage"):
        detect(manifest).read(manifest, config)


def test_layers_without_names_are_named_by_media_type() -> None:
    manifest = Manifest.parse(raw("storage-manifest-custom"))
    aimage = detect(manifest).read(manifest, b'{"schemaVersion":1,"components":{}}')
    assert [layer.name for layer in aimage.layers] == ["gguf.0", "gguf.1", "lora.2", "lora.3"]
    kept = [(layer.media_type, layer.digest) for layer in manifest.layers]
    assert [(one.descriptor.media_type, one.descriptor.digest) for one in aimage.layers] == kept


def read_vector(name: str) -> AImage:
    """Return the AImage of a vector with a config, whose bytes its manifest names."""
    manifest, config = Manifest.parse(raw(name)), raw(f"{name}-config")
    assert (manifest.config.digest, manifest.config.size) == (Digest.of(config), len(config))
    aimage = detect(manifest).read(manifest, config)
    validate("aimage-config", aimage.properties)
    found = [(layer.descriptor.digest, layer.descriptor.size) for layer in aimage.layers]
    assert found == [(layer.digest, layer.size) for layer in manifest.layers]
    return aimage


def kinds(aimage: AImage) -> list[tuple[str, str]]:
    """Return the names of the layers, and the distinct part of their media types."""
    return [
        (layer.name, layer.descriptor.media_type.rpartition("aimage.")[2])
        for layer in aimage.layers
    ]


GGUF, FILE = "model.gguf.layer.v1", "model.file.layer.v1"
LORA, TRANSFORMERS = "adapter.lora.layer.v1", "model.transformers.layer.v1"


def test_a_gguf_model_of_ollama_is_read() -> None:
    aimage = read_vector("ollama-gguf")
    assert kinds(aimage) == [
        ("model.gguf", GGUF),
        ("projector.gguf", GGUF),
        ("adapter.gguf", LORA),
        ("template", FILE),
        ("license", FILE),
        ("license-2", FILE),
        ("params.json", FILE),
        ("system", FILE),
        ("messages.json", FILE),
    ]
    assert aimage.properties == {
        "schemaVersion": 1,
        "format": "gguf",
        "architecture": "qwen3",
        "parameters": 8_200_000_000,
        "quantization": "Q4_K_M",
        "context": 40960,
        "size": 5_230_688_969,
        "components": {},
    }


def test_a_modelpack_is_read() -> None:
    aimage = read_vector("modelpack")
    assert kinds(aimage) == [
        ("model-00001-of-00002.safetensors", TRANSFORMERS),
        ("model-00002-of-00002.safetensors", TRANSFORMERS),
        ("config.json", FILE),
        ("README.md.tar", "application/vnd.cncf.model.doc.v1.tar"),
        ("src.tar", "application/vnd.cncf.model.code.v1.tar+gzip"),
        ("dataset.5", "application/vnd.cncf.model.dataset.v1.tar+zstd"),
    ]
    assert aimage.properties == {
        "schemaVersion": 1,
        "name": "heron-1.7b-chat",
        "family": "heron",
        "format": "transformers",
        "architecture": "transformer",
        "parameters": 1_700_000_000,
        "dtype": "BF16",
        "license": "Apache-2.0",
        "source": "https://example.com/heron",
        "created": "2026-03-01T08:00:00Z",
        "size": 3_400_017_115,
        "components": {},
    }


def test_a_model_of_docker_model_runner_is_read() -> None:
    aimage = read_vector("docker-model")
    assert kinds(aimage) == [
        ("model.gguf", GGUF),
        ("adapter.gguf", LORA),
        ("mmproj.gguf", GGUF),
        ("LICENSE", FILE),
        ("chat_template.jinja", FILE),
    ]
    assert aimage.properties == {
        "schemaVersion": 1,
        "name": "Wren 360M",
        "format": "gguf",
        "architecture": "llama",
        "parameters": 361_820_000,
        "quantization": "IQ2_XXS/Q4_K_M",
        "context": 8192,
        "license": "mit",
        "created": "2026-02-03T04:05:06.789Z",
        "size": 385_984_801,
        "components": {},
    }


def test_a_modelkit_is_read() -> None:
    aimage = read_vector("kitops")
    kit = "application/vnd.kitops.modelkit."
    assert kinds(aimage) == [
        ("model/swift.onnx.tar", f"{kit}model.v1.tar+gzip"),
        ("model/tokenizer.tar", f"{kit}modelpart.v1.tar+gzip"),
        ("data/held-out.csv.tar", f"{kit}dataset.v1.tar"),
        ("code.tar", f"{kit}code.v1.tar+zstd"),
        ("README.md.tar", f"{kit}docs.v1.tar"),
        ("prompts/ask.txt.tar", f"{kit}code.v1.tar"),
    ]
    assert aimage.properties == {
        "schemaVersion": 1,
        "name": "swift-small",
        "format": "onnx",
        "license": "Apache-2.0",
        "size": 30_763_072,
        "components": {},
    }


def test_layers_of_unknown_kinds_are_carried() -> None:
    aimage = read_vector("ep-layer")
    assert kinds(aimage) == [
        ("model.gguf", GGUF),
        ("ep.1", "ep.layer.v1"),
        ("libep-arm64.so.zst", "ep.layer.v1+zstd"),
        ("layer.3", "application/vnd.oci.image.layer.v1.tar"),
        ("octet-stream.4", "application/octet-stream"),
    ]
    assert aimage.config == raw("ep-layer-config")


@pytest.mark.parametrize("name", WITH_CONFIGS)
def test_another_vendors_model_is_written_in_any_dialect(name: str) -> None:
    aimage = read_vector(name)
    for dialect in DIALECTS:
        manifest, config = DIALECTS[dialect].write(aimage)
        assert detect(manifest).name == dialect
        assert detect(manifest).read(manifest, config) == aimage


def test_ollamas_first_generation_is_read() -> None:
    manifest = Manifest.parse(raw("ollama-first"))
    assert manifest.config.media_type == ""
    aimage = DIALECTS["ollama"].read(manifest, b'{"model_format":"safetensors"}')
    assert [(layer.name, layer.is_tensor, layer.dtype, layer.shape) for layer in aimage.layers] == [
        ("text_encoder/model.layers.0.mlp.down_proj.weight", True, "BF16", (2560, 9728)),
        ("text_encoder/config.json", False, None, None),
        ("tokenizer/tokenizer.json", False, None, None),
    ]
    assert aimage.properties == {"schemaVersion": 1, "components": {"text_encoder": {}}}


def test_ollamas_second_generation_is_read() -> None:
    manifest = Manifest.parse(raw("ollama-second"))
    aimage = DIALECTS["ollama"].read(manifest, b"{}")
    assert [(layer.name, layer.is_tensor) for layer in aimage.layers] == [
        ("transformer/model.layers.0.mlp.up_proj.weight", True),
        ("transformer/model.layers.1.mlp.experts", True),
        ("model_index.json", False),
        ("license.3", False),
        ("license.4", False),
        ("system.5", False),
    ]
    assert {layer.dtype for layer in aimage.layers} == {None}
    digests = [layer.digest for layer in manifest.layers]
    assert [layer.descriptor.digest for layer in aimage.layers] == digests
    for dialect in DIALECTS.values():
        manifest, config = dialect.write(aimage)
        assert dialect.read(manifest, config).layers == aimage.layers


@pytest.mark.parametrize("name", ["storage-index-standard", "storage-index-custom"])
def test_the_storage_documents_index_is_read_and_kept(name: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(raw(name))
    layout = ImageLayout(tmp_path)
    (entry,) = value(name)["manifests"]
    assert [found for found, _ in layout.list_tags()] == ["nekko.ai/llama/3.1:70B"]
    found = layout.resolve(Reference.parse("nekko.ai/llama/3.1:70B"))
    assert found == Descriptor.from_json(entry)
    with edit_index(tmp_path) as index:
        index["annotations"] = {"touched": "yes"}
    assert parse_document((tmp_path / "index.json").read_bytes()).raw  # an index still
    (kept,) = layout.iter_entries()
    assert kept[1].to_json() == entry


def test_safetensors_headers_are_read() -> None:
    good = [vector for vector in HEADERS if "error" not in vector]
    assert len(good) > 9
    for vector in good:
        text = vector["header"].encode()
        header = parse_header(text, vector["data"])
        assert sum(info.nbytes for info in header.tensors.values()) == vector["data"]
        file = len(text).to_bytes(8, "little") + text
        assert read_header(io.BytesIO(file), len(file) + vector["data"]) == header


def test_safetensors_headers_are_refused() -> None:
    found = {}
    refused = {vector["name"]: vector for vector in HEADERS if "error" in vector}
    for name, vector in refused.items():
        try:
            found[name] = str(parse_header(vector["header"].encode(), vector["data"]))
        except FormatError as error:
            found[name] = error.message
    assert {
        name: text for name, text in found.items() if not re.search(refused[name]["error"], text)
    } == {}
