"""Quantized weights are exported in their makers' formats, and read back to the same blobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from clowder_aimage.create import create
from clowder_aimage.dialect import Layer
from clowder_aimage.errors import ModelError
from clowder_aimage.export import ExportSummary, export
from clowder_aimage.exporter.plan import MLX, MODELOPT
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Reference
from tests.exporter.conftest import Artifact, files_in, tensors_in
from tests.importer.test_importer_experts import moe
from tests.importer.test_importer_prequantized import CONFIGS, NAME, REST, STEM, mlx
from tests.importer.valued import as_dtype, make_valued

if TYPE_CHECKING:
    from clowder_aimage.importer import PackedModel


MODEL = Reference.parse("m")
STATED: dict[str, Any] = {**CONFIGS}
KINDS = ["int8", "int4", "mxfp8", "nvfp4"]
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def layers_of(store: Any, name: Reference = MODEL) -> tuple[Layer, ...]:
    return read_aimage(ImageLayout(store), name).aimage.layers


def round_trip(
    tmp_path: Path, store: Path, number: int = 1, name: Reference = MODEL
) -> tuple[ExportSummary, Path, Path, PackedModel]:
    """Export; return the directory, and the AImage that create makes of it in its own store."""
    out, other = tmp_path / f"out-{number}", tmp_path / f"store-{number}"
    exported = export(ImageLayout(store), name, out)
    return exported, out, other, create(ImageLayout(other), MODEL, out)


@pytest.mark.parametrize("kind", KINDS)
def test_own_quantization_round_trips_to_the_same_blobs(tmp_path: Path, kind: str) -> None:
    model = make_valued(tmp_path / "model")
    made = model.make(quantize=kind)
    exported, out, _, again = round_trip(tmp_path, model.store)
    assert exported.quantized == {"transformer": MLX}
    config = "transformer/config.json"
    before = {layer for layer in made.aimage.layers if layer.name != config}
    after = {layer for layer in again.aimage.layers if layer.name != config}
    assert after == before
    said = json.loads((out / config).read_text())
    assert said.pop("quantization") == {"mode": "affine"} | STATED[kind]
    assert said == model.read(config)


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_second_round_trip_has_the_same_manifest(tmp_path: Path, kind: str) -> None:
    """config.json then declares the quantization, and no option is needed."""
    make_valued(tmp_path / "model").make(quantize=kind)
    _, first, store, made = round_trip(tmp_path, tmp_path / "store")
    exported, second, _, again = round_trip(tmp_path, store, 2)
    assert again.descriptor == made.descriptor
    assert files_in(first) == files_in(second)
    assert exported.quantized == {"transformer": MLX}


@pytest.mark.parametrize(
    ("kind", "key"),
    [*((kind, "quantization") for kind in STATED), ("int8", "quantization_config")],
)
def test_mlx_quantization_round_trips(tmp_path: Path, kind: str, key: str) -> None:
    model = make_valued(tmp_path / "model", transformer=mlx(kind) | REST)
    model.write("transformer/config.json", {"dim": 4, key: STATED[kind]})
    made = model.make()
    _, out, _, again = round_trip(tmp_path, model.store)
    assert again.descriptor == made.descriptor
    name = "transformer/config.json"
    assert (out / name).read_bytes() == (model.directory / name).read_bytes()
    assert tensors_in(out / WEIGHTS) == mlx(kind) | REST


@pytest.mark.parametrize("said", [{"quantization": {"group_size": 64, "bits": 4}}, {"x": 1}])
def test_wrong_quantization_in_a_config_is_corrected(tmp_path: Path, said: dict[str, Any]) -> None:
    model = make_valued(tmp_path / "model")
    model.write("transformer/config.json", said)
    model.make(quantize="int8")
    _, out, *_ = round_trip(tmp_path, model.store)
    config = json.loads((out / "transformer/config.json").read_text())
    assert config == said | {"quantization": {"group_size": 64, "bits": 8, "mode": "affine"}}


def test_several_quantizations_in_one_component(tmp_path: Path) -> None:
    """The most common one is the default, and the others are listed by module."""
    one, other = mlx("int8"), mlx("mxfp4")
    tensors = one | {name.replace("to_q", "to_k"): tensor for name, tensor in one.items()}
    tensors |= {name.replace("to_q", "to_v"): tensor for name, tensor in other.items()}
    stem = STEM.replace("to_q", "to_v")
    model = make_valued(tmp_path / "model", transformer=tensors | REST)
    model.write(
        "transformer/config.json", {"quantization": STATED["int8"] | {stem: STATED["mxfp4"]}}
    )
    made = model.make()
    artifact = read_aimage(ImageLayout(model.store), MODEL).aimage
    model.write("transformer/config.json", {})
    _, out, _, again = round_trip(tmp_path, model.store)
    assert again.descriptor == made.descriptor
    assert tensors_in(out / WEIGHTS) == tensors | REST
    from clowder_aimage.exporter.component_config import merge_quantization
    from clowder_aimage.formats.stored_weights import group_weights, read_stored

    weights = group_weights(read_stored(ImageLayout(model.store), artifact))["transformer"]
    assert json.loads(merge_quantization({}, weights) or b"") == {
        "quantization": {
            "group_size": 64,
            "bits": 8,
            "mode": "affine",
            stem: {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        }
    }


@pytest.mark.parametrize("kind", ["int8", "nvfp4"])
def test_quantized_experts_give_their_members_back(tmp_path: Path, kind: str) -> None:
    model = make_valued(tmp_path / "model", text_encoder=as_dtype(moe(), "BF16"))
    made = model.make(quantize=f"text_encoder={kind}")
    _, out, _, again = round_trip(tmp_path, model.store)
    weights = [layer for layer in made.aimage.layers if layer.is_tensor]
    assert weights == [layer for layer in again.aimage.layers if layer.is_tensor]
    found = tensors_in(out / "text_encoder/model.safetensors")
    assert "model.layers.0.mlp.experts.2.up_proj.scales" in found


def test_mlx_reads_the_exported_quantized_values(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    model = make_valued(tmp_path / "model")
    model.make(quantize="int8")
    export(ImageLayout(model.store), MODEL, tmp_path / "out")
    found = mx.load(str(tmp_path / "out" / WEIGHTS))
    said = json.loads((tmp_path / "out/transformer/config.json").read_text())["quantization"]
    parts = [found[f"{STEM}.{word}"] for word in ("weight", "scales", "biases")]
    values = np.array(mx.dequantize(*parts, **said).astype(mx.float32))
    source = mx.load(str(model.weights("transformer")))[NAME].astype(mx.float32)
    assert np.abs(values - np.array(source)).max() < 0.002


# -- ModelOpt


def modelopt(factor: float = 0.25, shape: tuple[int, ...] = ()) -> dict[Any, Any]:
    rng = np.random.default_rng(7)
    data = np.full(shape, factor, "<f4").tobytes()
    return {
        NAME: ("U8", (16, 32), rng.bytes(512)),
        f"{NAME}_scale": ("F8_E4M3", (16, 4), rng.bytes(64)),
        f"{NAME}_scale_2": ("F32", shape, data),
    }


@pytest.mark.parametrize("shape", [(), (16, 1)], ids=str)
def test_nvfp4_with_a_global_scale_is_written_for_modelopt(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    said = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    model = make_valued(tmp_path / "model", transformer=modelopt(shape=shape) | REST)
    model.write("transformer/config.json", said)
    made = model.make()
    exported, out, _, again = round_trip(tmp_path, model.store)
    assert exported.quantized == {"transformer": MODELOPT}
    assert tensors_in(out / WEIGHTS) == modelopt(shape=shape) | REST
    assert again.descriptor == made.descriptor


def test_nvfp4_of_compressed_tensors_is_converted_to_modelopt(tmp_path: Path) -> None:
    """Its divisor became a factor, whose reciprocal may differ in bits."""
    codes, scale, _ = modelopt().values()
    tensors = {
        f"{NAME}_packed": codes,
        f"{NAME}_scale": scale,
        f"{NAME}_global_scale": ("F32", (1,), np.array([3.7], "<f4").tobytes()),
    }
    model = make_valued(tmp_path / "model", transformer=tensors | REST)
    model.write(
        "transformer/config.json",
        {"dim": 4, "quantization_config": {"quant_method": "compressed-tensors"}},
    )
    made = model.make()
    _, out, _, again = round_trip(tmp_path, model.store)
    config = json.loads((out / "transformer/config.json").read_text())
    assert config == {
        "dim": 4,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": [],
        },
    }
    packed = [layer for layer in made.aimage.layers if layer.is_tensor]
    assert packed == [layer for layer in again.aimage.layers if layer.is_tensor]


def test_a_quantized_tensor_that_is_not_a_weight_is_refused(artifact: Artifact) -> None:
    name = "layers.0.mlp.experts.gate_up_proj"
    parts = {
        name: ("U32", (2, 16), bytes(128)),
        f"{name}.scale": ("BF16", (2, 1), bytes(4)),
        f"{name}.bias": ("BF16", (2, 1), bytes(4)),
    }
    artifact.add_tensors("unet/layers.0.mlp.experts", parts, quant_type="int8", group_size="64")
    with pytest.raises(ModelError, match="support only quantized tensors named") as caught:
        artifact.finish().export()
    assert caught.value.hint
    artifact.check_nothing_left()


def test_codes_in_separate_layers_are_joined(artifact: Artifact) -> None:
    codes, scales, biases = mlx("int4").values()
    for name, tensor in ((NAME, codes), (f"{STEM}.scales", scales), (f"{STEM}.biases", biases)):
        artifact.add_tensors(f"transformer/{name}", {name: tensor})
    said = json.dumps({"quantization": STATED["int4"]}).encode()
    artifact.add("transformer/config.json", said)
    artifact.config["components"] = {"transformer": {"library": "diffusers"}}
    exported = artifact.finish().export()
    assert tensors_in(artifact.out / WEIGHTS) == mlx("int4")
    assert (artifact.out / "transformer/config.json").read_bytes() == said
    assert exported.tensors == 1


def test_outdated_quantization_config_is_removed(artifact: Artifact) -> None:
    """Otherwise no library would read the directory, as the weights changed their format."""
    codes, scales = mlx("mxfp8").values()
    parts = {NAME: codes, f"{NAME}.scale": scales}
    artifact.add_tensors(f"transformer/{NAME}", parts, quant_type="mxfp8", group_size="32")
    said = {"dim": 4, "quantization_config": {"quant_method": "fp8"}}
    artifact.add("transformer/config.json", json.dumps(said).encode())
    files = artifact.finish().exported()
    config = json.loads(files["transformer/config.json"])
    assert config == {"dim": 4, "quantization": STATED["mxfp8"]}


def test_a_component_without_a_configuration_gets_one(artifact: Artifact) -> None:
    codes, scales = mlx("mxfp8").values()
    parts = {NAME: codes, f"{NAME}.scale": scales}
    artifact.add_tensors(f"transformer/{NAME}", parts, quant_type="mxfp8", group_size="32")
    files = artifact.finish().exported()
    assert json.loads(files["transformer/config.json"]) == {"quantization": STATED["mxfp8"]}


def test_a_whole_model_of_transformers_can_be_quantized(artifact: Artifact) -> None:
    codes, scales = mlx("mxfp8").values()
    parts = {NAME: codes, f"{NAME}.scale": scales}
    artifact.add_tensors(NAME, parts, quant_type="mxfp8", group_size="32")
    artifact.add("config.json", b'{"model_type": "llama"}')
    files = artifact.finish().exported()
    assert set(files) == {"config.json", "model.safetensors"}
    assert json.loads(files["config.json"]) == {
        "model_type": "llama",
        "quantization": STATED["mxfp8"],
    }
