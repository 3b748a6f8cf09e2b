"""Weights quantized in ways that are not converted: refused, whatever is left of them."""

from __future__ import annotations

import struct

import pytest

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.tensor.config_fields import ConfigFields
from clowder_aimage.tensor.quantization_config import mlx_type
from tests.importer.test_importer_prequantized import NAME, REST, STEM, compressed, mlx, modelopt
from tests.importer.valued import as_dtype, bf16_values, make_valued

ONE = ("F32", (), struct.pack("<f", 0.5))
HALF = ("BF16", (16, 1), bytes(32))
OCTETS = ("I8", (16, 64), bytes(1024))
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
    "fp8 with a scale": {NAME: ("F8_E4M3", (16, 64), bytes(1024)), f"{STEM}.scale": ONE},
    "fp8 of ComfyUI": {NAME: ("F8_E4M3", (16, 64), bytes(1024)), f"{STEM}.scale_weight": ONE},
    "fp8 with its activations' scale": {
        NAME: ("F8_E5M2", (16, 64), bytes(1024)),
        f"{STEM}.input_scale": ONE,
    },
    "quanto": {f"{NAME}._data": OCTETS, f"{NAME}._scale": HALF},
    "hqq": {
        f"{STEM}.W_q": ("U8", (16, 64), bytes(1024)),
        f"{STEM}.scale": HALF,
        f"{STEM}.zero": HALF,
    },
    "aqlm": {
        f"{STEM}.codes": ("I16", (16, 8, 2), bytes(512)),
        f"{STEM}.codebooks": ("F16", (2, 8), bytes(32)),
    },
    "torchao": {f"{STEM}._weight_qdata": OCTETS, f"{STEM}._weight_scale": HALF},
    "int8 with scales": {NAME: OCTETS, f"{STEM}.scales": HALF},
    "int8 with a scale of the weight": {NAME: OCTETS, f"{NAME}.scale": HALF},
    "floats with scales": PLAIN | {f"{STEM}.scales": HALF},
    "floats with a scale as we write it": PLAIN | {f"{NAME}.scale": HALF},
    "an expert with a scale as we write it": {
        "layers.0.mlp.experts.0.w.weight": PLAIN[NAME],
        "layers.0.mlp.experts.0.w.weight.scale": HALF,
    },
    "codes with a scale": {NAME: ("U32", (16, 8), bytes(512)), f"{NAME}.scale": HALF},
}


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        *((kind, {}) for kind in FOREIGN),
        ("quanto", {"quantize": "int8"}),
        ("hqq", {"dtype": "f32"}),
    ],
    ids=str,
)
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
        ({NAME: OCTETS, "layers.1.scale": ONE}, {}),
        (PLAIN | {f"{STEM}.layer_scale": ONE, "logit_scale": ONE}, {}),
    ],
    ids=[
        "modelopt",
        "compressed-tensors",
        "MLX",
        "fp8 without scales",
        "blocks of something else",
        "a scale of something else",
        "floats with factors of their network",
    ],
)
def test_what_is_known_or_no_such_thing_is_packed(tmp_path, tensors, config):
    model = make_valued(tmp_path / "model", transformer=tensors | REST)
    model.write("transformer/config.json", config)
    assert model.make()


# -- configurations: whoever packs takes what whoever runs takes, and nothing else

AFFINE = {"group_size": 64, "bits": 4}
TAKEN = [
    {"quantization": AFFINE},
    {"quantization": AFFINE | {"mode": "affine", "quant_method": "mlx"}},
    {"quantization": {STEM: AFFINE}},
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


def runs(config):
    try:
        ConfigFields("config.json", config).accept_quantization()
    except ModelError:
        return False
    return True


@pytest.mark.parametrize("config", TAKEN, ids=str)
def test_a_configuration_that_packs_also_runs(tmp_path, config):
    model = make_valued(tmp_path / "model", transformer=mlx("int4") | REST)
    model.write("transformer/config.json", config)
    made = model.make()
    assert made.aimage.layer(f"transformer/{NAME}").dtype == "int4"
    assert runs(config)


@pytest.mark.parametrize("config", REFUSED, ids=str)
@pytest.mark.parametrize("tensors", ["floats", "codes", "octets"])
def test_a_configuration_that_does_not_run_does_not_pack(tmp_path, config, tensors):
    given = {"floats": PLAIN, "codes": mlx("int4"), "octets": {NAME: OCTETS}}[tensors]
    model = make_valued(tmp_path / "model", transformer=given | REST)
    model.write("transformer/config.json", config)
    with pytest.raises(FormatError) as caught:
        model.make()
    assert caught.value.exit_code == 5
    assert "config.json" in caught.value.message
    assert not runs(config)
    assert not model.store.exists()


def test_a_number_of_bits_is_a_whole_one():
    assert mlx_type({"bits": 8.0}) == (None, None)
    assert mlx_type({"bits": 8}) == ("int8", None)
