"""Pack a model directory into an AImage: reproducible, with one blob per tensor."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors

from clowder_aimage import __version__
from clowder_aimage.create import create
from clowder_aimage.dialect import DIALECTS, AImage
from clowder_aimage.document.schema import validate
from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.export import export
from clowder_aimage.importer import CreatePlan, Provenance
from clowder_aimage.importer.blob_writer import WrittenLayer
from clowder_aimage.importer.request_default import build_request_defaults
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import StoredAImage, read_aimage
from clowder_aimage.oci import Reference, mediatype
from tests.exporter.conftest import files_in
from tests.importer.conftest import CLASSES, FILES, WEIGHTS, Model, data_of, in_memory


@pytest.fixture
def packed(model: Model) -> tuple[ImageLayout, StoredAImage]:
    """Return the packed model: the store and its parsed content."""
    model.create()
    store = ImageLayout(model.store)
    return store, read_aimage(store, Reference.parse("model"))


def test_every_tensor_and_file_is_a_layer_sorted_by_name(
    packed: tuple[ImageLayout, StoredAImage],
) -> None:
    _, stored = packed
    names = [layer.name for layer in stored.aimage.layers]
    tensors = {f"{part}/{tensor[0]}" for part, found in WEIGHTS.items() for tensor in found}
    assert set(names) == tensors | set(FILES)
    assert names == sorted(names)
    assert {layer.name for layer in stored.aimage.layers if layer.is_tensor} == tensors


def test_a_tensors_blob_is_a_whole_file_under_its_own_name(
    packed: tuple[ImageLayout, StoredAImage],
) -> None:
    store, stored = packed
    for component, tensors in WEIGHTS.items():
        for tensor in tensors:
            name, dtype, shape = tensor
            layer = stored.aimage.get_layer(f"{component}/{name}")
            assert (layer.dtype, layer.shape) == (dtype, shape)
            raw = store.find_path(layer.descriptor).read_bytes()
            ((key, info),) = safetensors.deserialize(raw)
            assert key == name  # without the component
            assert (info["dtype"], tuple(info["shape"])) == (dtype, shape)
            assert bytes(info["data"]) == data_of(tensor, component)


def test_files_are_kept_byte_for_byte(
    packed: tuple[ImageLayout, StoredAImage], model: Model
) -> None:
    store, stored = packed
    for name in FILES:
        layer = stored.aimage.get_layer(name)
        assert (
            store.find_path(layer.descriptor).read_bytes() == (model.directory / name).read_bytes()
        )
        assert layer.descriptor.media_type == mediatype.AIMAGE_FILE


def test_the_config_describes_the_model(
    packed: tuple[ImageLayout, StoredAImage], model: Model
) -> None:
    _, stored = packed
    config = stored.aimage.properties
    validate("aimage-config", config)
    layers = stored.aimage.layers
    assert config["family"] == "z-image"
    assert config["pipeline"] == "ZImagePipeline"
    assert config["parameters"] == 20 + 16 + 4 + 16 + 4 + 1 + 0 + 36
    assert config["size"] == sum(layer.descriptor.size for layer in layers)
    assert config["dtype"] == "F32"
    assert config["defaults"] == {"width": 64, "height": 64}
    assert list(config["components"]) == sorted(CLASSES)
    for name, component in config["components"].items():
        assert [component["library"], component["class"]] == CLASSES[name]
        own = stored.aimage.list_layers(name)
        assert component["size"] == sum(layer.descriptor.size for layer in own)
        tensors = [layer for layer in own if layer.is_tensor]
        assert component.get("tensors", 0) == len(tensors)
    assert config["components"]["text_encoder"]["dtype"] == "BF16"
    assert "dtype" not in config["components"]["tokenizer"]
    assert "license" not in config
    assert "created" not in config


BASE = {"width": 64, "height": 64, "steps": 28, "guidance": 4}


@pytest.mark.parametrize(
    ("shift", "given", "defaults"),
    [
        (3.0, {}, {"width": 64, "height": 64}),
        (6.0, {}, BASE),
        (6, {"guidance": 0}, BASE | {"guidance": 0}),
        ("6", {"steps": 9}, {"width": 64, "height": 64, "steps": 9}),
    ],
)
def test_steps_and_guidance_follow_from_the_schedule_unless_they_are_given(
    model: Model, shift: object, given: dict[str, int], defaults: dict[str, int]
) -> None:
    scheduler = model.read("scheduler/scheduler_config.json")
    model.write("scheduler/scheduler_config.json", scheduler | {"shift": shift})
    made = model.create(provenance=Provenance(defaults=given))
    assert made.aimage.properties["defaults"] == defaults


@pytest.mark.parametrize("size", [72, 0, -16, 8208, 64.0, True, "64", None])
def test_a_size_that_no_request_may_have_is_no_default(model: Model, size: object) -> None:
    config = model.read("vae/config.json")
    model.write("vae/config.json", config | {"sample_size": size})
    assert "defaults" not in model.create().aimage.properties


def test_equal_defaults_are_written_in_one_way_and_others_are_refused() -> None:
    assert str(build_request_defaults(9, 4.0)) == "{'steps': 9, 'guidance': 4}"
    assert build_request_defaults(None, 2.5) == {"guidance": 2.5}
    for steps, guidance in [(0, None), (1001, None), (None, -1), (None, float("nan"))]:
        with pytest.raises(UsageError, match=r"must be a (whole )?number from"):
            build_request_defaults(steps, guidance)


def test_the_config_contains_no_path_user_or_program(
    packed: tuple[ImageLayout, StoredAImage], model: Model
) -> None:
    _, stored = packed
    text = stored.aimage.config.decode()
    for word in (str(model.directory), str(model.store), "tmp", __version__, "0.42"):
        assert word not in text
    for word in ("user", "host", "version", "tool", "date"):
        assert word not in text.replace("schemaVersion", "").replace("diffusers", "").lower()


def test_given_provenance_is_recorded(model: Model) -> None:
    given = Provenance("apache-2.0", "https://example.com/m", "2026-01-31T12:00:00Z")
    made = model.create(provenance=given)
    config = read_aimage(ImageLayout(model.store), Reference.parse("model")).aimage.properties
    assert (config["license"], config["source"], config["created"]) == (
        "apache-2.0",
        "https://example.com/m",
        "2026-01-31T12:00:00Z",
    )
    assert made.manifest.annotations == {
        "org.opencontainers.image.licenses": "apache-2.0",
        "org.opencontainers.image.created": "2026-01-31T12:00:00Z",
    }
    validate("aimage-config", config)


@pytest.mark.parametrize(
    "provenance",
    [Provenance(created="yesterday"), Provenance(license="\udcff")],
    ids=["time", "license"],
)
def test_invalid_provenance_is_refused_before_anything_is_written(
    model: Model, provenance: Provenance
) -> None:
    with pytest.raises(FormatError):
        model.create(provenance=provenance)
    assert not model.store.exists()


@pytest.mark.parametrize(
    ("card", "license_"),
    [
        ("---\nlicense: apache-2.0\n---\n# Model\n", "apache-2.0"),
        ("---\ntags:\n- x\nlicense: 'mit'  # really\n---\n", "mit"),
        ('\ufeff---\r\nlicense: "cc-by-4.0"\r\n---\r\n', "cc-by-4.0"),
        ("---\nlicense: other\nlicense_name: flux-1\n---\n", "LicenseRef-flux-1"),
        ("---\nlicense_name: 'Qwen Research'\nlicense: other\n---\n", "LicenseRef-Qwen-Research"),
        ("---\nlicense: other\nlicense_link: LICENSE\n---\n", "other"),
        ("---\nlicense: mit\nlicense_name: x\n---\n", "mit"),
        ("---\nlicense:\n- mit\n---\n", None),
        ("---\nlicense: ''\n---\n", None),
        ("# Model\nlicense: mit\n", None),
        ("---\ntitle: x\n---\nlicense: mit\n", None),
    ],
)
def test_the_licence_is_read_from_the_model_card(
    model: Model, card: str, license_: str | None
) -> None:
    model.write("README.md", card)
    model.create()
    config = read_aimage(ImageLayout(model.store), Reference.parse("model")).aimage.properties
    assert config.get("license") == license_


# -- reproducible digests


def test_the_digest_is_pinned(model: Model) -> None:
    """A model packed by an earlier version must keep its digest."""
    assert model.digest() == PINNED


PINNED = "sha256:3c88f55cd1dbb302d650f6243ddaf038f82d893a43451aebd268cbc27a424aa1"


def stored(model: Model) -> AImage:
    return read_aimage(ImageLayout(model.store), Reference.parse("model")).aimage


def test_one_file_or_shards_from_any_place_in_any_order(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards have the tensors of one file, and come back with their headers and index."""
    digest = model.digest()
    model.create()
    whole = {x.name: x.descriptor.digest for x in stored(model).layers if x.is_tensor}
    for order in ([[2, 0], [1]], [[1, 0, 2]]):
        other = tmp_path / f"elsewhere-{order}" / "ünïcode and spaces"
        shutil.copytree(model.directory, other)
        sharded = type(model)(other, model.store)
        tensors = WEIGHTS["text_encoder"]
        sharded.shard("text_encoder", *[[tensors[i] for i in shard] for shard in order])
        sharded.create()
        assert {x.name: x.descriptor.digest for x in stored(model).layers if x.is_tensor} == whole
        out = tmp_path / f"out-{order}"
        export(ImageLayout(model.store), Reference.parse("model"), out)
        assert files_in(out / "text_encoder") == files_in(other / "text_encoder")
    monkeypatch.chdir(model.directory)
    here = type(model)(Path(), model.store)
    assert here.digest() == digest
    link = tmp_path / "link"
    link.symlink_to(model.directory)
    assert type(model)(link, model.store).digest() == digest


