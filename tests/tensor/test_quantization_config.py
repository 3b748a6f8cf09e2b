"""Quantization that configurations state, and the layers that belong to codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from clowder_aimage.errors import FormatError
from clowder_aimage.tensor.header import Header, TensorInfo
from clowder_aimage.tensor.quantization_config import (
    QuantizationConfig,
    complete,
    compute_group_size,
    find_mlx_entry,
    find_part_layers,
    find_unknown_key,
    parse_mlx_type,
)

TABLE = {"bits": 4, "group_size": 64}
INT8 = {"bits": 8, "group_size": 32}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"quantization": "int4"}, None),
        ({"quantization": TABLE}, TABLE),
        ({"quantization_config": TABLE}, TABLE),
        ({"quantization": TABLE | {"a.b": INT8}}, INT8),
        ({"quantization": {"a.b": INT8}}, INT8),
        ({"quantization": TABLE | {"a.b": True}}, TABLE | {"a.b": True}),
        ({"quantization": {"a.c": INT8}}, None),
        ({"quantization": {"a.c": INT8}, "quantization_config": TABLE}, TABLE),
    ],
)
def test_entry_of_a_module_is_its_own_or_the_table(
    config: Mapping[str, Any], expected: Mapping[str, Any] | None
) -> None:
    assert find_mlx_entry(config, "a.b") == expected


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (TABLE, ("int4", 64)),
        (INT8, ("int8", 32)),
        ({"bits": 4}, ("int4", None)),
        ({"bits": 4, "group_size": True}, ("int4", None)),
        ({"bits": 4, "mode": "nvfp4", "group_size": 16}, ("nvfp4", 16)),
        ({"bits": 8, "mode": "mxfp8"}, ("mxfp8", None)),
        ({"bits": 4.0, "group_size": 64}, (None, None)),
        ({"bits": 3, "group_size": 64}, (None, None)),
        ({"bits": 8, "mode": "mxfp4"}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_type_of_an_entry_needs_known_mode_and_bits(
    entry: Mapping[str, Any], expected: tuple[str | None, int | None]
) -> None:
    assert parse_mlx_type(entry) == expected


def test_config_of_a_component_has_precedence_over_the_index() -> None:
    index = {"quantization": "mxfp4", "group_size": 32}
    stated = QuantizationConfig({"quantization": TABLE | {"a.b": INT8}}, index)
    assert stated.of("a.b.weight") == ("int8", 32)
    assert stated.of("other.weight") == ("int4", 64)
    assert QuantizationConfig({}, index).of("a.b.weight") == ("mxfp4", 32)
    assert QuantizationConfig({}, {"quantization": 4, "group_size": "32"}).of("x") == (None, None)


@pytest.mark.parametrize(
    "value",
    [
        TABLE,
        TABLE | {"a.b": INT8, "a.c": False},
        TABLE | {"quant_method": "mlx"},
        {"a.b": INT8},
        {"a.b": {"bits": 4}},
        {"quant_method": "modelopt", "anything": 1},
        {"quant_method": "compressed-tensors", "transform_config": {}},
    ],
)
def test_known_quantizations_have_no_unknown_key(value: Mapping[str, Any]) -> None:
    assert find_unknown_key({"quantization_config": value}) is None
    assert find_unknown_key({"quantization": value, "quantization_config": None}) is None


@pytest.mark.parametrize(
    "value",
    [
        "int4",
        {},
        {"bits": 4},  # without a group size
        {"group_size": 64},
        {"bits": 4, "group_size": 48},
        {"bits": 3, "group_size": 64},
        TABLE | {"a.b": {"bits": 4, "group_size": 16}},
        TABLE | {"quant_method": "gptq"},
        {"quant_method": "bitsandbytes"},
        {"quant_method": "compressed-tensors", "transform_config": {"r1": {}}},
    ],
)
def test_unknown_quantizations_are_named_by_their_key(value: object) -> None:
    assert find_unknown_key({"quantization": None, "quantization_config": value}) == (
        "quantization_config"
    )
    assert find_unknown_key({"quantization": value}) == "quantization"


def test_layers_of_codes_are_found_by_both_conventions() -> None:
    ours = {"x.weight", "x.weight_scale", "x.weight_qbias"}
    assert find_part_layers("x.weight", ours) == {
        ".scale": "x.weight_scale",
        ".bias": "x.weight_qbias",
    }
    assert find_part_layers("x.weight", {"x.scales", "x.weight"}) == {".scale": "x.scales"}
    assert find_part_layers("x.weight", {"x.weight", "x.weight_qbias"}) == {}
    assert find_part_layers("x.bias", {"x.bias", "x.bias_scale"}) == {}


@pytest.mark.parametrize(
    ("kind", "codes", "scales", "expected"),
    [
        ("int4", (8, 16), (8, 2), 64),  # 16 words of 8 values, two groups
        ("int8", (8, 16), (8, 1), 64),
        ("nvfp4", (8, 16), (8, 8), 16),
        ("int4", (8, 16), (8, 3), None),
        ("int4", (8, 16), (8, 16), None),  # 8 values per scale
        ("int4", (8, 16), (8, 0), None),
        ("int4", (), (8, 2), None),
        ("int4", (8, 16), (), None),
    ],
)
def test_group_size_follows_from_the_shapes(
    kind: str, codes: tuple[int, ...], scales: tuple[int, ...], expected: int | None
) -> None:
    assert compute_group_size(kind, codes, scales) == expected


def test_group_size_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(FormatError, match="unknown quantization 'int3'"):
        compute_group_size("int3", (8, 16), (8, 2))


CODES = TensorInfo("U32", (8, 16), 0, 512)
SCALES = TensorInfo("BF16", (8, 2), 512, 544)


@pytest.mark.parametrize("scales", ["x.weight.scale", "x.scales"])
def test_missing_metadata_of_codes_is_completed(scales: str) -> None:
    header = Header({"x.weight": CODES, scales: SCALES}, {"format": "mlx"}, 8)
    found = complete(header, lambda key: ("int4", None) if key == "x.weight" else (None, None))
    assert found.metadata == {
        "format": "mlx",
        "x.weight.quant_type": "int4",
        "x.weight.group_size": "64",
    }
    assert (found.tensors, found.data_offset) == (header.tensors, 8)
    assert complete(header, lambda key: ("int4", 32)).metadata["x.weight.group_size"] == "32"
    assert complete(header, lambda key: (None, 32)).metadata == header.metadata


@pytest.mark.parametrize(
    ("metadata", "added"),
    [
        ({"quant_type": "int4"}, {"x.weight.group_size": "64"}),
        ({"quant_type": "int4", "group_size": "64"}, {}),
        ({"x.weight.quant_type": "int4"}, {"x.weight.group_size": "64"}),
        ({"quant_type": "int4", "x.weight.group_size": "32"}, {}),
    ],
)
def test_stated_metadata_of_codes_stay(metadata: dict[str, str], added: dict[str, str]) -> None:
    header = Header({"x.weight": CODES, "x.scales": SCALES}, metadata, 8)
    found = complete(header, lambda key: ("mxfp8", 32))
    assert found.metadata == metadata | added


@pytest.mark.parametrize(
    "tensors",
    [
        {"x.weight": CODES},
        {"x.weight": TensorInfo("I32", (8, 16), 0, 512), "x.scales": SCALES},
        {"x": CODES, "scales": SCALES},
    ],
)
def test_tensors_without_codes_and_scales_stay(tensors: dict[str, TensorInfo]) -> None:
    assert complete(Header(tensors, {}, 8), lambda key: ("int4", 64)).metadata == {}
