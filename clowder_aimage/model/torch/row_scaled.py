"""Matrices of 8-bit floats (E4M3FN) with a factor for each row, and products with them.

A product quantizes its input too, by its rows and while it is computed, and multiplies both factors
afterwards. On CUDA it is one function of the card; elsewhere it is that of the dequantized values.
The codes and factors of a weight are those that ``create --quantize fp8`` writes for it. Formats:
OCP 8-bit Floating Point 1.0; OCP Microscaling Formats 1.0, section 5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from clowder_aimage.errors import UsageError
from clowder_aimage.model.torch.device import CUDA

CODE = torch.float8_e4m3fn
"""The type of codes."""
MULTIPLE = 16
"""The rows of a matrix are a multiple of this: products on CUDA require it."""

_LARGEST = 448.0
# The least factor of an input: of a row of zeros
_TINY = 1e-30
# Of the bits of a float32, as in ``importer/row_quantizer.py``
_MANTISSA, _LARGEST_EXPONENT, _BELOW_NEXT = 23, 8, 0x1FFFFF
# The bits of 2**-127, which is not a normal number
_LEAST_SCALE = 0x00400000
_aten = torch.ops.aten


class RowScaledTensor(torch.Tensor):  # type: ignore[misc]
    """A weight: ``codes`` (rows, columns) and ``scales`` (rows,), float32.

    Linear layers multiply with the codes, and weights are joined and split by rows. All other
    operations have its values in ``dtype``.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[RowScaledTensor], codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> RowScaledTensor:
        """Make a tensor without memory of its own."""
        made: RowScaledTensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - documented
            cls, codes.shape, dtype=dtype, device=codes.device
        )
        made.codes, made.scales = codes, scales
        return made

    @classmethod
    def of(cls, values: torch.Tensor, dtype: torch.dtype) -> RowScaledTensor:
        """Quantize finite values (rows, columns), on their device."""
        return cls(*quantize_rows(values), dtype)

    def compute_values(self) -> torch.Tensor:
        """Return the values, in ``dtype``."""
        return (self.codes.float() * self.scales[:, None]).to(self.dtype)

    def __repr__(self, **_: Any) -> str:
        return f"RowScaledTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    # -- the interface of tensors that PyTorch compiles

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scales"], self.dtype

    def _stable_hash_for_caching(self) -> str:
        """Return what the compiled code depends on, for PyTorch's cache of it."""
        return f"{type(self).__qualname__} {tuple(self.shape)} {self.dtype} {self.device}"

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: dict[str, torch.Tensor], dtype: torch.dtype, *_: Any
    ) -> RowScaledTensor:
        return cls(tensors["codes"], tensors["scales"], dtype)

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if (own := _FUNCTIONS.get(function)) is not None:
            return own(*arguments, **keywords)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - documented
            return function(*arguments, **keywords)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, _: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        first = arguments[0] if arguments else None
        if function in _COPIES and isinstance(first, RowScaledTensor):
            codes, scales = (function(part) for part in (first.codes, first.scales))
            return cls(codes, scales, first.dtype)
        return function(*_compute_all(arguments), **keywords)


_COPIES = (_aten.detach.default, _aten.alias.default, _aten.clone.default)


def _compute_all(value: Any) -> Any:
    """Return arguments with values in place of matrices."""
    if isinstance(value, RowScaledTensor):
        return value.compute_values()
    if isinstance(value, tuple | list):
        return type(value)(map(_compute_all, value))
    return value


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of finite values (rows, columns).

    A scale is the least power of two that allows all values of the row, at least 2**-127.
    """
    largest = values.abs().amax(dim=1).float().view(torch.int32)
    biased = ((largest + _BELOW_NEXT >> _MANTISSA) - _LARGEST_EXPONENT).clamp(min=0)
    factors = (254 - biased << _MANTISSA).view(torch.float32)
    codes = (values.float() * factors[:, None]).to(CODE)
    bits = torch.where(biased == 0, _LEAST_SCALE, biased << _MANTISSA)
    return codes, bits.to(torch.int32).view(torch.float32)


def quantize_inputs(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of an input (rows, columns), and the factors (rows, 1), float32."""
    factors = (rows.abs().amax(dim=1, keepdim=True).float() / _LARGEST).clamp(min=_TINY)
    return (rows.float() / factors).clamp(-_LARGEST, _LARGEST).to(CODE), factors


def multiply_exactly(
    inputs: torch.Tensor, factors: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Return the product with the transposed matrix, of dequantized values, in float32."""
    return torch.mm(inputs.float() * factors, (codes.float() * scales[:, None]).t())


def multiply_scaled(
    inputs: torch.Tensor, factors: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Return the same product by one function of the card, in bfloat16."""
    # Older versions have no public name for it
    product: torch.Tensor = torch._scaled_mm(  # noqa: SLF001
        inputs,
        codes.t(),
        scale_a=factors,
        scale_b=scales[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return product


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``functional.linear`` of x: (..., columns), in the type of x."""
    if not isinstance(weight, RowScaledTensor):
        return linear(_compute_all(x), weight, _compute_all(bias))
    multiply = multiply_scaled if x.device.type == CUDA else multiply_exactly
    rows = x.reshape(-1, x.shape[-1])
    y = multiply(*quantize_inputs(rows), weight.codes, weight.scales).to(x.dtype)
    y = y if bias is None else y + bias
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _join(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Return ``torch.cat``; of rows if all are row-scaled."""
    if dim or not all(isinstance(tensor, RowScaledTensor) for tensor in tensors):
        return torch.cat(_compute_all(tensors), dim)
    # Codes are bytes: not every device can join 8-bit floats
    codes = torch.cat([tensor.codes.view(torch.uint8) for tensor in tensors]).view(CODE)
    return RowScaledTensor(codes, torch.cat([t.scales for t in tensors]), tensors[0].dtype)


def _split(tensor: torch.Tensor, sizes: Any, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Return ``torch.split``, without copies of rows."""
    if dim or not isinstance(tensor, RowScaledTensor):
        parts: tuple[torch.Tensor, ...] = torch.split(_compute_all(tensor), sizes, dim)
        return parts
    pairs = zip(tensor.codes.split(sizes), tensor.scales.split(sizes), strict=True)
    return tuple(RowScaledTensor(codes, scales, tensor.dtype) for codes, scales in pairs)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    linear: _multiply,
    torch.cat: _join,
    torch.split: _split,
    torch.Tensor.split: _split,
}


@functools.cache
def check_fp8(device: str) -> None:
    """Compute a small product: before a load, whatever the card, its driver and PyTorch lack.

    Raises UsageError: this device cannot compute products of 8-bit floats.
    """
    try:
        weight = RowScaledTensor.of(torch.ones(MULTIPLE, 32, device=device), torch.float32)
        is_right = bool((linear(torch.ones(MULTIPLE, 32, device=device), weight) == 32).all())
        reason = "its products are wrong"
    except (RuntimeError, AssertionError, TypeError, AttributeError, ValueError) as error:
        is_right = False
        reason = str(error).strip().partition("\n")[0][:200]
    if not is_right:
        raise UsageError(
            f"PyTorch cannot compute in fp8 on the device {device}: {reason}",
            hint="compute in bfloat16; products of fp8 need an NVIDIA GPU such as Ada, Hopper or "
            "later",
        )
