"""Quantized tensors of ComfyUI and GGUF, decoded by rows.

numpy is imported only to compute values: names, shapes and sizes are in the headers.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from clowder_aimage.errors import FormatError, build_extra_error
from clowder_aimage.formats.model_tree import AGAIN
from clowder_aimage.tensor.weight import SourceTensor

if TYPE_CHECKING:
    from clowder_aimage.tensor.float_code import Bytes, Floats

# Types of blocks that the package gguf decodes.
GGUF_TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0"),
)
# Dtypes of scales of tensors and rows.
FACTORS = ("F32", "F16", "BF16")
DecodedCount = Mapping[tuple[str, str], int]
"""The number of decoded tensors, by their format and the dtype of the values."""
# Values that are decoded at a time: 1 MiB of float32.
_VALUES = 256 * 1024


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """A tensor of ``dtype`` and ``shape``, stored as ``codes``: a ``TensorDecoder``.

    A block of ``block`` values takes ``size`` bytes. ``factors`` are the scale of the tensor or of
    each row, ``scales`` those of blocks, in the order of the GPU.
    """

    codes: SourceTensor
    format: str
    dtype: str
    shape: tuple[int, ...]
    block: int = 1
    size: int = 1
    factors: SourceTensor | None = None
    scales: SourceTensor | None = None

    def build_tensor(self, name: str) -> SourceTensor:
        """Return the tensor of values, named ``name``."""
        return replace(self.codes, name=name).with_decoder(self, self.dtype, self.shape)

    def decode(self, start: int, stop: int, /) -> Iterator[memoryview]:
        """Yield the values of rows ``start`` to ``stop``; fewer if the file was truncated."""
        import numpy as np

        row = math.prod(self.shape[1:])
        first_value, end_value = start * row, stop * row
        # Rows need not begin at a block: the values of other rows in the end blocks are cut off.
        function, step = self._build_decoder(), max(1, _VALUES // self.block)
        blocks = range(first_value // self.block, -(-end_value // self.block), step)
        with self.codes.path.open("rb") as file:
            file.seek(self.codes.offset + blocks.start * self.size)
            for block in blocks:
                count, position = min(step, blocks.stop - block), block * self.block
                data = file.read(count * self.size)
                if len(data) < count * self.size:
                    return
                with np.errstate(over="ignore", invalid="ignore"):
                    values = function(np.frombuffer(data, np.uint8), position)
                yield memoryview(
                    values[max(first_value - position, 0) : end_value - position]
                ).cast("B")

    def _build_decoder(self) -> Callable[[Bytes, int], Any]:
        """Return a function of codes, and the position of the first value, to values."""
        from clowder_aimage.formats.codes import scaled_code

        if self.format in GGUF_TYPES:
            import gguf

            kind = gguf.GGMLQuantizationType[self.format]
            return lambda codes, _: gguf.dequantize(codes, kind)
        columns = math.prod(self.shape[1:])
        factors, scales = self.read_factors(), self.read_scales()
        return scaled_code.build_decoder(
            self.format, columns, self.dtype, factors, scales, group=self.block
        )

    def read_factors(self) -> Floats:
        """Return the scale of the tensor or those of its rows; 1 without scales."""
        import numpy as np

        if self.factors is None:
            return np.ones(1, np.float32)
        data, dtype = read_bytes(self.factors), self.factors.dtype
        if dtype == "BF16":
            return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        return np.frombuffer(data, "<f2" if dtype == "F16" else "<f4").astype(np.float32)

    def read_scales(self) -> Bytes:
        """Return the scales of blocks by rows; empty without blocks."""
        import numpy as np

        from clowder_aimage.formats.codes.scaled_code import reorder_scales

        if self.scales is None:
            return np.empty(0, np.uint8)
        return reorder_scales(self.format, read_bytes(self.scales), *self.shape)


def read_bytes(tensor: SourceTensor) -> bytes:
    """Return the bytes of a tensor in its file. Raises FormatError."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.nbytes)
    if len(data) < tensor.nbytes:
        raise FormatError(f"{tensor.path} was truncated while it was read", hint=AGAIN)
    return data


def check_package(name: str) -> None:
    """Check that a package for decoding is installed. Raises UsageError."""
    if importlib.util.find_spec(name) is None:
        raise build_extra_error("decoding quantized weights", "mlx")
