"""What create refuses: with the file's name, and before it has made anything."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from clowder_aimage.dialect import DIALECTS
from clowder_aimage.errors import ContentError, ModelError, NoSpaceError
from clowder_aimage.importer import Provenance, make_plan, take_inventory
from clowder_aimage.layout import ImageLayout
from tests.importer.conftest import FILES, WEIGHTS, safetensors


def refused(model, *said):
    """Packing fails with a message that holds ``said``, and the store was not even made."""
    with pytest.raises(ContentError) as caught:
        model.create()
    for word in said:
        assert str(word) in caught.value.message
    assert not model.store.exists()
    return caught.value


def test_no_directory(model, tmp_path):
    path = tmp_path / "absent"
    error = refused(type(model)(path, model.store), path, "there is no")
    assert error.hint
    path = model.directory / "model_index.json"
    error = refused(type(model)(path, model.store), path, "is in no format")
    assert error.hint


def test_no_model_index(model):
    (model.directory / "model_index.json").unlink()
    error = refused(model, "model_index.json", model.directory)
    assert "in full" in error.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "{") for name in FILES if name.endswith(".json")),
        *(("vae/config.json", v) for v in ("", b"\xff\xfe", "[" * 100_000, '{"a": 1}{}')),
    ],
    ids=lambda v: repr(v)[:24],
)
def test_json_that_is_not(model, name, value):
    path = model.write(name, value)
    refused(model, path, "is not JSON")


@pytest.mark.parametrize("value", ["[]", "null", "1", '"x"'])
@pytest.mark.parametrize(
    "name", ["model_index.json", "scheduler/scheduler_config.json", "vae/config.json"]
)
def test_a_config_that_is_no_object(model, name, value):
    path = model.write(name, value)
    refused(model, path, "is not a JSON object")


@pytest.mark.parametrize("pipeline", ["StableDiffusionPipeline", "", None, ["ZImagePipeline"], 1])
def test_an_unknown_pipeline(model, pipeline):
    path = model.write("model_index.json", FILES["model_index.json"] | {"_class_name": pipeline})
    error = refused(model, path, "names the pipeline", "not known")
    assert "ZImagePipeline" in error.hint


def test_a_part_that_would_be_left_out(model):
    extra = {"controlnet": ["diffusers", "ZImageControlNetModel"]}
    path = model.write("model_index.json", FILES["model_index.json"] | extra)
    refused(model, path, "not known: controlnet")


COMPONENTS = ["scheduler", "text_encoder", "tokenizer", "transformer", "vae"]


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_missing_component(model, component):
    (model.directory / component).rename(model.directory / "elsewhere")
    refused(model, f"the {component} is missing", model.directory / component)


@pytest.mark.parametrize(
    ("component", "entry"),
    [
        *((component, None) for component in COMPONENTS),
        *(("vae", entry) for entry in ([], ["diffusers"], [None, None], "x", [1, 2])),
    ],
    ids=str,
)
def test_a_component_that_the_index_does_not_say(model, component, entry):
    value = FILES["model_index.json"] | {component: entry}
    path = model.write("model_index.json", value)
    refused(model, path, component)


@pytest.mark.parametrize(
    "name",
    [
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "transformer/config.json",
        "vae/config.json",
    ],
)
def test_a_missing_config(model, name):
    path = model.directory / name
    path.unlink()
    refused(model, path, "is missing")
    path.mkdir()  # a directory is no file either
    refused(model, path, "is missing")


def test_a_tokenizer_without_its_file(model):
    (model.directory / "tokenizer" / "tokenizer.json").unlink()
    refused(model, model.directory / "tokenizer", "has no tokenizer.json")


# -- weights


@pytest.mark.parametrize("component", WEIGHTS)
def test_no_weights(model, component):
    model.weights(component).unlink()
    refused(model, model.directory / component, "it has none")


def test_two_weight_files_without_an_index(model):
    other = model.write("vae/diffusion_pytorch_model.fp16.safetensors", safetensors(WEIGHTS["vae"]))
    error = refused(model, model.directory / "vae", model.weights("vae").name, other.name)
    assert "keep one of the variants" in error.hint


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def sharded(model):
    first, second, third = WEIGHTS["text_encoder"]
    model.shard("text_encoder", [first], [second, third])
    return model


def change_index(model, change):
    name = "text_encoder/model.safetensors.index.json"
    value = model.read(name)
    change(value["weight_map"])
    return model.write(name, value)


def test_a_missing_shard(sharded):
    (sharded.directory / "text_encoder" / SHARDS[1]).unlink()
    refused(sharded, "model.safetensors.index.json", "missing", SHARDS[1])


def test_an_extra_shard(sharded):
    extra = [("extra.weight", "F32", (1,))]
    sharded.write("text_encoder/model-00003-of-00003.safetensors", safetensors(extra))
    refused(sharded, "model.safetensors.index.json", "model-00003-of-00003.safetensors")


def test_the_old_single_file_next_to_shards(sharded):
    sharded.write("text_encoder/model.safetensors", safetensors(WEIGHTS["text_encoder"]))
    refused(sharded, "model.safetensors.index.json", "does not know", "model.safetensors")


def test_a_stale_index_next_to_a_single_file(model):
    index = model.shard("vae", WEIGHTS["vae"])
    shard = next((model.directory / "vae").glob("*-of-*.safetensors"))
    shard.rename(model.weights("vae"))
    refused(model, index, "missing", shard.name)


def test_an_index_that_names_a_tensor_no_shard_has(sharded):
    index = change_index(sharded, lambda shards: shards.update(ghost=SHARDS[0]))
    refused(sharded, index, "ghost", SHARDS[0], "no shard")


def test_a_tensor_that_the_index_does_not_name(sharded):
    index = change_index(sharded, lambda shards: shards.pop("model.norm.weight"))
    refused(sharded, index, "model.norm.weight", SHARDS[1])


def test_a_tensor_in_another_shard_than_the_index_says(sharded):
    index = change_index(sharded, lambda shards: shards.update({"model.norm.weight": SHARDS[0]}))
    refused(sharded, index, "model.norm.weight", *SHARDS)


def test_a_tensor_in_two_shards(sharded):
    both = safetensors(WEIGHTS["text_encoder"][:2])
    sharded.write(f"text_encoder/{SHARDS[0]}", both)
    refused(sharded, "two shards", "model.safetensors.index.json")


@pytest.mark.parametrize(
    "value", ["{}", "[]", "{", '{"weight_map":[]}', '{"weight_map":{"a":1}}', '{"weight_map":null}']
)
def test_an_index_that_is_none(sharded, value):
    index = sharded.write("text_encoder/model.safetensors.index.json", value)
    refused(sharded, index, "no weight_map")


def test_an_index_that_points_outside(sharded):
    index = change_index(sharded, lambda shards: shards.update(x="../../../etc/passwd"))
    refused(sharded, index, "missing", "../../../etc/passwd")


def test_two_indexes(sharded):
    other = sharded.write("text_encoder/other.safetensors.index.json", {"weight_map": {}})
    refused(sharded, "several indexes", other.name)


@pytest.mark.parametrize(
    ("place", "suffix"),
    [
        *(("", suffix) for suffix in ("bin", "pt", "pth", "ckpt", "pkl", "pickle", "BIN", "Pt")),
        *((place, "bin") for place in ("text_encoder/", "transformer/", "vae/", "tokenizer/")),
    ],
)
def test_pickled_weights(model, place, suffix):
    path = model.write(f"{place}weights.{suffix}", b"\x80\x04")
    error = refused(model, path, "is pickled")
    assert "safetensors" in error.hint


def header(text: str, data: int) -> bytes:
    raw = text.encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


LIES = {
    "nothing": (b"", "truncated"),
    "seven bytes": (b"\1\0\0\0\0\0\0", "truncated"),
    "a header longer than the file": (header('{"a":', 0)[:-1], "the header claims"),
    "a page of HTML": (b"<!DOCTYPE html><html>not found</html>", "the header claims"),
    "offsets past the end": (
        header('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 7),
        "fill 8",
    ),
    "bytes too many": (
        header('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 9),
        "fill 8",
    ),
    "an overlap": (
        header(
            '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
            '"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}',
            6,
        ),
        "an overlap at tensor b",
    ),
    "a hole": (
        header(
            '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
            '"b":{"dtype":"U8","shape":[4],"data_offsets":[6,10]}}',
            10,
        ),
        "a hole before tensor b",
    ),
    "a key twice": (
        header(
            '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
            '"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}',
            8,
        ),
        "a key twice",
    ),
    "an unknown dtype": (
        header('{"a":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}}', 1),
        "dtype",
    ),
    "half a surrogate": (
        header('{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
        "not a tensor name",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header(model, lie):
    data, said = LIES[lie]
    path = model.weights("transformer")
    path.write_bytes(data)
    error = refused(model, path, "is damaged", said)
    assert "download the file again" in error.hint
    assert error.exit_code == 5


def test_a_truncated_file(model):
    path = model.weights("transformer")
    raw = path.read_bytes()
    for size in (len(raw) - 1, len(raw) // 2, 100, 8, 1):
        path.write_bytes(raw[:size])
        refused(model, path, "is damaged")


def test_weights_without_tensors(model):
    model.weights("vae").write_bytes(safetensors([]))
    refused(model, model.directory / "vae", "holds no tensors")


@pytest.mark.parametrize(
    "name", ["vae/diffusion_pytorch_model.safetensors", "tokenizer/tokenizer.json"]
)
def test_what_a_clone_without_lfs_leaves(model, name):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 5\n"
    path = model.write(name, pointer)
    error = refused(model, path, "Git LFS pointer")
    assert "git lfs pull" in error.hint


@pytest.mark.parametrize("name", ["../x", "a//b", "/x", "a\\b", "..", "x" * 1021])
def test_tensors_whose_names_no_layer_may_have(model, name):
    path = model.weights("vae")
    path.write_bytes(safetensors([(name, "F32", (1,))]))
    refused(model, path, "not a layer name")


@pytest.mark.parametrize("raw", [b"\xef\xbb\xbf{}", '{"a": 1}'.encode("utf-16"), b'{"a": NaN}'])
def test_json_that_other_readers_would_refuse(model, raw):
    path = model.directory / "vae" / "config.json"
    path.write_bytes(raw)
    refused(model, path, "is not JSON")


def test_no_chat_template(model):
    (model.directory / "tokenizer" / "chat_template.jinja").unlink()
    refused(model, model.directory / "tokenizer", "no chat template")


@pytest.mark.parametrize("part", ["scheduler", "transformer", "vae"])
def test_a_part_of_another_class(model, part):
    index = FILES["model_index.json"] | {part: ["diffusers", "SomethingElse"]}
    model.write("model_index.json", index)
    refused(model, model.directory / "model_index.json", "SomethingElse")


def test_a_tensor_that_is_called_like_a_file(model):
    path = model.weights("vae")
    path.write_bytes(safetensors([("config.json", "F32", (1,))]))
    refused(model, path, model.directory / "vae" / "config.json", "vae/config.json")


# -- links and other things that are no files


def test_a_link_that_leaves_the_directory(model, tmp_path):
    outside = tmp_path / "secret.json"
    outside.write_text('{"password": 1}')
    for name in ("tokenizer/extra.json", "vae/anything", "top.txt"):
        path = model.directory / name
        path.symlink_to(outside)
        refused(model, path, "leaves the model directory", outside)
        path.unlink()


@pytest.mark.parametrize(
    "name", ["model_index.json", "vae/config.json", "tokenizer/tokenizer.json"]
)
def test_a_file_that_is_a_link_out(model, tmp_path, name):
    path = model.directory / name
    path.rename(tmp_path / "outside.json")
    path.symlink_to(tmp_path / "outside.json")
    refused(model, path, "leaves the model directory")


def test_weights_that_are_a_link_out(model, tmp_path):
    path = model.weights("vae")
    path.rename(tmp_path / "weights.safetensors")
    path.symlink_to(tmp_path / "weights.safetensors")
    refused(model, path, "leaves the model directory")


def test_a_component_that_is_a_link_out(model, tmp_path):
    path = model.directory / "vae"
    path.rename(tmp_path / "vae")
    path.symlink_to(tmp_path / "vae")
    refused(model, path, "leaves the model directory")


def test_a_card_that_is_a_link_out(model, tmp_path):
    (tmp_path / "card").write_text("---\nlicense: mit\n---\n")
    (model.directory / "README.md").symlink_to(tmp_path / "card")
    refused(model, model.directory / "README.md", "leaves the model directory")


def test_a_neighbours_blobs_are_not_ours(model, tmp_path):
    """Only a snapshot may use blobs, and only those of its own repository."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_text("{}")
    path = model.directory / "vae" / "extra.json"
    path.symlink_to(tmp_path / "blobs" / "abc")
    refused(model, path, "leaves the model directory")


