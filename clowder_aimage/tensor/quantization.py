"""Types of quantization: their properties and shape arithmetic.

A quantized matrix of r rows and c columns is stored as its codes, packed into U32, with a scale for
every ``group_size`` values of a row, and for affine types a bias. Formats: ollama, "Tensor Blob
Format"; MLX, ``mlx.core.quantize``; OCP Microscaling Formats 1.0 (the mx types).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clowder_aimage.errors import FormatError

QUANT_TYPE = "quant_type"
GROUP_SIZE = "group_size"
# Bits in a word of codes.
_CODES = 32


@dataclass(frozen=True, slots=True)
class QuantType:
    """A type such as ``int4``. ``mode`` and ``bits`` are MLX terms."""

    name: str
    mode: str
    bits: int
    # The default, if metadata state none.
    group_size: int
    # All supported sizes.
    group_sizes: tuple[int, ...]
    scale_dtypes: tuple[str, ...]
    has_bias: bool


_FLOATS = ("BF16", "F16", "F32")
QUANT_TYPES: Mapping[str, QuantType] = {
    kind.name: kind
    for kind in (
        QuantType("int4", "affine", 4, 64, (32, 64, 128), _FLOATS, True),
        QuantType("int8", "affine", 8, 64, (32, 64, 128), _FLOATS, True),
        QuantType("nvfp4", "nvfp4", 4, 16, (16,), ("U8",), False),
        QuantType("mxfp4", "mxfp4", 4, 32, (32,), ("U8",), False),
        QuantType("mxfp8", "mxfp8", 8, 32, (32,), ("U8",), False),
    )
}
ALIASES: Mapping[str, str] = {"q8": "int8", "fp4": "int4", "q4": "int4"}
"""ollama's, in options and blobs: fp4 is not a float format."""
# In blobs of ollama, fp8 is not a float format either
_STATED: Mapping[str, str] = {**ALIASES, "fp8": "int8"}
FP8 = "fp8"
"""The name of mxfp8 with equal scales in each row, in options."""
CONVERTED = ("modelopt", "modelopt_fp4", "compressed-tensors")
"""Values of ``quant_method`` whose tensors are converted when an AImage is created."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The type and group size of a quantized tensor.

    ``is_by_row``: all groups of a row have the same scale. Blobs do not state it, so that it is
    False for tensors that are read.
    """

    type: QuantType
    group_size: int
    is_by_row: bool = False

    @classmethod
    def parse(cls, name: str, group_size: int | str | None = None) -> Quantization:
        """Parse a type or an alias in metadata, case-insensitive, with a group size or its default.

        Raises:
            FormatError: The type is unknown, or does not support the group size.
        """
        lower = name.lower()
        kind = QUANT_TYPES.get(_STATED.get(lower, lower))
        if kind is None:
            names = ", ".join((*QUANT_TYPES, *_STATED))
            raise FormatError(f"unknown quantization {name!r:.40}: expected one of {names}")
        size = kind.group_size if group_size is None else _parse_number(group_size)
        if size not in kind.group_sizes:
            allowed = " or ".join(map(str, kind.group_sizes))
            raise FormatError(f"{kind.name} requires group size {allowed}, not {group_size!r:.40}")
        return cls(kind, size)

    @property
    def per_word(self) -> int:
        """Return the number of values in a U32 word."""
        return _CODES // self.type.bits

    def fits(self, shape: Sequence[int]) -> bool:
        """Return True if a tensor of ``shape`` can be quantized: its rows are whole groups."""
        return len(shape) >= 2 and shape[-1] > 0 and shape[-1] % self.group_size == 0

    def compute_codes_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the codes of a tensor of ``shape``, in words."""
        return (*shape[:-1], shape[-1] // self.per_word)

    def compute_scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales, and of the biases, of a tensor of ``shape``."""
        return (*shape[:-1], shape[-1] // self.group_size)

    def compute_shape(self, codes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the tensor that codes of shape ``codes`` represent."""
        return (*codes[:-1], codes[-1] * self.per_word)

    @property
    def metadata(self) -> dict[str, str]:
        """Return the ``__metadata__`` of a blob with one tensor."""
        return {QUANT_TYPE: self.type.name, GROUP_SIZE: str(self.group_size)}


ROW_SCALED = Quantization(QUANT_TYPES["mxfp8"], 32, is_by_row=True)
"""The quantization that ``--quantize fp8`` means."""


def parse_precision(text: str) -> str:
    """Return the name of a precision: a type of quantization, bf16 or f16. Raises ValueError.

    That of FP8 is mxfp8, the type in its blobs.
    """
    aliases = {**ALIASES, FP8: ROW_SCALED.type.name}
    name = aliases.get(text.lower(), text.lower())
    if name not in (precisions := (*QUANT_TYPES, "bf16", "f16")):
        raise ValueError(f"unknown precision {text!r:.40}: expected one of {', '.join(precisions)}")
    return name


def _parse_number(value: int | str) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    return value if isinstance(value, int) else -1
