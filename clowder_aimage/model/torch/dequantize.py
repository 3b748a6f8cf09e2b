"""Dequantization by PyTorch, on any device: bit for bit ``model/dequantize.py``, on all cores."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from clowder_aimage.model.dequantize import compute_factor_shape
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.blob import BIAS, GLOBAL_SCALE, SCALE
from clowder_aimage.tensor.float_code import E2M1, E4M3, E8M0


def read_tensor(weights: ModelWeights, name: str, device: str) -> torch.Tensor:
    """Return a tensor as ``ModelWeights.read_torch``; on the device, in float32, if it has codes.

    Codes are copied to the device, and dequantized there. Raises as ``read_torch``.
    """
    quantization = weights.get_quantization(name)
    if quantization is None:
        tensor: torch.Tensor = weights.read_torch(name)
        return tensor
    return dequantize(quantization, read_parts(weights, name, device))


def read_parts(weights: ModelWeights, name: str, device: str) -> dict[str, torch.Tensor]:
    """Return the stored parts of a quantized tensor on the device, as ``ModelWeights.read_parts``.

    Codes are their bytes, (..., bytes). Raises as ``read_parts``.
    """
    parts = {}
    for suffix, array in weights.read_parts(name).items():
        # PyTorch warns of arrays that are read-only; the pages are private
        array.flags.writeable = True
        codes = array if suffix else array.view("u1")
        parts[suffix] = torch.from_numpy(codes).to(device)
    return parts


def dequantize(quantization: Quantization, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the values of codes, (..., columns), in float32.

    parts: as ``read_parts`` returns them.
    """
    kind = quantization.type
    codes, scales, biases = parts[""], parts[SCALE], parts.get(BIAS)
    if kind.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    grouped = codes.unflatten(-1, (-1, quantization.group_size))
    if biases is not None:
        # Not one function: it would round once
        values = grouped.float() * scales.float()[..., None]
        values = values + biases.float()[..., None]
    else:
        table = "e4m3" if kind.bits == 8 else "e2m1"
        scale_table = "e4m3" if kind.name == "nvfp4" else "e8m0"
        values = _decode(grouped, table) * _decode(scales, scale_table)[..., None]
    values = values.flatten(-2)
    if (factor := parts.get(GLOBAL_SCALE)) is None:
        return values
    return values * factor.reshape(compute_factor_shape(tuple(factor.shape), values.ndim))


_TABLES: Mapping[str, Any] = {"e4m3": E4M3, "e2m1": E2M1, "e8m0": E8M0}


def _decode(codes: torch.Tensor, name: str) -> torch.Tensor:
    found = _build_table(name, str(codes.device)).index_select(0, codes.flatten().int())
    return found.reshape(codes.shape)


@functools.cache
def _build_table(name: str, device: str) -> torch.Tensor:
    return torch.from_numpy(_TABLES[name].copy()).to(device)
