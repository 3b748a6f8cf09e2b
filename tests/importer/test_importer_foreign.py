"""Refuse weights in unsupported quantization formats, by any of their traces."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.tensor.config_fields import ConfigFields
from clowder_aimage.tensor.quantization_config import parse_mlx_type
from tests.importer.test_importer_prequantized import NAME, REST, STEM, compressed, mlx, modelopt
from tests.importer.valued import Stored, as_dtype, bf16_values, make_valued

ONE: Stored = ("F32", (), struct.pack("<f", 0.5))
HALF: Stored = ("BF16", (16, 1), bytes(32))
OCTETS: Stored = ("I8", (16, 64), bytes(1024))
PLAIN: dict[str, Stored] = as_dtype({NAME: bf16_values("source", (16, 64))}, "BF16")
GPTQ: dict[str, Stored] = {
    f"{STEM}.qweight": ("I32", (8, 16), bytes(512)),
    f"{STEM}.qzeros": ("I32", (1, 2), bytes(8)),
    f"{STEM}.scales": ("F16", (1, 16), bytes(32)),
}
FOREIGN: dict[str, dict[str, Stored]] = {
    "gptq": GPTQ,
    "absmax": {NAME: ("U8", (512, 1), bytes(512)), f"{NAME}.absmax": ("F32", (16,), bytes(64))},
    "quant state": {
        NAME: ("U8", (512, 1), bytes(512)),
        f"{NAME}.quant_state.bitsandbytes__nf4": ("U8", (8,), bytes(8)),
    },
    "fp8": {NAME: ("F8_E4M3", (16, 64), bytes(1024)), f"{NAME}_scale": ONE},
    "mxfp4": {
        f"{NAME}_blocks": ("U8", (16, 2, 16), bytes(512)),
        f"{NAME}_scales": ("U8", (16, 2), bytes(32)),
    },
    "codes without scales": {NAME: ("U32", (16, 8), bytes(512))},
    "fp8 with a scale": {NAME: ("F8_E4M3", (16, 64), bytes(1024)), f"{STEM}.scale": ONE},
    "fp8 of ComfyUI": {NAME: ("F8_E4M3", (16, 64), bytes(1024)), f"{STEM}.scale_weight": ONE},
    "quanto": {f"{NAME}._data": OCTETS, f"{NAME}._scale": HALF},
    "torchao": {f"{STEM}._weight_qdata": OCTETS, f"{STEM}._weight_scale": HALF},
    "floats with scales": PLAIN | {f"{STEM}.scales": HALF},
    "floats with a scale as we write it": PLAIN | {f"{NAME}.scale": HALF},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_unknown_quantization_is_refused(tmp_path: Path, kind: str) -> None:
    rest = as_dtype({"layers.0.attention.to_k.weight": bf16_values("k", (64, 64))}, "BF16")
    model = make_valued(tmp_path / "model", transformer=FOREIGN[kind] | rest)
    with pytest.raises(FormatError, match="unsupported quantization") as caught:
        model.make()
    assert caught.value.exit_code == 5
    assert "unquantized model" in str(caught.value.hint)
    assert not model.store.exists()


@pytest.mark.parametrize("method", ["gptq", 7])
def test_quantization_by_another_tool_is_refused(tmp_path: Path, method: str | int) -> None:
    model = make_valued(tmp_path / "model")
    config = {"quantization_config": {"quant_method": method}}
    model.write("transformer/config.json", config)
    with pytest.raises(FormatError, match=f"unsupported quantization: quant_method = '?{method}'?"):
        model.make(quantize="int8")
    assert not model.store.exists()


def test_transformed_weights_are_refused(tmp_path: Path) -> None:
    model = make_valued(tmp_path / "model", transformer=compressed(struct.pack("<f", 8)) | REST)
    said = {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"a": 1}}}
    model.write("transformer/config.json", {"quantization_config": said})
    with pytest.raises(FormatError, match="transformed before quantization"):
        model.make()


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (modelopt(struct.pack("<f", 8)), {"quantization_config": {"quant_method": "modelopt"}}),
        (
            compressed(struct.pack("<f", 8)),
            {"quantization_config": {"quant_method": "compressed-tensors"}},
        ),
        (PLAIN | {"layers.0.x_blocks": ONE}, {}),
        ({NAME: OCTETS, "layers.1.scale": ONE}, {}),
        (PLAIN | {f"{STEM}.layer_scale": ONE, "logit_scale": ONE}, {}),
    ],
    ids=["modelopt", "compressed-tensors", "blocks", "a scale elsewhere", "factors of a network"],
)
def test_known_and_similar_names_are_packed(
    tmp_path: Path, tensors: Any, config: dict[str, dict[str, str]]
) -> None:
    model = make_valued(tmp_path / "model", transformer=tensors | REST)
    model.write("transformer/config.json", config)
    assert model.make()


# -- configurations: create and run accept the same ones

AFFINE = {"group_size": 64, "bits": 4}
TAKEN = [
    {"quantization": AFFINE | {"mode": "affine", "quant_method": "mlx"}},
    {"quantization": {STEM: {"bits": 4}, "layers.9.other": False}},
    {"quantization": None, "quantization_config": AFFINE},
    {"quantization": AFFINE, "quantization_config": AFFINE},
]
REFUSED = [
    {"quantization_config": {"load_in_8bit": True}},
    {"quantization_config": "fp8"},
    {"quantization_config": {"quant_method": ["a"]}},
    {"quantization": AFFINE | {"quant_method": "hqq"}},
    {"quantization": {}},
    {"quantization": AFFINE, "quantization_config": {"bits": 4}},
    {"quantization": AFFINE | {"layers.9.other": {"bits": 3, "group_size": 64}}},
]


def runs(config: Any) -> bool:
    try:
        ConfigFields("config.json", config).accept_quantization()
    except ModelError:
        return False
    return True


@pytest.mark.parametrize("config", TAKEN, ids=str)
def test_configurations_that_pack_also_run(tmp_path: Path, config: dict[str, Any]) -> None:
    model = make_valued(tmp_path / "model", transformer=mlx("int4") | REST)
    model.write("transformer/config.json", config)
    made = model.make()
    assert made.aimage.get_layer(f"transformer/{NAME}").dtype == "int4"
    assert runs(config)


@pytest.mark.parametrize(
    ("config", "tensors"),
    list(zip(REFUSED, ["floats", "codes", "octets"] * 3, strict=False)),
    ids=str,
)
def test_configurations_that_do_not_run_are_refused(
    tmp_path: Path, config: Any, tensors: Any
) -> None:
    forms: dict[str, dict[str, Any]] = {
        "floats": PLAIN,
        "codes": mlx("int4"),
        "octets": {NAME: OCTETS},
    }
    given = forms[tensors]
    model = make_valued(tmp_path / "model", transformer=given | REST)
    model.write("transformer/config.json", config)
    with pytest.raises(FormatError) as caught:
        model.make()
    assert caught.value.exit_code == 5
    assert "config.json" in caught.value.message
    assert not runs(config)
    assert not model.store.exists()


def test_bits_must_be_an_integer() -> None:
    assert parse_mlx_type({"bits": 8.0}) == (None, None)
    assert parse_mlx_type({"bits": 8}) == ("int8", None)
