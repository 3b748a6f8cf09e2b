"""What the specifications show is read, keeps its bytes, and loses no field."""

from __future__ import annotations

import hashlib
import io

import pytest

from clowder_aimage.content import MemoryStore, bytes_body
from clowder_aimage.dialect import DIALECTS, detect
from clowder_aimage.errors import FormatError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.index import edit_index
from clowder_aimage.oci import Descriptor, Index, Manifest, Reference, parse_document
from clowder_aimage.tensor import parse_header, read_header
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
]
INDEXES = ["oci-index", "storage-index-standard", "storage-index-custom"]
HEADERS = value("safetensors-headers")


def test_every_vector_is_used():
    used = {*MANIFESTS, *INDEXES, "safetensors-headers"}
    assert {path.stem for path in HERE.glob("*.json")} == used


@pytest.mark.parametrize("name", MANIFESTS + INDEXES)
def test_the_bytes_are_kept_and_decide_the_digest(name):
    document = parse_document(raw(name))
    assert document.raw == raw(name)
    assert str(document.digest) == f"sha256:{hashlib.sha256(raw(name)).hexdigest()}"
    assert document.descriptor.size == len(raw(name))
    assert document.descriptor.media_type == document.media_type


@pytest.mark.parametrize("name", MANIFESTS)
def test_no_field_of_a_descriptor_is_lost(name):
    manifest = Manifest.parse(raw(name))
    written = value(name)
    assert manifest.config.to_json() == written["config"]
    assert [layer.to_json() for layer in manifest.layers] == written["layers"]
    assert dict(manifest.annotations) == (written.get("annotations") or {})
    assert manifest.artifact_type == written.get("artifactType", "")
    subject = manifest.subject.to_json() if manifest.subject else None
    assert subject == written.get("subject")


@pytest.mark.parametrize("name", INDEXES)
def test_no_field_of_an_index_entry_is_lost(name):
    index = parse_document(raw(name))
    assert isinstance(index, Index)
    assert [entry.to_json() for entry in index.manifests] == value(name)["manifests"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_store_gives_back_the_bytes_it_was_given(name, tmp_path):
    manifest = Manifest.parse(raw(name))
    for store in (MemoryStore(), ImageLayout(tmp_path)):
        reference = Reference.parse(f"vectors/{name}")
        store.push(manifest.descriptor, bytes_body(manifest.raw), reference)
        with store.open(store.resolve(reference)) as file:
            assert file.read() == raw(name)


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("ollama-first", "ollama"),
        ("ollama-second", "ollama"),
        ("storage-manifest-standard", "container"),
        ("storage-manifest-custom", "custom"),
        ("docker-manifest", "container"),
    ],
)
def test_the_dialect_is_told_from_the_manifest(name, dialect):
    assert detect(Manifest.parse(raw(name))).name == dialect


@pytest.mark.parametrize("name", ["oci-artifact", "oci-unknown-fields"])
def test_another_artifact_is_no_aimage(name):
    with pytest.raises(FormatError, match="is not an AImage"):
        detect(Manifest.parse(raw(name)))


@pytest.mark.parametrize("name", ["storage-manifest-standard", "storage-manifest-custom"])
def test_layers_without_names_are_not_guessed(name):
    manifest = Manifest.parse(raw(name))
    config = b'{"rootfs":{"type":"layers","diff_ids":[%s]}}' % b",".join(
        f'"{layer.digest}"'.encode() for layer in manifest.layers
    )
    with pytest.raises(FormatError):
        detect(manifest).read(manifest, config)


def test_ollamas_first_generation_is_read():
    manifest = Manifest.parse(raw("ollama-first"))
    assert manifest.config.media_type == ""
    aimage = DIALECTS["ollama"].read(manifest, b'{"model_format":"safetensors"}')
    assert [(layer.name, layer.is_tensor, layer.dtype, layer.shape) for layer in aimage.layers] == [
        ("text_encoder/model.layers.0.mlp.down_proj.weight", True, "BF16", (2560, 9728)),
        ("text_encoder/config.json", False, None, None),
        ("tokenizer/tokenizer.json", False, None, None),
    ]
    assert aimage.properties == {"schemaVersion": 1, "components": {"text_encoder": {}}}


def test_ollamas_second_generation_is_read():
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
def test_the_storage_documents_index_is_read_and_kept(name, tmp_path):
    (tmp_path / "index.json").write_bytes(raw(name))
    layout = ImageLayout(tmp_path)
    (entry,) = value(name)["manifests"]
    assert [found for found, _ in layout.tags()] == ["nekko.ai/llama/3.1:70B"]
    found = layout.resolve(Reference.parse("nekko.ai/llama/3.1:70B"))
    assert found == Descriptor.from_json(entry)
    with edit_index(tmp_path) as index:
        index["annotations"] = {"touched": "yes"}
    assert parse_document((tmp_path / "index.json").read_bytes()).raw  # an index still
    (kept,) = layout.entries()
    assert kept[1].to_json() == entry


@pytest.mark.parametrize("vector", HEADERS, ids=lambda vector: vector["name"].replace(" ", "-"))
def test_safetensors_headers(vector):
    text = vector["header"].encode()
    if "evil" in vector:
        with pytest.raises(FormatError, match=vector["evil"]):
            parse_header(text, vector["data"])
        return
    header = parse_header(text, vector["data"])
    assert sum(info.nbytes for info in header.tensors.values()) == vector["data"]
    file = len(text).to_bytes(8, "little") + text
    assert read_header(io.BytesIO(file), len(file) + vector["data"]) == header
