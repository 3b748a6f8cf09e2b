"""create refuses invalid directories with the file's name, before it writes anything."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.dialect import DIALECTS
from clowder_aimage.errors import ContentError, ModelError, NotFoundError
from clowder_aimage.formats.diffusers import take_inventory
from clowder_aimage.formats.left_out import COPY, TRAINING, UNNAMED, LeftOut
from clowder_aimage.importer import Provenance, make_plan
from clowder_aimage.layout import ImageLayout
from tests.importer.conftest import FILES, WEIGHTS, Model, safetensors


def refused(model: Model, *said: Any) -> ContentError:
    """Verify that packing fails with a message containing ``said``, without creating the store."""
    with pytest.raises(ContentError) as caught:
        model.create()
    for word in said:
        assert str(word) in caught.value.message
    assert not model.store.exists()
    return caught.value


def test_a_missing_directory_is_refused(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "absent"
    with pytest.raises(NotFoundError, match="does not exist") as caught:
        type(model)(path, model.store).create()
    assert caught.value.hint and not model.store.exists()
    path = model.directory / "model_index.json"
    error = refused(type(model)(path, model.store), path, "unsupported model format")
    assert error.hint


def test_a_missing_model_index_is_refused(model: Model) -> None:
    (model.directory / "model_index.json").unlink()
    error = refused(model, "model_index.json", model.directory)
    assert "complete" in str(error.hint)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_index.json", "{"),
        ("tokenizer/tokenizer_config.json", ""),
        *(("vae/config.json", raw) for raw in (b"\xff\xfe", "[" * 100_000, b'{"a": NaN}')),
    ],
    ids=lambda v: repr(v)[:24],
)
def test_invalid_json_is_refused(model: Model, name: str, value: str | bytes) -> None:
    path = model.write(name, value)
    is_deep = isinstance(value, str) and value.startswith("[")
    refused(model, path, "is nested" if is_deep else "is not valid JSON")


@pytest.mark.parametrize(("name", "value"), [("model_index.json", "[]"), ("vae/config.json", "1")])
def test_a_config_must_be_an_object(model: Model, name: str, value: str) -> None:
    path = model.write(name, value)
    refused(model, path, "is not a JSON object")


def test_a_pipeline_without_a_class_is_refused(model: Model) -> None:
    pipeline = ["ZImagePipeline"]
    path = model.write("model_index.json", FILES["model_index.json"] | {"_class_name": pipeline})
    refused(model, path, "invalid pipeline class")


def test_an_unknown_component_is_refused(model: Model) -> None:
    extra = {"unet": ["diffusers", "UNet2DConditionModel"]}
    path = model.write("model_index.json", FILES["model_index.json"] | extra)
    refused(model, path, "unknown components: unet")


@pytest.mark.parametrize("name", ["ZImageControlNetModel", "SD3ControlNetModel"])
def test_a_controlnet_that_is_named_must_be_there_and_of_its_class(model: Model, name: str) -> None:
    extra = {"controlnet": ["diffusers", name]}
    model.write("model_index.json", FILES["model_index.json"] | extra)
    is_own = name == "ZImageControlNetModel"
    refused(model, "the controlnet is missing" if is_own else f"unsupported controlnet '{name}'")


@pytest.mark.parametrize("component", ["tokenizer", "vae"])
def test_a_missing_component_is_refused(model: Model, component: str) -> None:
    (model.directory / component).rename(model.directory / "elsewhere")
    refused(model, f"the {component} is missing", model.directory / component)


@pytest.mark.parametrize(
    ("component", "entry"), [("scheduler", None), ("vae", ["diffusers"]), ("vae", [1, 2])], ids=str
)
def test_a_component_must_be_named_in_the_index(
    model: Model, component: str, entry: list[Any] | None
) -> None:
    value = FILES["model_index.json"] | {component: entry}
    path = model.write("model_index.json", value)
    refused(model, path, component)


@pytest.mark.parametrize("name", ["scheduler/scheduler_config.json", "vae/config.json"])
def test_a_missing_config_is_refused(model: Model, name: str) -> None:
    path = model.directory / name
    path.unlink()
    refused(model, path, "is missing")
    path.mkdir()  # a directory is not a file
    refused(model, path, "is missing")


# -- weights


def test_a_component_without_weights_is_refused(model: Model) -> None:
    model.weights("vae").unlink()
    refused(model, model.directory / "vae", "found none")


@pytest.mark.parametrize(
    ("name", "said"),
    [("tokenizer.json", "has neither tokenizer.json"), ("chat_template.jinja", "no chat template")],
)
def test_an_incomplete_tokenizer_is_refused(model: Model, name: str, said: str) -> None:
    (model.directory / "tokenizer" / name).unlink()
    refused(model, model.directory / "tokenizer", said)


def test_two_weight_files_without_an_index_are_refused(model: Model) -> None:
    other = model.write("vae/diffusion_pytorch_model.fp16.safetensors", safetensors(WEIGHTS["vae"]))
    error = refused(model, model.directory / "vae", model.weights("vae").name, other.name)
    assert "keep only one variant" in str(error.hint)


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def sharded(model: Model) -> Model:
    first, second, third = WEIGHTS["text_encoder"]
    model.shard("text_encoder", [first], [second, third])
    return model


def change_index(model: Model, change: Callable[[Any], Any]) -> Path:
    name = "text_encoder/model.safetensors.index.json"
    value = model.read(name)
    change(value["weight_map"])
    return model.write(name, value)


def test_a_missing_shard_is_refused(sharded: Model) -> None:
    (sharded.directory / "text_encoder" / SHARDS[1]).unlink()
    refused(sharded, "model.safetensors.index.json", "missing", SHARDS[1])


def test_an_extra_shard_is_refused(sharded: Model) -> None:
    extra = [("extra.weight", "F32", (1,))]
    sharded.write("text_encoder/model-00003-of-00003.safetensors", safetensors(extra))
    refused(sharded, "model.safetensors.index.json", "model-00003-of-00003.safetensors")


def test_an_index_with_a_missing_tensor_is_refused(sharded: Model) -> None:
    index = change_index(sharded, lambda shards: shards.update(ghost=SHARDS[0]))
    refused(sharded, index, "ghost", SHARDS[0], "no shard")


def test_a_tensor_in_the_wrong_shard_is_refused(sharded: Model) -> None:
    index = change_index(sharded, lambda shards: shards.update({"model.norm.weight": SHARDS[0]}))
    refused(sharded, index, "model.norm.weight", *SHARDS)


def test_a_tensor_in_two_shards_is_refused(sharded: Model) -> None:
    both = safetensors(WEIGHTS["text_encoder"][:2])
    sharded.write(f"text_encoder/{SHARDS[0]}", both)
    refused(sharded, "duplicate tensor", "model.safetensors.index.json")


@pytest.mark.parametrize("value", ["{", '{"weight_map":{"a":1}}', '{"weight_map":null}'])
def test_an_invalid_index_is_refused(sharded: Model, value: str) -> None:
    index = sharded.write("text_encoder/model.safetensors.index.json", value)
    refused(sharded, index, "weight_map is missing")


def test_two_indexes_are_refused(sharded: Model) -> None:
    other = sharded.write("text_encoder/other.safetensors.index.json", {"weight_map": {}})
    refused(sharded, "several indexes", other.name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *(("weights.ckpt", UNNAMED), ("tokenizer/weights", UNNAMED)),
        *(("text_encoder/pytorch_model.bin", COPY), ("vae/optimizer.pt", TRAINING)),
    ],
)
def test_pickled_weights_beside_the_components_are_left_out(
    model: Model, name: str, reason: str
) -> None:
    model.write(name, b"\x80\x04")
    assert model.create().left_out == (LeftOut(name, reason),)


def test_pickled_weights_are_refused(model: Model) -> None:
    model.weights("vae").unlink()
    path = model.write("vae/weights.dat", b"\x80\x04")
    error = refused(model, path, "is pickled")
    assert "safetensors" in str(error.hint)


def header(text: str, data: int) -> bytes:
    raw = text.encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "truncated"),
        (b"<!DOCTYPE html><html>not found</html>", "invalid header length"),
        (
            header('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 7),
            "have 8 bytes, the file has 7",
        ),
    ],
    ids=["nothing", "HTML", "a byte too few"],
)
def test_a_damaged_file_is_refused(model: Model, data: bytes, said: str) -> None:
    path = model.weights("transformer")
    path.write_bytes(data)
    error = refused(model, path, "is damaged", said)
    assert "download the complete file" in str(error.hint)
    assert error.exit_code == 5


def test_weights_without_tensors_are_refused(model: Model) -> None:
    model.weights("vae").write_bytes(safetensors([]))
    refused(model, model.directory / "vae", "contains no tensors")


@pytest.mark.parametrize(
    "name", ["vae/diffusion_pytorch_model.safetensors", "tokenizer/tokenizer.json"]
)
def test_lfs_pointers_are_refused(model: Model, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 5\n"
    path = model.write(name, pointer)
    error = refused(model, path, "Git LFS pointer")
    assert "git lfs pull" in str(error.hint)


@pytest.mark.parametrize("name", ["../x", "x" * 1021, "a\u202eb"])
def test_invalid_layer_names_are_refused(model: Model, name: str) -> None:
    path = model.weights("vae")
    path.write_bytes(safetensors([(name, "F32", (1,))]))
    refused(model, path, "invalid layer name")


def test_a_component_of_another_class_is_refused(model: Model) -> None:
    index = FILES["model_index.json"] | {"vae": ["diffusers", "SomethingElse"]}
    model.write("model_index.json", index)
    refused(model, model.directory / "model_index.json", "SomethingElse")


def test_a_tensor_named_like_a_file_is_refused(model: Model) -> None:
    path = model.weights("vae")
    path.write_bytes(safetensors([("config.json", "F32", (1,))]))
    refused(model, path, model.directory / "vae" / "config.json", "vae/config.json")


# -- links and special files


def test_a_link_out_of_the_directory_is_refused(model: Model, tmp_path: Path) -> None:
    outside = tmp_path / "secret.json"
    outside.write_text('{"password": 1}')
    for name in ("tokenizer/extra.json", "vae/anything", "README.md"):
        path = model.directory / name
        path.symlink_to(outside)
        refused(model, path, "outside the model directory", outside)
        path.unlink()


@pytest.mark.parametrize(
    "name",
    ["model_index.json", "vae/config.json", "vae/diffusion_pytorch_model.safetensors", "vae"],
)
def test_a_file_replaced_by_a_link_out_is_refused(model: Model, tmp_path: Path, name: str) -> None:
    path = model.directory / name
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    refused(model, path, "outside the model directory")


def test_blobs_of_another_repository_are_refused(model: Model, tmp_path: Path) -> None:
    """A snapshot may only use the blobs of its own repository."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_text("{}")
    path = model.directory / "vae" / "extra.json"
    path.symlink_to(tmp_path / "blobs" / "abc")
    refused(model, path, "outside the model directory")


