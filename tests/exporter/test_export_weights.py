"""Tensor blobs are exported to the weight files that libraries expect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.create import create
from clowder_aimage.errors import FormatError, VerificationError
from clowder_aimage.export import export
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from tests.exporter.conftest import Artifact, blob, files_in, tensors_in
from tests.importer.conftest import WEIGHTS, Model, data_of, weights_name
from tests.importer.test_importer_experts import moe
from tests.importer.valued import as_dtype, make_valued

NAME = Reference.parse("model")


def model_at(directory: Path) -> Model:
    return Model(directory / "model", directory / "store").fill()


def test_a_model_round_trips(tmp_path: Path) -> None:
    model = model_at(tmp_path)
    made = model.create()
    before, out = files_in(model.directory), tmp_path / "out"
    exported = export(ImageLayout(model.store), NAME, out)
    after = files_in(out)
    assert after.keys() == before.keys()
    for name in before:
        if name.endswith(".safetensors"):
            assert tensors_in(out / name) == tensors_in(model.directory / name)
        else:
            assert after[name] == before[name]
    assert exported.tensors == sum(map(len, WEIGHTS.values()))
    assert exported.files == len(after)
    assert exported.size == sum(map(len, after.values()))
    again = create(ImageLayout(tmp_path / "other"), NAME, out)
    assert again.descriptor == made.descriptor


def test_the_same_aimage_gives_the_same_bytes(tmp_path: Path) -> None:
    model = model_at(tmp_path)
    model.create()
    for name in ("one", "two"):
        export(ImageLayout(model.store), NAME, tmp_path / name)
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")


def test_weight_files_have_the_names_that_libraries_expect(tmp_path: Path) -> None:
    model = model_at(tmp_path)
    model.create()
    export(ImageLayout(model.store), NAME, tmp_path / "out")
    for component in WEIGHTS:
        (found,) = (tmp_path / "out" / component).glob("*.safetensors")
        assert found.stem == weights_name(component)


@pytest.mark.parametrize("most", [1, 60, 10_000])
def test_large_weights_are_sharded_with_an_index(tmp_path: Path, most: int) -> None:
    model = model_at(tmp_path)
    made = model.create()
    out = tmp_path / "out"
    export(ImageLayout(model.store), NAME, out, shard=most)
    for component, tensors in WEIGHTS.items():
        files = sorted((out / component).glob("*.safetensors"))
        stem = weights_name(component)
        sizes = {tensor[0]: len(data_of(tensor, component)) for tensor in tensors}
        found: dict[Any, Any] = {}
        for number, path in enumerate(files, 1):
            held = tensors_in(path)
            assert len(held) == 1 or sum(sizes[name] for name in held) <= most
            found |= dict.fromkeys(held, path.name)
            if len(files) > 1:
                assert path.name == f"{stem}-{number:05}-of-{len(files):05}.safetensors"
        assert sorted(found) == sorted(sizes)
        assert sorted(found, key=lambda name: (found[name], name)) == sorted(found)
        index = out / component / f"{stem}.safetensors.index.json"
        assert index.exists() == (len(files) > 1)
        if index.exists():
            value = json.loads(index.read_text())
            assert value == {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": found,
            }
    other = ImageLayout(tmp_path / "other")
    again = create(other, NAME, out)
    assert (again.descriptor == made.descriptor) == (most == 10_000)  # shards are remembered
    export(other, NAME, tmp_path / "back")
    assert files_in(tmp_path / "back") == files_in(out)


def test_shard_size_is_configurable(artifact: Artifact) -> None:
    for name in "abcd":
        artifact.add_tensors(name, {name: ("U8", (5,), b"12345")})
    artifact.finish().export(shard=10)
    names = sorted(path.name for path in artifact.out.glob("*.safetensors"))
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_tensors_are_aligned_to_their_dtype(artifact: Artifact) -> None:
    artifact.add_tensors("a", {"a": ("U8", (3,), b"abc")})
    artifact.add_tensors("b", {"b": ("F32", (1,), b"1234")})
    artifact.add_tensors("c", {"c": ("BF16", (1,), b"12")})
    artifact.finish().export()
    from clowder_aimage.tensor import read_header

    path = artifact.out / "model.safetensors"
    with path.open("rb") as file:
        header = read_header(file, path.stat().st_size)
    assert header.metadata == {"format": "pt"}
    assert header.data_offset % 8 == 0
    assert [(name, header.tensors[name].start) for name in header.tensors] == [
        ("b", 0),
        ("c", 4),
        ("a", 6),
    ]


def test_packed_experts_are_exported_as_single_tensors(tmp_path: Path) -> None:
    model = make_valued(tmp_path / "model", text_encoder=as_dtype(moe(), "BF16"))
    made = model.make()
    assert any(layer.name.endswith(".mlp.experts") for layer in made.aimage.layers)
    out = tmp_path / "out"
    export(ImageLayout(model.store), Reference.parse("m"), out)
    name = "text_encoder/model.safetensors"
    assert tensors_in(out / name) == tensors_in(model.directory / name)
    again = create(ImageLayout(tmp_path / "other"), NAME, out)
    assert again.descriptor == made.descriptor


def test_a_transformers_directory_has_its_weights_at_the_top(artifact: Artifact) -> None:
    artifact.config |= {"format": "transformers"}
    tensors = {
        "model.layers.0.mlp.up_proj.weight": ("F16", (2, 2), b"abcdefgh"),
        "lm_head.weight": ("BF16", (1, 2), b"1234"),
    }
    for name, tensor in tensors.items():
        artifact.add_tensors(name, {name: tensor})
    experts = {
        f"model.layers.1.mlp.experts.{n}.up.weight": ("U8", (1,), bytes([n])) for n in (0, 1)
    }
    artifact.add_tensors("model.layers.1.mlp.experts", experts)
    artifact.add("config.json", b'{"model_type": "llama"}')
    artifact.add("tokenizer.json", b"{}")
    files = artifact.finish().exported()
    assert set(files) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert tensors_in(artifact.out / "model.safetensors") == tensors | experts
    assert files["config.json"] == b'{"model_type": "llama"}'


@pytest.mark.parametrize(
    ("config", "files", "stem"),
    [
        ({"library": "diffusers"}, {}, "diffusion_pytorch_model"),
        ({}, {"model_index.json": {"unet": ["diffusers", "X"]}}, "diffusion_pytorch_model"),
        ({}, {"unet/config.json": {"_class_name": "UNet"}}, "diffusion_pytorch_model"),
        ({}, {"unet/config.json": {"model_type": "bert"}}, "model"),
        ({"library": 7}, {}, "model"),
    ],
    ids=str,
)
def test_library_of_a_component_names_its_files(
    artifact: Artifact, config: dict[str, Any], files: dict[str, dict[str, Any]], stem: str
) -> None:
    artifact.config["components"] = {"unet": config}
    artifact.add_tensors("unet/x", {"x": ("U8", (1,), b"x")})
    for name, value in files.items():
        artifact.add(name, json.dumps(value).encode())
    assert f"unet/{stem}.safetensors" in artifact.finish().exported()


def test_tensor_names_in_blobs_are_replaced_by_layer_names(artifact: Artifact) -> None:
    artifact.add_tensors("unet/x.weight", {"unet/x.weight": ("U8", (1,), b"x")})
    artifact.add_tensors("unet/y.weight", {"data": ("U8", (1,), b"y")})
    artifact.finish().export()
    found = tensors_in(artifact.out / "unet/model.safetensors")
    assert found == {"x.weight": ("U8", (1,), b"x"), "y.weight": ("U8", (1,), b"y")}


def test_a_blob_shared_by_two_components_is_in_both(artifact: Artifact) -> None:
    for component in ("one", "two"):
        artifact.add_tensors(f"{component}/x", {"x": ("U8", (4,), b"same")})
    artifact.finish().export()
    for component in ("one", "two"):
        found = tensors_in(artifact.out / component / "model.safetensors")
        assert found == {"x": ("U8", (4,), b"same")}


def test_tensors_larger_than_a_chunk_are_exported(artifact: Artifact) -> None:
    data = bytes(range(251)) * 20_000
    empty = {"layers.0.mlp.experts.none": ("U8", (0, 5), b"")}
    members = empty | {
        f"layers.0.mlp.experts.{n}": ("U8", (len(data) - n,), data[n:]) for n in range(3)
    }
    artifact.add_tensors("layers.0.mlp.experts", members)
    artifact.finish().export()
    assert tensors_in(artifact.out / "model.safetensors") == members


@pytest.mark.parametrize("words", ["", "# A model\n"])
def test_the_model_card_comes_back(tmp_path: Path, words: str) -> None:
    """A card with only the licence is not a layer: the config has the licence."""
    model = model_at(tmp_path)
    card = f"---\nlicense: apache-2.0\n---\n{words}"
    model.write("README.md", card)
    made = model.create()
    out = tmp_path / "out"
    export(ImageLayout(model.store), NAME, out)
    assert out.joinpath("README.md").read_text() == card
    assert any(layer.layer.name == "README.md" for layer in made.layers) is bool(words)
    again = create(ImageLayout(tmp_path / "other"), NAME, out)
    assert again.descriptor == made.descriptor


def test_an_invalid_licence_is_not_written_to_a_card(artifact: Artifact) -> None:
    artifact.config["license"] = "mit\n---\nevil: yes"
    artifact.add_tensors("x", {"x": ("U8", (1,), b"x")})
    assert "README.md" not in artifact.finish().exported()


def test_an_existing_model_card_is_kept(artifact: Artifact) -> None:
    artifact.config["license"] = "mit"
    artifact.add_tensors("x", {"x": ("U8", (1,), b"x")})
    artifact.add("README.md", b"ours")
    assert artifact.finish().exported()["README.md"] == b"ours"


# -- invalid tensors


def test_a_tensor_of_another_name_is_refused(artifact: Artifact) -> None:
    artifact.add_tensors("x", {"y": ("U8", (1,), b"x")})
    with pytest.raises(FormatError, match="x: the blob contains y instead"):
        artifact.finish().export()
    artifact.check_nothing_left()


def test_two_tensors_of_one_name_are_refused(artifact: Artifact) -> None:
    members = {"layers.0.mlp.experts.0.w": ("U8", (1,), b"x")}
    artifact.add_tensors("layers.0.mlp.experts", members)
    artifact.add_tensors("layers.0.mlp.experts.0.w", members | {})
    with pytest.raises(FormatError, match="duplicate tensor"):
        artifact.finish().export()
    artifact.check_nothing_left()


def test_a_damaged_tensor_is_detected(artifact: Artifact) -> None:
    artifact.add_tensors("x", {"x": ("U8", (9,), b"good good")})
    layer = artifact.add_tensors("y", {"y": ("U8", (8,), b"good bad")})
    artifact.finish().damage(layer)
    with pytest.raises(VerificationError) as caught:
        artifact.export()
    assert caught.value.exit_code == 5
    artifact.check_nothing_left()


def test_a_blob_that_is_not_safetensors_is_refused(artifact: Artifact) -> None:
    from clowder_aimage.oci import mediatype

    artifact.add("x", b"\xff" * 40, mediatype.AIMAGE_SAFETENSORS)
    with pytest.raises(FormatError, match="x: invalid header length"):
        artifact.finish().export()
    artifact.check_nothing_left()


def test_an_invalid_configuration_is_reported(artifact: Artifact) -> None:
    artifact.add_tensors("unet/x", {"x": ("U8", (1,), b"x")})
    artifact.add("unet/config.json", b"{")
    with pytest.raises(FormatError, match=r"unet/config\.json is not"):
        artifact.finish().export()
    artifact.check_nothing_left()


def test_safetensors_reads_the_written_files() -> None:
    from safetensors import deserialize

    (found,) = deserialize(blob({"x": ("U8", (1,), b"x")}))
    assert found[0] == "x"
