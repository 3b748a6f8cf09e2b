"""Weights quantized in ways that are not converted: refused, whatever is left of them."""

from __future__ import annotations

import struct

import pytest

from clowder_aimage.errors import FormatError
from tests.importer.test_importer_prequantized import NAME, REST, STEM, compressed, mlx, modelopt
from tests.importer.valued import as_dtype, bf16_values, make_valued

ONE = ("F32", (), struct.pack("<f", 0.5))
HALF = ("BF16", (16, 1), bytes(32))
PLAIN = as_dtype({NAME: bf16_values("source", (16, 64))}, "BF16")
GPTQ = {
    f"{STEM}.qweight": ("I32", (8, 16), bytes(512)),
    f"{STEM}.qzeros": ("I32", (1, 2), bytes(8)),
    f"{STEM}.scales": ("F16", (1, 16), bytes(32)),
}
FOREIGN = {
    "gptq": GPTQ,
    "zeros alone": PLAIN | {f"{STEM}.qzeros": ("I32", (1, 2), bytes(8))},
    "absmax": {NAME: ("U8", (512, 1), bytes(512)), f"{NAME}.absmax": ("F32", (16,), bytes(64))},
    "quant state": {
        NAME: ("U8", (512, 1), bytes(512)),
        f"{NAME}.quant_state.bitsandbytes__nf4": ("U8", (8,), bytes(8)),
    },
    "bitsandbytes of 8 bits": {NAME: ("I8", (16, 64), bytes(1024)), f"{STEM}.SCB": ONE},
    "fp8": {NAME: ("F8_E4M3", (16, 64), bytes(1024)), f"{NAME}_scale": ONE},
    "fp8 in blocks": {NAME: ("F8_E4M3", (16, 64), bytes(1024)), f"{NAME}_scale_inv": ONE},
    "int8": {NAME: ("I8", (16, 64), bytes(1024)), f"{NAME}_scale": HALF},
    "int4": PLAIN | {f"{NAME}_shape": ("I64", (2,), bytes(16))},
    "mxfp4": {
        f"{NAME}_blocks": ("U8", (16, 2, 16), bytes(512)),
        f"{NAME}_scales": ("U8", (16, 2), bytes(32)),
    },
    "mxfp4 of experts": PLAIN
    | {
        "layers.0.experts.up_proj_blocks": ("U8", (2, 16), bytes(32)),
        "layers.0.experts.up_proj_scales": ("U8", (2,), bytes(2)),
    },
    "codes without scales": {NAME: ("U32", (16, 8), bytes(512))},
    "codes with a scale": {NAME: ("U32", (16, 8), bytes(512)), f"{NAME}.scale": HALF},
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("recipe", [{}, {"quantize": "int8"}, {"dtype": "f32"}], ids=str)
def test_nothing_is_packed_that_nothing_could_read(tmp_path, kind, recipe):
    rest = as_dtype({"layers.0.attention.to_k.weight": bf16_values("k", (64, 64))}, "BF16")
    model = make_valued(tmp_path / "model", transformer=FOREIGN[kind] | rest)
    with pytest.raises(FormatError, match="quantized in a way that is not known") as caught:
        model.make(**recipe)
    assert caught.value.exit_code == 5
    assert "before it was quantized" in caught.value.hint
    assert not model.store.exists()


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "mxfp4", "bitsandbytes", 7])
@pytest.mark.parametrize("recipe", [{}, {"quantize": "int8"}], ids=str)
def test_a_config_that_names_another_maker(tmp_path, method, recipe):
    model = make_valued(tmp_path / "model")
    config = {"quantization_config": {"quant_method": method}}
    model.write("transformer/config.json", config)
    with pytest.raises(FormatError, match=f"quantized by '?{method}'?, which is not known"):
        model.make(**recipe)
    assert not model.store.exists()


def test_weights_that_were_transformed_first(tmp_path):
    model = make_valued(tmp_path / "model", transformer=compressed(struct.pack("<f", 8)) | REST)
    said = {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"a": 1}}}
    model.write("transformer/config.json", {"quantization_config": said})
    with pytest.raises(FormatError, match="transformed before they were quantized"):
        model.make()


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (modelopt(struct.pack("<f", 8)), {"quantization_config": {"quant_method": "modelopt"}}),
        (
            compressed(struct.pack("<f", 8)),
            {"quantization_config": {"quant_method": "compressed-tensors"}},
        ),
        (mlx("int4"), {"quantization_config": {"group_size": 64, "bits": 4}}),
        ({NAME: ("F8_E4M3", (16, 64), bytes(1024))}, {}),
        (PLAIN | {"layers.0.x_blocks": ONE}, {}),
    ],
    ids=["modelopt", "compressed-tensors", "MLX", "fp8 without scales", "blocks of something else"],
)
def test_what_is_known_or_no_such_thing_is_packed(tmp_path, tensors, config):
    model = make_valued(tmp_path / "model", transformer=tensors | REST)
    model.write("transformer/config.json", config)
    assert model.make()