def test_dangling_and_circular_links_are_refused(model: Model) -> None:
    path = model.directory / "vae" / "extra.json"
    for target in ("absent.json", "extra.json"):
        path.symlink_to(target)
        refused(model, path, "broken link")
        path.unlink()


def test_a_pipe_is_refused(model: Model) -> None:
    path = model.directory / "vae" / "pipe.json"
    os.mkfifo(path)
    refused(model, path, "not a regular file")


def test_an_unreadable_file_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    for name in ("read_bytes", "iterdir", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, refuse)
            refused(model, "cannot read", "Permission denied", model.directory)


# -- limits


def test_too_many_layers_are_refused(model: Model) -> None:
    tensors = [(f"{number}.{'long.' * 80}name", "U8", (1,)) for number in range(6000)]
    model.weights("transformer").write_bytes(safetensors(tensors))
    refused(model, "layers exceeds 4194304 bytes")


def test_a_plan_reads_no_weights(model: Model) -> None:
    """All decisions use headers, so a disk that fails later has cost nothing yet."""
    path = model.weights("vae")
    raw = path.read_bytes()
    inventory = take_inventory(model.directory)
    path.write_bytes(b"\xff" * len(raw))
    plan = make_plan(inventory, DIALECTS["clowder"], Provenance())
    assert plan.size == sum(layer.size for layer in plan.layers)