def test_file_modes_times_and_hidden_files_do_not_change_the_digest(model: Model) -> None:
    digest = model.digest()
    before = os.umask(0o077)
    try:
        for path in model.directory.rglob("*"):
            os.utime(path, (0, 0))
            path.chmod(0o700 if path.is_dir() else 0o600)
        model.write(".gitattributes", "x")
        model.write("vae/.DS_Store", b"\0")
        model.write("transformer/._config.json", b"\0\5\26\7")
        model.write("vae/__pycache__/x.pyc", b"x")
        (model.directory / ".cache").mkdir()
        assert model.digest() == digest
    finally:
        os.umask(before)


def test_any_dialect_rewritten_as_clowder_has_the_digest_of_create(model: Model) -> None:
    digest = model.digest()
    for dialect in DIALECTS:
        model.create(f"model:{dialect}", dialect=dialect)
        stored = read_aimage(ImageLayout(model.store), Reference.parse(f"model:{dialect}"))
        assert stored.dialect.name == dialect
        assert str(DIALECTS["clowder"].write(stored.aimage)[0].digest) == digest


# -- shared blobs


def blobs(store: Path) -> set[Any]:
    return {path.name for path in (store / "blobs" / "sha256").iterdir()}


def test_two_models_share_their_text_encoder(
    model: Model, make_model: Callable[..., Model]
) -> None:
    other = make_model("other", transformer="another", vae="another")
    first = model.create("first")
    assert not any(written.existed for written in first.layers)
    before = blobs(model.store)
    second = other.create("second")
    shared = {written.layer.name for written in second.layers if written.existed}
    # tensors without elements have equal blobs
    new = {
        f"{part}/{tensor[0]}"
        for part in ("transformer", "vae")
        for tensor in WEIGHTS[part]
        if 0 not in tensor[2]
    }
    assert {written.layer.name for written in second.layers} - shared == new
    assert len(blobs(model.store) - before) == len(new) + 1  # and a manifest
    again = other.create("again")
    assert all(written.existed for written in again.layers)
    assert again.descriptor == second.descriptor


