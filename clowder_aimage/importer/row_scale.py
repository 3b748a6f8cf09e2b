"""Detection of quantized weights with one scale for each row. Their blobs do not state it."""

from __future__ import annotations

import threading

from clowder_aimage.importer.range_reader import RangeReader
from clowder_aimage.tensor.blob import SCALE
from clowder_aimage.tensor.quantization import ROW_SCALED
from clowder_aimage.tensor.weight import Weight


def has_row_scales(weight: Weight) -> bool:
    """Return True if a stored matrix has the form of ROW_SCALED. Raises ModelError."""
    quantization = weight.quantization
    if quantization is None or quantization.type != ROW_SCALED.type or len(weight.shape) != 2:
        return False
    groups = weight.shape[1] // quantization.group_size
    for part in weight.parts:
        if part.suffix != SCALE:
            continue
        with RangeReader(part.tensor.file_range, threading.Event()) as reader:
            scales = bytes(reader.read())
        return all(
            scales[start : start + groups] == scales[start : start + 1] * groups
            for start in range(0, len(scales), groups)
        )
    return False