# -- failures during the write


def changed_while_read(model: Model, change: Callable[[Path], None]) -> None:
    """Run ``change`` between planning and reading the weights."""
    path = model.weights("vae")
    with pytest.raises(ModelError) as caught:
        model.create(on_plan=lambda _: change(path))
    assert str(path) in caught.value.message
    assert "changed while it was read" in caught.value.message
    assert list(ImageLayout(model.store).list_tags()) == []


def test_a_file_truncated_meanwhile_is_refused(model: Model) -> None:
    changed_while_read(model, lambda path: os.truncate(path, 100))


def test_a_file_replaced_meanwhile_is_refused(model: Model) -> None:
    """Other bytes of the same size would otherwise be packed unnoticed."""

    def rewrite(path: Path) -> None:
        raw = path.read_bytes()
        before = path.stat().st_mtime_ns
        path.write_bytes(raw[:-1] + b"\xff")
        os.utime(path, ns=(before + 1, before + 1))

    changed_while_read(model, rewrite)


def test_a_file_removed_meanwhile_is_refused(model: Model) -> None:
    path = model.weights("vae")
    with pytest.raises(ModelError, match=r"cannot read .*No such file"):
        model.create(on_plan=lambda _: path.unlink())
    assert list(ImageLayout(model.store).list_tags()) == []


def test_inexact_json_numbers_are_not_copied_to_the_config(model: Model) -> None:
    """The config must not depend on the notation of numbers in the model's files."""
    model.write("vae/config.json", '{"sample_size": 1e2, "big": 1e300}')
    made = model.create()
    assert made.manifest
    config = json.loads(ImageLayout(model.store).find_path(made.manifest.config).read_bytes())
    assert "defaults" not in config
