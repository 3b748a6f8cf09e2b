"""Weights that ComfyUI's own library quantizes are decoded to what it decodes them to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.formats.weight_source import read_source
from tests.importer.coded_file import values_of

pytestmark = pytest.mark.integration
torch = pytest.importorskip("torch")
kitchen: Any = pytest.importorskip("comfy_kitchen.tensor")
safetensors: Any = pytest.importorskip("safetensors.torch")

ROWS = {"per_channel": True}
ROTATED = {"convrot": True, "convrot_groupsize": 256}


@pytest.mark.parametrize(
    ("layout", "format_", "options", "stated"),
    [
        ("TensorCoreFP8Layout", "float8_e4m3fn", {}, {}),
        ("TensorWiseINT8Layout", "int8_tensorwise", {}, {}),
        ("TensorWiseINT8Layout", "int8_tensorwise", ROWS, {}),
        ("TensorWiseINT8Layout", "int8_tensorwise", ROWS | ROTATED, ROTATED),
        ("TensorCoreMXFP8Layout", "mxfp8", {}, {}),
        ("TensorCoreNVFP4Layout", "nvfp4", {}, {}),
    ],
    ids=["fp8", "int8", "int8 by rows", "int8 rotated", "mxfp8", "nvfp4"],
)
def test_values_are_those_of_comfy_kitchen(
    layout: str,
    format_: str,
    options: dict[str, Any],
    stated: dict[str, Any],
    tmp_path: Path,
) -> None:
    kind = getattr(kitchen, layout)
    weight = torch.randn(160, 512, generator=torch.Generator().manual_seed(3))
    codes, settings = kind.quantize(weight, **options)
    described = json.dumps({"format": format_} | stated).encode()
    tensors = {
        "w.weight": codes.contiguous(),
        "w.comfy_quant": torch.tensor(list(described), dtype=torch.uint8),
    }
    if format_ == "nvfp4":
        tensors["w.weight_scale"] = settings.block_scale.contiguous()
        tensors["w.weight_scale_2"] = settings.scale
    else:
        tensors["w.weight_scale"] = settings.scale.contiguous()
    safetensors.save_file(tensors, tmp_path / "x.safetensors")
    (found,) = read_source(tmp_path / "x.safetensors").tensors
    expected = kind.dequantize(codes, settings).float().numpy()
    # sums of rotated values are exact here, and rounded in float32 there
    tolerance = 1e-5 if stated else 0
    np.testing.assert_allclose(values_of(found), expected, rtol=0, atol=tolerance)
    assert np.abs(expected - weight.numpy()).max() < 1