def test_a_link_to_nothing_and_a_link_to_itself(model):
    path = model.directory / "vae" / "extra.json"
    for target in ("absent.json", "extra.json"):
        path.symlink_to(target)
        refused(model, path, "link to nothing")
        path.unlink()


def test_what_is_no_regular_file(model):
    path = model.directory / "vae" / "pipe.json"
    os.mkfifo(path)
    refused(model, path, "not a regular file")


def test_a_file_that_may_not_be_read(model, monkeypatch):
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    for name in ("read_bytes", "iterdir", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, refuse)
            refused(model, "cannot read", "Permission denied", model.directory)


# -- too many


def test_more_layers_than_a_manifest_holds(model):
    tensors = [(f"{number}.{'long.' * 80}name", "U8", (1,)) for number in range(6000)]
    model.weights("transformer").write_bytes(safetensors(tensors))
    refused(model, "layers make a manifest of over 4194304 bytes")


def test_a_plan_reads_no_weights(model):
    """Every decision is made from headers: a disk that fails later costs nothing before."""
    path = model.weights("vae")
    raw = path.read_bytes()
    inventory = take_inventory(model.directory)
    path.write_bytes(b"\xff" * len(raw))
    plan = make_plan(inventory, DIALECTS["clowder"], Provenance())
    assert plan.size == sum(layer.size for layer in plan.layers)


