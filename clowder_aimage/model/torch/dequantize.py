"""Dequantization on a device: the numbers of ``model/dequantize.py``, bit for bit.

A matrix is computed in slabs of rows, because a value takes up to 16 bytes meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from clowder_aimage.model.dequantize import compute_factor_shape
from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.blob import BIAS, GLOBAL_SCALE, SCALE
from clowder_aimage.tensor.float_code import E2M1, E4M3, E8M0, Floats

# Values of a slab
_SLAB = 1 << 24


def dequantize_into(
    target: torch.Tensor,
    quantization: Quantization,
    parts: Mapping[str, torch.Tensor],
    slab: int = _SLAB,
) -> None:
    """Fill a contiguous tensor (..., rows, columns) on the device, in its own type.

    ``parts`` are as stored: codes at "" in bytes (..., rows, bytes), scales and biases (..., rows,
    groups), bytes or floats, and the global scale.
    """
    kind, columns = quantization.type, target.shape[-1]
    values = target.reshape(-1, columns)
    rows = {name: part.reshape(len(values), -1) for name, part in parts.items() if name in _ROWS}
    factor = parts.get(GLOBAL_SCALE)
    if factor is not None:
        shape = compute_factor_shape(tuple(factor.shape), target.ndim)
        each = factor.float().reshape(shape).expand(*target.shape[:-1], 1)
        rows[GLOBAL_SCALE] = each.reshape(-1, 1)
    table = decode = None
    if BIAS not in parts:
        table = _put(E4M3 if kind.bits == 8 else E2M1, target.device)
        decode = _put(E4M3 if kind.name == "nvfp4" else E8M0, target.device)
    step = max(1, slab // columns)
    for first in range(0, len(values), step):
        part = {name: row[first : first + step] for name, row in rows.items()}
        codes = part[""] if kind.bits == 8 else _unpack(part[""])
        grouped = codes.reshape(len(codes), -1, quantization.group_size)
        if table is None or decode is None:
            result = grouped.float() * part[SCALE].float()[..., None]
            result += part[BIAS].float()[..., None]
        else:
            result = _look_up(table, grouped) * _look_up(decode, part[SCALE])[..., None]
        result = result.reshape(-1, columns)
        if factor is not None:
            result = result * part[GLOBAL_SCALE]
        values[first : first + step] = result


_ROWS = ("", SCALE, BIAS)


def _put(table: Floats, device: torch.device) -> torch.Tensor:
    return torch.tensor(table, device=device)


def _look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    # An index of bytes would be a mask
    return table.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)


def _unpack(octets: torch.Tensor) -> torch.Tensor:
    """Return two codes for each byte; the lowest bits are the first one."""
    return torch.stack([octets & 15, octets >> 4], dim=-1).reshape(len(octets), -1)