def test_every_step_emits_events(model: Model) -> None:
    plans: list[CreatePlan] = []
    written: list[WrittenLayer] = []
    made = model.create(on_plan=plans.append, on_written=written.append)
    (plan,) = plans
    assert plan.size == sum(item.layer.descriptor.size for item in made.layers)
    assert sorted(i.layer.name for i in written) == [i.layer.name for i in made.layers]


# -- unusual but valid directories


def test_a_hugging_face_cache_is_packed(model: Model, tmp_path: Path) -> None:
    """Its snapshots are links to its own blobs."""
    digest = model.digest()
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "0123abcd"
    (repository / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(model.directory.rglob("*"))):
        if path.is_dir():
            continue
        name = path.relative_to(model.directory)
        (repository / "blobs" / f"{number:040x}").write_bytes(path.read_bytes())
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        up = os.path.relpath(repository / "blobs", link.parent)
        link.symlink_to(f"{up}/{number:040x}")
    assert type(model)(snapshot, model.store).digest() == digest
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    (snapshot / "vae" / "extra.json").symlink_to(outside)
    with pytest.raises(ModelError, match="outside the model directory"):
        type(model)(snapshot, model.store).create()


def test_a_link_inside_the_directory_is_packed_as_a_file(model: Model) -> None:
    digest = model.digest()
    template = model.directory / "tokenizer" / "chat_template.jinja"
    template.rename(model.directory / ".template")
    template.symlink_to("../.template")
    assert model.digest() == digest


def test_files_that_no_pipeline_reads_are_packed(model: Model) -> None:
    """A name that no layer can have is left out."""
    others = {"tokenizer/größe.json", "vae/x'\"$(id).json", "NOTICE", "assets/picture.png"}
    for name in (*others, "scheduler/a\\b.txt"):
        model.write(name, "{}")
    made = model.create()
    assert others <= {written.layer.name for written in made.layers}
    assert [file.path for file in made.left_out] == ["scheduler/a\\b.txt"]


def test_a_tokenizer_of_vocabulary_and_merges_is_accepted(model: Model) -> None:
    (model.directory / "tokenizer" / "tokenizer.json").unlink()
    model.write("tokenizer/vocab.json", {"a": 0})
    model.write("tokenizer/merges.txt", "#version: 0.2\n")
    names = {written.layer.name for written in model.create().layers}
    assert {"tokenizer/vocab.json", "tokenizer/merges.txt"} <= names


def test_a_component_declared_as_absent_is_not_required(model: Model) -> None:
    model.write(
        "model_index.json",
        FILES["model_index.json"] | {"safety_checker": [None, None], "is_distilled": True},
    )
    assert model.create()


def test_the_store_may_be_in_the_model_directory(model: Model) -> None:
    store = ImageLayout(model.directory / "store")
    first = create(store, Reference.parse("m"), model.directory)
    assert create(store, Reference.parse("m"), model.directory).descriptor == first.descriptor
    assert str(first.descriptor.digest) == model.digest()


def test_the_embedded_model_is_packed(tiny: Path) -> None:
    made = create(in_memory(), Reference.parse("tiny"), tiny)
    index = json.loads((tiny / "model_index.json").read_bytes())
    assert index["_class_name"] == "ZImagePipeline"
    assert len({written.layer.name for written in made.layers}) == len(made.layers) > 100