# -- what goes wrong while it is written


def changed_while_read(model, change):
    """Run ``change`` between the plan and the reading of the weights."""
    path = model.weights("vae")
    with pytest.raises(ModelError) as caught:
        model.create(on_plan=lambda _: change(path))
    assert str(path) in caught.value.message
    assert "changed while it was read" in caught.value.message
    assert list(ImageLayout(model.store).tags()) == []


def test_a_file_that_becomes_shorter(model):
    changed_while_read(model, lambda path: os.truncate(path, 100))


def test_a_file_that_is_written_anew_with_other_weights(model):
    """Other bytes of the same size would pack without a sound."""

    def rewrite(path: Path) -> None:
        raw = path.read_bytes()
        before = path.stat().st_mtime_ns
        path.write_bytes(raw[:-1] + b"\xff")
        os.utime(path, ns=(before + 1, before + 1))

    changed_while_read(model, rewrite)


def test_a_file_that_disappears(model):
    path = model.weights("vae")
    with pytest.raises(ModelError, match=r"cannot read .*No such file"):
        model.create(on_plan=lambda _: path.unlink())
    assert list(ImageLayout(model.store).tags()) == []


def test_a_full_disk_names_nothing(model, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(NoSpaceError):
            model.create()
    assert list(ImageLayout(model.store).tags()) == []
    assert [p.name for p in model.store.rglob("*") if p.is_file()] == ["gc.lock"]
    assert model.create()


def test_numbers_in_json_are_not_taken_for_text(model):
    """json of the config must never depend on how a number was written in the model's files."""
    model.write("vae/config.json", '{"sample_size": 1e2, "big": 1e400}')
    made = model.create()
    assert made.manifest
    config = json.loads(ImageLayout(model.store).path(made.manifest.config).read_bytes())
    assert "defaults" not in config
