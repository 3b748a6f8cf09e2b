"""Transformers directories, compressed and extra layers, the Hugging Face cache, ollama."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clowder_aimage.content import ContentStore, open_directory
from clowder_aimage.create import create
from clowder_aimage.document.schema import validate
from clowder_aimage.errors import (
    FormatError,
    ModelError,
    NotFoundError,
    StoreError,
    UsageError,
    VerificationError,
)
from clowder_aimage.importer import Recipe
from clowder_aimage.importer.model_source import ExtraFile, ModelForm, parse_adapter, snapshot
from clowder_aimage.importer.ollama_store import adopt
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import StoredAImage, read_aimage
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.oci import Reference, mediatype
from tests.importer.conftest import Model, data_of, in_memory, safetensors
from tests.process import Aimage
from tests.store import read

NAME = Reference.parse("llm")
TENSORS = [
    ("lm_head.weight", "BF16", (6, 4)),
    ("model.embed_tokens.weight", "BF16", (6, 4)),
    ("model.layers.0.mlp.up_proj.weight", "BF16", (64, 64)),
    ("model.norm.weight", "F32", (4,)),
]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 2048,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a Transformers directory."""
    directory = tmp_path / "llm"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "generation_config.json").write_text("{}")
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    (directory / "README.md").write_text("---\nlicense: apache-2.0\n---\n# a model\n")
    (directory / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (directory / "model.safetensors").write_bytes(safetensors(TENSORS, "llm", format="pt"))
    return directory


def packed(directory: Path, store: ContentStore | None = None, **options: Any) -> StoredAImage:
    store = store or in_memory()
    create(store, NAME, directory, **options)
    return read_aimage(store, NAME)


# -- Transformers


def test_each_tensor_is_a_top_level_layer(directory: Path) -> None:
    aimage = packed(directory).aimage
    files = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer.model"}
    files.add("README.md")
    assert {layer.name for layer in aimage.layers} == files | {tensor[0] for tensor in TENSORS}
    layer = aimage.get_layer("model.norm.weight")
    assert (layer.is_tensor, layer.dtype, layer.shape) == (True, "F32", (4,))
    assert aimage.properties == {
        "schemaVersion": 1,
        "parameters": sum(n * m for _, _, (n, *rest) in TENSORS for m in [rest[0] if rest else 1]),
        "dtype": "BF16",
        "format": "transformers",
        "architecture": "LlamaForCausalLM",
        "context": 2048,
        "size": sum(layer.descriptor.size for layer in aimage.layers),
        "components": {},
        "license": "apache-2.0",
    }
    validate("aimage-config", aimage.properties)


def test_weights_are_read_without_a_component(directory: Path, tmp_path: Path) -> None:
    store = ImageLayout(tmp_path / "store")
    aimage = packed(directory, store).aimage
    weights = ModelWeights.open(store, aimage)
    assert sorted(weights.keys()) == [tensor[0] for tensor in TENSORS]
    expected = data_of(TENSORS[3], "llm")
    assert weights.read_numpy("model.norm.weight").tobytes() == expected


def test_a_type_alone_quantizes_the_whole_model(directory: Path) -> None:
    values = b"".join(bytes([0, 0x3C]) * (len(data_of(tensor, "")) // 2) for tensor in TENSORS)
    head = safetensors(TENSORS)[: -len(values)]
    (directory / "model.safetensors").write_bytes(head + values)
    aimage = packed(directory, recipe=Recipe.parse(quantize="int8")).aimage
    assert aimage.get_layer("model.layers.0.mlp.up_proj.weight").dtype == "int8"
    assert aimage.get_layer("lm_head.weight").dtype == "BF16"
    assert aimage.properties["quantization"] == "int8"
    validate("aimage-config", aimage.properties)


def test_quantizing_a_missing_component_is_refused(directory: Path) -> None:
    with pytest.raises(UsageError, match="no text_encoder"):
        packed(directory, recipe=Recipe.parse(quantize="text_encoder=int8"))


def test_whole_files_are_kept_unchanged(directory: Path) -> None:
    store = in_memory()
    aimage = packed(directory, store, form=ModelForm(whole_files=True)).aimage
    layer = aimage.get_layer("model.safetensors")
    assert layer.descriptor.media_type == mediatype.AIMAGE_TRANSFORMERS
    assert read(store, layer.descriptor) == (directory / "model.safetensors").read_bytes()
    assert aimage.get_layer("config.json").descriptor.media_type == mediatype.AIMAGE_FILE
    assert aimage.properties["parameters"] == 4 + 64 * 64 + 2 * 6 * 4
    validate("aimage-config", aimage.properties)


def test_shards_keep_their_index(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    halves = {"model-00001-of-00002.safetensors": TENSORS[:2]}
    halves["model-00002-of-00002.safetensors"] = TENSORS[2:]
    for name, tensors in halves.items():
        (directory / name).write_bytes(safetensors(tensors))
    where = {tensor[0]: name for name, tensors in halves.items() for tensor in tensors}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    names = {
        layer.name for layer in packed(directory, form=ModelForm(whole_files=True)).aimage.layers
    }
    assert {index.name, *halves} <= names
    assert index.name not in {layer.name for layer in packed(directory).aimage.layers}
    (directory / "model-00002-of-00002.safetensors").unlink()
    for form in (ModelForm(), ModelForm(whole_files=True)):
        with pytest.raises(FormatError, match="are missing: model-00002"):
            packed(directory, form=form)


def test_a_truncated_config_is_refused(directory: Path) -> None:
    config = directory / "config.json"
    config.write_text(config.read_text()[:-5])
    for form in (ModelForm(), ModelForm(format="transformers")):
        with pytest.raises(FormatError, match=r"config\.json is not valid JSON"):
            packed(directory, form=form)


def test_pickled_weights_beside_safetensors_are_left_out_or_refused(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    (made,) = create(in_memory(), NAME, directory).left_out[1:]
    assert (made.path, made.reason) == ("pytorch_model.bin", "another copy of the weights")
    (directory / "head.dat").write_bytes(b"\x80\x02.")
    with pytest.raises(ModelError, match=r"head\.dat is pickled") as caught:
        packed(directory)
    assert caught.value.remedy == "pickle_beside_model"


def test_an_empty_config_is_refused(directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    with pytest.raises(FormatError, match="neither architectures nor model_type"):
        packed(directory, form=ModelForm(format="transformers"))


# -- compression


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_compressed_layer_has_a_diff_id(directory: Path, compression: str) -> None:
    store = in_memory()
    form = ModelForm(whole_files=True, compression=compression)
    aimage = packed(directory, store, form=form).aimage
    raw = (directory / "model.safetensors").read_bytes()
    layer = aimage.get_layer("model.safetensors")
    assert layer.descriptor.media_type == f"{mediatype.AIMAGE_TRANSFORMERS}+{compression}"
    assert layer.content is not None
    assert layer.content.media_type == mediatype.AIMAGE_TRANSFORMERS
    assert (layer.content.digest.encoded, layer.content.size) == (
        hashlib.sha256(raw).hexdigest(),
        len(raw),
    )
    data = read(store, layer.descriptor)
    if compression == "gzip":
        assert gzip.decompress(data) == raw
        assert data[4:8] == b"\0\0\0\0"  # without a time
    else:
        zstandard = pytest.importorskip("zstandard")
        assert zstandard.ZstdDecompressor().decompress(data) == raw
    validate("aimage-config", aimage.properties)


@pytest.mark.parametrize("dialect", ["ollama", "container"])
def test_every_dialect_stores_the_diff_id(directory: Path, dialect: str) -> None:
    form = ModelForm(whole_files=True, compression="gzip")
    found = packed(directory, form=form, dialect=dialect).aimage
    expected = packed(directory, form=form).aimage
    assert found == expected
    assert all(layer.content is not None for layer in found.layers)


def test_tensors_are_not_compressed(directory: Path) -> None:
    with pytest.raises(UsageError, match="tensors cannot be compressed"):
        packed(directory, form=ModelForm(compression="gzip"))


def test_a_pipeline_can_be_kept_in_whole_files(model: Model) -> None:
    store = in_memory()
    create(store, NAME, model.directory, form=ModelForm(whole_files=True))
    aimage = read_aimage(store, NAME).aimage
    assert aimage.properties["format"] == "files"
    assert {x.name for x in aimage.layers} >= {"model_index.json", "text_encoder/model.safetensors"}
    assert not any(layer.is_tensor for layer in aimage.layers)


# -- other layers


def test_a_layer_of_any_type_is_carried(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "ep.bin"
    path.write_bytes(b"an execution provider")
    extra = ExtraFile.parse(f"application/vnd.example.ep.layer.v1={path}")
    store = in_memory()
    aimage = packed(directory, store, form=ModelForm(extras=(extra,))).aimage
    layer = aimage.get_layer("ep.bin")
    assert layer.descriptor.media_type == "application/vnd.example.ep.layer.v1"
    assert read(store, layer.descriptor) == path.read_bytes()


@pytest.mark.parametrize("text", ["ep.bin", "text=ep.bin", "a/b="])
def test_extra_file_parse_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="invalid layer"):
        ExtraFile.parse(text)


def test_adapter_names_are_checked() -> None:
    name, path = parse_adapter("./loras/style.safetensors")
    assert (name, str(path)) == ("style", "loras/style.safetensors")
    assert parse_adapter("mine=./x")[0] == "mine"
    for bad in ("../x=./a", "=./a", "a b=./x", ""):
        with pytest.raises(UsageError, match="invalid adapter name"):
            parse_adapter(bad)


# -- a Hugging Face cache


def test_a_cache_directory_resolves_to_its_main_snapshot(tmp_path: Path, directory: Path) -> None:
    cache = tmp_path / "models--org--llm"
    (cache / "blobs").mkdir(parents=True)
    (cache / "refs").mkdir()
    commit = cache / "snapshots" / ("a" * 40)
    commit.mkdir(parents=True)
    (cache / "snapshots" / ("b" * 40)).mkdir()
    for number, path in enumerate(sorted(directory.iterdir())):
        blob = cache / "blobs" / f"{number:040}"
        blob.write_bytes(path.read_bytes())
        (commit / path.name).symlink_to(f"../../blobs/{blob.name}")
    with pytest.raises(UsageError, match="2 snapshots"):
        snapshot(cache)
    (cache / "refs" / "main").write_text("a" * 40)
    assert packed(cache).descriptor == packed(directory).descriptor


def test_a_cache_with_one_snapshot_needs_no_main_ref(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--llm"
    (cache / "snapshots" / "abc").mkdir(parents=True)
    assert snapshot(cache) == cache / "snapshots" / "abc"


# -- ollama's store


@pytest.fixture
def ollama(tmp_path: Path) -> Path:
    """Return an ollama store with one model."""
    models = tmp_path / "models"
    (models / "blobs").mkdir(parents=True)

    def blob(data: bytes) -> dict[Any, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (models / "blobs" / f"sha256-{digest}").write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": mediatype.DOCKER_MANIFEST,
        "config": {"mediaType": mediatype.DOCKER_CONFIG, **blob(b'{"model_format":"gguf"}')},
        "layers": [
            {"mediaType": "application/vnd.ollama.image.model", **blob(b"GGUF" + bytes(100))},
            {"mediaType": "application/vnd.ollama.image.license", **blob(b"MIT License")},
        ],
    }
    path = models / "manifests" / "registry.ollama.ai" / "library" / "small" / "1b"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(manifest))
    return models


def test_an_ollama_model_is_hard_linked(ollama: Path, tmp_path: Path) -> None:
    store = ImageLayout(tmp_path / "store")
    found = adopt(store, Reference.parse("small"), ollama, "small:1b")
    assert (found.linked, found.copied, found.existing) == (3, 0, 0)
    raw = (ollama / "manifests/registry.ollama.ai/library/small/1b").read_bytes()
    assert found.descriptor.digest.encoded == hashlib.sha256(raw).hexdigest()
    for path in (ollama / "blobs").iterdir():
        ours = tmp_path / "store" / "blobs" / "sha256" / path.name.removeprefix("sha256-")
        assert ours.stat().st_ino == path.stat().st_ino
    assert store.resolve(Reference.parse("small")).digest == found.descriptor.digest
    assert adopt(store, Reference.parse("again"), ollama, "small:1b").existing == 3


def test_a_store_with_a_relative_path_takes_links(
    ollama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = ImageLayout(Path("relative"))
    assert adopt(store, Reference.parse("small"), ollama, "small:1b").linked == 3


def test_blobs_that_cannot_be_linked_are_copied(
    ollama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    store = ImageLayout(tmp_path / "store")
    assert adopt(store, Reference.parse("small"), ollama, "small:1b").copied == 3


def test_a_damaged_blob_of_ollama_is_refused(ollama: Path, tmp_path: Path) -> None:
    largest = max((ollama / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(b"GGUF" + bytes(99) + b"!")
    store = ImageLayout(tmp_path / "store")
    with pytest.raises(VerificationError):
        adopt(store, Reference.parse("small"), ollama, "small:1b")
    with pytest.raises(NotFoundError):
        store.resolve(Reference.parse("small"))


def _linked(store: ImageLayout) -> list[Path]:
    return [x for x in store.root.rglob("*") if x.is_file() and x.stat().st_nlink > 1]


@pytest.mark.parametrize("by", ["link", "file"])
def test_a_blob_of_ollama_replaced_before_it_is_linked_is_refused(
    ollama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    real = os.link

    def replace(path: Any, *arguments: Any, **options: Any) -> None:
        Path(path).unlink()
        Path(path).symlink_to(secret) if by == "link" else real(secret, path)
        real(path, *arguments, **options)

    monkeypatch.setattr(os, "link", replace)
    store = ImageLayout(tmp_path / "store")
    with pytest.raises((VerificationError, StoreError), match=r"symbolic links|size mismatch"):
        adopt(store, Reference.parse("small"), ollama, "small:1b")
    assert _linked(store) == []
    assert not any(path.is_symlink() for path in store.root.rglob("*"))


def test_links_to_ollamas_blobs_are_removed_after_an_error(ollama: Path, tmp_path: Path) -> None:
    last = next(path for path in (ollama / "blobs").iterdir() if path.read_bytes()[:3] == b"MIT")
    last.write_bytes(b"XYZ License")
    store = ImageLayout(tmp_path / "store")
    with pytest.raises(VerificationError):
        adopt(store, Reference.parse("small"), ollama, "small:1b")
    assert _linked(store) == []
    assert not list(store.root.glob("blobs/*/*"))


@pytest.mark.parametrize("by", ["owner", "mode"])
def test_blobs_that_another_user_may_write_are_copied(
    ollama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "owner":
        monkeypatch.setattr(open_directory, "is_trusted", lambda _: False)
    for path in (ollama / "blobs").iterdir():
        path.chmod(0o646 if by == "mode" else 0o644)
    store = ImageLayout(tmp_path / "store")
    assert adopt(store, Reference.parse("small"), ollama, "small:1b").copied == 3
    assert _linked(store) == []


def test_another_users_link_in_ollamas_store_is_refused(
    ollama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = next((ollama / "blobs").iterdir())
    path.rename(tmp_path / path.name)
    path.symlink_to(tmp_path / path.name)
    monkeypatch.setattr(open_directory, "is_trusted", lambda _: False)
    with pytest.raises(StoreError, match="another user's link"):
        adopt(ImageLayout(tmp_path / "store"), NAME, ollama, "small:1b")


@pytest.mark.parametrize("name", ["large", "../small:1b", "small:../1b"])
def test_an_unknown_ollama_model_is_reported(ollama: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        adopt(ImageLayout(tmp_path / "store"), NAME, ollama, name)
    assert "small:1b" in str(caught.value.hint)


def test_a_directory_that_is_not_an_ollama_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="not an ollama store"):
        adopt(ImageLayout(tmp_path / "store"), NAME, tmp_path, "small")


def test_a_link_in_ollamas_store_is_followed_before_it_is_linked(
    ollama: Path, tmp_path: Path
) -> None:
    for path in list((ollama / "blobs").iterdir()):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    store = ImageLayout(tmp_path / "store")
    adopt(store, Reference.parse("small"), ollama, "small:1b")
    found = list((tmp_path / "store" / "blobs" / "sha256").iterdir())
    assert len(found) == 4
    assert not any(path.is_symlink() for path in found)


def test_other_options_are_refused_with_ollama(aimage: Callable[..., Aimage], ollama: Path) -> None:
    done = aimage()(
        "create", "x", "small:1b", "--from-ollama", ollama, "--quantize", "int8", code=2
    )
    assert "--quantize cannot be combined with --from-ollama" in done.err
    assert "requires the name of" in aimage()("create", "x", "--from-ollama", ollama, code=2).err


def test_weights_in_subdirectories_are_those_of_modules_or_refused(directory: Path) -> None:
    (directory / "2_Dense").mkdir()
    path = directory / "2_Dense" / "model.safetensors"
    path.write_bytes(safetensors(TENSORS))
    with pytest.raises(UsageError, match=r"several formats: transformers, safetensors \(2_Dense/"):
        packed(directory)
    modules = [{"path": ""}, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    for form in (ModelForm(), ModelForm(whole_files=True)):
        layer = packed(directory, form=form).aimage.get_layer("2_Dense/model.safetensors")
        assert layer.descriptor.media_type == mediatype.AIMAGE_TRANSFORMERS
    path.rename(path.with_name("pytorch_model.bin"))
    with pytest.raises(ModelError, match=r"2_Dense/pytorch_model\.bin is pickled") as caught:
        packed(directory, form=ModelForm(is_chosen=True))
    assert "sentence-transformers" in str(caught.value.hint)


def test_training_files_are_not_packed(directory: Path) -> None:
    (directory / "training_args.bin").write_bytes(b"pickled")
    names = {layer.name for layer in packed(directory).aimage.layers}
    assert "training_args.bin" not in names


def test_tensor_options_are_refused_with_whole_files(directory: Path) -> None:
    with pytest.raises(UsageError, match="whole files"):
        packed(directory, form=ModelForm(whole_files=True), recipe=Recipe.parse("bf16"))
    with pytest.raises(UsageError, match="is reserved for files"):
        ExtraFile.parse(f"{mediatype.AIMAGE_SAFETENSORS}=x")


def test_other_layers_are_not_compressed(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "ep.bin"
    path.write_bytes(b"an execution provider")
    extra = ExtraFile.parse(f"application/vnd.example.ep.v1={path}")
    form = ModelForm(whole_files=True, compression="gzip", extras=(extra,))
    layer = packed(directory, form=form).aimage.get_layer("ep.bin")
    assert layer.descriptor.media_type == "application/vnd.example.ep.v1"
