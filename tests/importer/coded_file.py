"""Files of ComfyUI with quantized weights, and their values computed in float64."""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.importer.range_reader import RangeReader
from clowder_aimage.tensor import encode_header
from clowder_aimage.tensor.weight import SourceTensor

Array = npt.NDArray[Any]
Entry = tuple[str, Array]  # the dtype in the header, and the bytes or values
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def save(
    path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None
) -> Path:
    header = [(name, dtype, array.shape) for name, (dtype, array) in entries.items()]
    data = b"".join(np.ascontiguousarray(array).tobytes() for _, array in entries.values())
    path.write_bytes(encode_header(header, metadata) + data)
    return path


def text(value: Any) -> Entry:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return "U8", np.frombuffer(raw, np.uint8)


def number(value: float) -> Entry:
    return "F32", np.array(value, "<f4")


def float8(code: int, exponent_bits: int = 4) -> float:
    """Return the value of a float of 8 bits, by its definition."""
    bias, mantissa_bits = 2 ** (exponent_bits - 1) - 1, 7 - exponent_bits
    exponent, mantissa = (code & 127) >> mantissa_bits, code & (1 << mantissa_bits) - 1
    fraction = mantissa / 2**mantissa_bits
    size = math.ldexp(1 + fraction, exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
    return -size if code & 128 else size


def rounded(value: float) -> float:
    """Return a float64 rounded to float32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def swizzled(scales: Array) -> Array:
    """Return scales (rows, columns) in the order of cuBLAS, with padding that must not be read."""
    rows, columns = scales.shape
    tiles = -(-columns // 4)
    placed = np.full((-(-rows // 128) * 128, tiles * 4), 0x7F, np.uint8)
    flat = placed.reshape(-1)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * tiles + column // 4
            flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scales[
                row, column
            ]
    return placed


def values_of(tensor: SourceTensor) -> Array:
    """Return the values as float32, read like those of any tensor."""
    with RangeReader(tensor.file_range, threading.Event()) as reader:
        raw = bytes(reader.read())
        reader.check_unchanged()
    if tensor.dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").reshape(tensor.shape)
    assert tensor.dtype == "F32"
    return np.frombuffer(raw, "<f4").reshape(tensor.shape)
