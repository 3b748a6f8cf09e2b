"""Weights that somebody else has quantized already: three makers' ways to say so.

MLX writes ``x.scales`` and ``x.biases`` beside ``x.weight``; ModelOpt (nvfp4) ``x.weight_scale``
and the factor ``x.weight_scale_2``; compressed-tensors (nvfp4) ``x.weight_packed``,
``x.weight_scale`` and the divisor ``x.weight_global_scale``. Each becomes one weight, ``x.weight``.
Codes and scales are the same bytes in all of them; the global scale is converted to the factor
that a value is multiplied by. Scales of activations (``x.input_scale``) are for kernels that
quantize activations, too: they are left out, and counted. Read from: MLX-LM's ``save_config``,
ModelOpt's "unified checkpoint", compressed-tensors' ``nvfp4-pack-quantized``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError
from clowder_aimage.formats.unsupported_quantization import check_method, check_rest
from clowder_aimage.tensor import QUANT_TYPES, Quantization
from clowder_aimage.tensor.quantization_config import KEYS
from clowder_aimage.tensor.tensor_blob import BIAS, GLOBAL_SCALE, SCALE
from clowder_aimage.tensor.weight import (
    SourceTensor,
    TensorPart,
    Weight,
    WeightReader,
    by_name,
    plain,
)

_ACTIVATIONS = (".input_scale", ".input_global_scale")
_NVFP4 = Quantization.parse("nvfp4")
_KINDS = {(kind.mode, kind.bits): kind.name for kind in QUANT_TYPES.values()}
_FLOATS = ("F32", "F16", "BF16")


def read_quantized(
    directory: Path, tensors: Sequence[SourceTensor], config: Mapping[str, Any]
) -> tuple[tuple[Weight, ...], tuple[str, ...]]:
    """Return the weights of a component, sorted by name, and the names of ignored tensors.

    Raises:
        FormatError: they are quantized in a way that is not known, or cannot be told from the
            component's config.json, or does not fit their shapes.
    """
    named = {tensor.name: tensor for tensor in tensors}
    weights, taken = [], set[str]()
    for tensor in tensors:
        weight = _packed(named, tensor, config)
        if weight is not None:
            _check(weight)
            weights.append(weight)
            taken |= {part.tensor.name for part in weight.parts}
    stems = {weight.name.removesuffix(".weight") for weight in weights}
    ignored = {
        name
        for name in named.keys() - taken
        for word in _ACTIVATIONS
        if name.endswith(word) and name.removesuffix(word) in stems
    }
    rest = [tensor for name, tensor in named.items() if name not in taken | ignored]
    check_rest(rest)
    check_method(directory, config)
    whole = by_name([*weights, *map(plain, rest)])
    for one, other in pairwise(whole):
        if one.name == other.name:
            raise FormatError(f"{directory} has {one.name[:200]} both quantized and as it was")
    return whole, tuple(sorted(ignored))


def _packed(
    named: Mapping[str, SourceTensor], tensor: SourceTensor, config: Mapping[str, Any]
) -> Weight | None:
    """Return the weight whose codes ``tensor`` holds; None if it holds none."""
    stem = tensor.name.removesuffix(".weight")
    if tensor.name.endswith(".weight_packed"):
        return _compressed(named, tensor, tensor.name.removesuffix("_packed"))
    if stem == tensor.name:
        return None
    if tensor.dtype == "U32" and f"{stem}.scales" in named:
        return _mlx(named, tensor, stem, config)
    if tensor.dtype == "U8" and f"{tensor.name}_scale" in named:
        return _modelopt(named, tensor)
    return None


def _mlx(
    named: Mapping[str, SourceTensor], codes: SourceTensor, stem: str, config: Mapping[str, Any]
) -> Weight:
    scales, biases = named[f"{stem}.scales"], named.get(f"{stem}.biases")
    quantization = _configured(codes, scales, stem, config)
    parts = [_part(SCALE, scales)]
    if biases is not None:
        parts.append(_part(BIAS, biases))
    if quantization.type.has_bias != (biases is not None):
        raise _unfit(codes, quantization)
    return _weight(codes.name, quantization, codes, codes.shape, parts)


def _configured(
    codes: SourceTensor, scales: SourceTensor, stem: str, config: Mapping[str, Any]
) -> Quantization:
    """Return the quantization that config.json states for a tensor, or for all.

    A module's own entry stands for itself, as MLX's ``to_quantized`` reads it: it is affine unless
    it says otherwise, whatever the mode of the rest. Its group size may be left out: the shapes
    tell it. Raises FormatError.
    """
    said = next((config[key] for key in KEYS if config.get(key) is not None), None)
    own = said.get(stem) if isinstance(said, dict) else None
    facts = own if isinstance(own, dict) else said
    if (
        not isinstance(facts, dict)
        or "bits" not in facts
        or not (isinstance(own, dict) or "group_size" in facts)
    ):
        raise FormatError(
            f"{codes.path}: {codes.name[:200]} is quantized, and the config.json beside it does "
            "not say how",
            hint='MLX writes "quantization": {"group_size": 64, "bits": 4} there',
        )
    bits, mode = facts["bits"], facts.get("mode", "affine")
    name = _KINDS.get((mode, bits)) if isinstance(mode, str) and type(bits) is int else None
    if name is None:
        raise FormatError(
            f"{codes.path}: {codes.name[:200]} has {bits!r:.20} bits in mode {mode!r:.20}, "
            "which is not known",
            hint=f"known are {', '.join(QUANT_TYPES)}",
        )
    size = facts["group_size"] if "group_size" in facts else _group_size(name, codes, scales)
    try:
        return Quantization.parse(name, size if type(size) is int else -1)
    except FormatError as error:
        raise FormatError(f"{codes.path}: {codes.name[:200]}: {error}") from None


def _group_size(name: str, codes: SourceTensor, scales: SourceTensor) -> int:
    """Return the values of a row for each of its scales."""
    values = Quantization.parse(name).shape(codes.shape)[-1] if codes.shape else 0
    groups = scales.shape[-1] if scales.shape else 0
    return values // groups if groups else -1


def _modelopt(named: Mapping[str, SourceTensor], codes: SourceTensor) -> Weight:
    factor = named.get(f"{codes.name}_scale_2")
    if factor is None:
        raise _unknown(codes)
    return _nvfp4(codes.name, codes, named[f"{codes.name}_scale"], factor, WeightReader.FACTOR)


def _compressed(named: Mapping[str, SourceTensor], codes: SourceTensor, name: str) -> Weight:
    scale, divisor = named.get(f"{name}_scale"), named.get(f"{name}_global_scale")
    if scale is None or divisor is None or codes.dtype != "U8":
        raise _unknown(codes)
    return _nvfp4(name, codes, scale, divisor, WeightReader.DIVISOR)


def _nvfp4(
    name: str, codes: SourceTensor, scale: SourceTensor, factor: SourceTensor, reading: WeightReader
) -> Weight:
    """Two codes a byte, the first in the low half, as four bytes of MLX's words have them."""
    if scale.dtype not in ("F8_E4M3", "U8") or factor.dtype not in _FLOATS:
        raise _unknown(codes)
    if not codes.shape or codes.shape[-1] % 4:
        raise _unfit(codes, _NVFP4)
    words = (*codes.shape[:-1], codes.shape[-1] // 4)
    parts = [
        TensorPart(SCALE, "U8", scale.shape, scale),
        TensorPart(GLOBAL_SCALE, "F32", factor.shape, factor, reading),
    ]
    return _weight(name, _NVFP4, codes, words, parts)


def _weight(
    name: str,
    quantization: Quantization,
    codes: SourceTensor,
    words: tuple[int, ...],
    parts: list[TensorPart],
) -> Weight:
    whole = (TensorPart("", "U32", words, codes), *parts)
    shape = quantization.shape(words) if words else ()
    return Weight(name, quantization.type.name, shape, whole, quantization)


def factors(name: str, data: bytes, dtype: str, *, inverted: bool) -> bytes:
    """Float values as float32 factors, or the reciprocals of those that are divisors.

    Raises:
        FormatError: one is no positive number.
    """
    width, letter = (4, "f") if dtype == "F32" else (2, "e" if dtype == "F16" else "H")
    values = struct.unpack(f"<{len(data) // width}{letter}", data)
    if dtype == "BF16":
        words = struct.pack(f"<{len(values)}I", *(value << 16 for value in values))
        values = struct.unpack(f"<{len(values)}f", words)
    if not all(0 < value < math.inf for value in values):
        raise FormatError(f"{name[:200]} is no global scale: it must be positive and finite")
    try:
        return struct.pack(f"<{len(values)}f", *(1 / v if inverted else v for v in values))
    except OverflowError:
        raise FormatError(f"{name[:200]} is too small to be a global scale") from None


def _part(suffix: str, tensor: SourceTensor) -> TensorPart:
    return TensorPart(suffix, tensor.dtype, tensor.shape, tensor)


def _check(weight: Weight) -> None:
    """Check that the shapes are those of the type and its groups. Raises FormatError."""
    quantization = weight.quantization
    assert quantization is not None  # noqa: S101
    rows = weight.shape[:-1]
    for part in weight.parts:
        if part.suffix in (SCALE, BIAS):
            fits = (
                quantization.fits(weight.shape)
                and part.shape == quantization.scales_shape(weight.shape)
                and part.dtype in quantization.type.scale_dtypes
            )
        else:
            fits = part.suffix == "" or part.shape in ((), (1,), rows, (*rows, 1))
        if not fits:
            raise _unfit(part.tensor, quantization)


def _unfit(tensor: SourceTensor, quantization: Quantization) -> FormatError:
    return FormatError(
        f"{tensor.path}: {tensor.name[:200]}, {tensor.dtype} {list(tensor.shape)}, does not fit "
        f"{quantization.type.name} in groups of {quantization.group_size}",
        hint="the weights and their config.json do not belong together, or are damaged",
    )


def _unknown(codes: SourceTensor) -> FormatError:
    return FormatError(
        f"{codes.path}: {codes.name[:200]} is quantized in a way that is not known",
        hint="known are MLX's .scales and .biases, and nvfp4 of ModelOpt and compressed-tensors",
    )
