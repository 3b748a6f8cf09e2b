"""Weights that are already quantized: three forms are converted, all others are rejected.

MLX writes ``x.scales`` and ``x.biases`` beside ``x.weight``; ModelOpt (nvfp4) ``x.weight_scale``
and the factor ``x.weight_scale_2``; compressed-tensors (nvfp4) ``x.weight_packed``,
``x.weight_scale`` and the divisor ``x.weight_global_scale``. Each becomes one weight, ``x.weight``,
with unchanged codes and scales and the global scale as a factor. Scales of activations
(``x.input_scale``) are omitted and counted. Sources: ``save_config`` of MLX-LM, ModelOpt's
"unified checkpoint", ``nvfp4-pack-quantized`` of compressed-tensors.

Other forms are rejected, since their codes would be read as values. They are GPTQ
and AWQ (``qweight``), bitsandbytes (``quant_state``, ``SCB``), transformers (fp8 and mxfp4), other
compressed-tensors and MLX, quanto (``_data``), HQQ (``W_q``), AQLM (``codebooks``), torchao
(``_qdata``), ComfyUI's scaled fp8 (``scale_weight``).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError
from clowder_aimage.tensor import QUANT_TYPES, Quantization, quantization_config
from clowder_aimage.tensor.blob import BIAS, CODES, GLOBAL_SCALE, INPUTS, SCALE, WEIGHT
from clowder_aimage.tensor.quantization import CONVERTED
from clowder_aimage.tensor.weight import (
    FLOATS,
    SourceTensor,
    TensorChunk,
    Weight,
    WeightReader,
    sort_weights,
    to_weight,
)

_NVFP4 = Quantization.parse("nvfp4")
_FACTORS = ("F32", "F16", "BF16")
_KNOWN = "supported: MLX (.scales and .biases), and nvfp4 of ModelOpt and compressed-tensors"
_USE_ORIGINAL = f"{_KNOWN}; otherwise use the unquantized model"
_ENDS = (
    *(".qweight", ".qzeros", ".SCB"),
    *(".weight.absmax", ".weight.nested_absmax", ".weight.quant_map"),
    *(".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_global_scale"),
    *(".weight_scale", ".weight_scale_inv", ".weight_scale_2"),
    *(".weight_blocks", ".weight_scales"),
    *(".weight._data", ".weight._scale", ".weight._shift", "_qdata", ".W_q", ".codebooks"),
)
_STATE = ".weight.quant_state."
# Dtypes of 8 bits, which may hold codes.
_OCTETS = ("U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ")


def read_quantized(
    directory: Path, tensors: Sequence[SourceTensor], config: Mapping[str, Any]
) -> tuple[tuple[Weight, ...], tuple[str, ...]]:
    """Return the weights of a component, sorted by name, and the names of ignored tensors.

    Raises:
        FormatError: The quantization is unknown, cannot be derived from the component's
            config.json, or does not match the shapes.
    """
    tensors_by_name = {tensor.name: tensor for tensor in tensors}
    weights, consumed = [], set[str]()
    for tensor in tensors:
        weight = _parse_quantized(tensors_by_name, tensor, config)
        if weight is not None:
            _check(weight)
            weights.append(weight)
            consumed |= {chunk.tensor.name for chunk in weight.parts}
    stems = {weight.name.removesuffix(WEIGHT) for weight in weights}
    ignored = {
        name
        for name in tensors_by_name.keys() - consumed
        for word in INPUTS
        if name.endswith(word) and name.removesuffix(word) in stems
    }
    plain_tensors = {
        name: tensor for name, tensor in tensors_by_name.items() if name not in consumed | ignored
    }
    _check_unused(plain_tensors)
    _check_method(directory, config)
    ordered = sort_weights([*weights, *map(to_weight, plain_tensors.values())])
    for previous, following in pairwise(ordered):
        if previous.name == following.name:
            raise FormatError(
                f"{directory} has {previous.name[:200]} both quantized and unquantized"
            )
    return ordered, tuple(sorted(ignored))


def _parse_quantized(
    tensors: Mapping[str, SourceTensor], tensor: SourceTensor, config: Mapping[str, Any]
) -> Weight | None:
    stem = tensor.name.removesuffix(WEIGHT)
    if tensor.name.endswith(".weight_packed"):
        return _build_compressed_weight(tensors, tensor, tensor.name.removesuffix("_packed"))
    if stem == tensor.name:
        return None
    if tensor.dtype == CODES and f"{stem}.scales" in tensors:
        return _build_mlx_weight(tensors, tensor, stem, config)
    if tensor.dtype == "U8" and f"{tensor.name}_scale" in tensors:
        return _build_modelopt_weight(tensors, tensor)
    return None


def _build_mlx_weight(
    tensors: Mapping[str, SourceTensor], codes: SourceTensor, stem: str, config: Mapping[str, Any]
) -> Weight:
    scales, biases = tensors[f"{stem}.scales"], tensors.get(f"{stem}.biases")
    # MLX states bits and group size only in config.json: shapes alone are ambiguous.
    quantization = _parse_mlx_quantization(codes, scales, stem, config)
    sources = {"": codes, SCALE: scales, **({BIAS: biases} if biases else {})}
    if quantization.type.has_bias != (biases is not None):
        raise _build_mismatch_error(codes, quantization)
    chunks = [
        TensorChunk(suffix, source.dtype, source.shape, source)
        for suffix, source in sources.items()
    ]
    return _build_weight(codes.name, quantization, chunks)


def _parse_mlx_quantization(
    codes: SourceTensor, scales: SourceTensor, stem: str, config: Mapping[str, Any]
) -> Quantization:
    entry = quantization_config.find_mlx_entry(config, stem)
    is_table = any(entry is config.get(key) for key in quantization_config.KEYS)
    if entry is None or "bits" not in entry or (is_table and "group_size" not in entry):
        raise FormatError(
            f"{codes.path}: {codes.name[:200]} is quantized, but config.json has no bits and "
            "group_size for it",
            hint='MLX writes "quantization": {"group_size": 64, "bits": 4} into config.json',
        )
    name, size = quantization_config.parse_mlx_type(entry)
    if name is None:
        bits, mode = entry["bits"], entry.get("mode", "affine")
        raise FormatError(
            f"{codes.path}: {codes.name[:200]}: unsupported quantization: {bits!r:.20} bits in "
            f"mode {mode!r:.20}",
            hint=f"supported: {', '.join(QUANT_TYPES)}",
        )
    if "group_size" not in entry:
        size = quantization_config.compute_group_size(name, codes.shape, scales.shape)
    try:
        return Quantization.parse(name, -1 if size is None else size)
    except FormatError as error:
        raise FormatError(f"{codes.path}: {codes.name[:200]}: {error}") from None


def _build_modelopt_weight(tensors: Mapping[str, SourceTensor], codes: SourceTensor) -> Weight:
    factor = tensors.get(f"{codes.name}_scale_2")
    if factor is None:
        raise _build_unsupported_error(codes)
    return _build_nvfp4_weight(
        codes.name, codes, tensors[f"{codes.name}_scale"], factor, WeightReader.FACTOR
    )


def _build_compressed_weight(
    tensors: Mapping[str, SourceTensor], codes: SourceTensor, name: str
) -> Weight:
    scale, divisor = tensors.get(f"{name}_scale"), tensors.get(f"{name}_global_scale")
    if scale is None or divisor is None or codes.dtype != "U8":
        raise _build_unsupported_error(codes)
    return _build_nvfp4_weight(name, codes, scale, divisor, WeightReader.DIVISOR)


def _build_nvfp4_weight(
    name: str, codes: SourceTensor, scale: SourceTensor, factor: SourceTensor, reading: WeightReader
) -> Weight:
    """Return an nvfp4 weight: two codes per byte, low half first, as in MLX's 32-bit words."""
    if scale.dtype not in ("F8_E4M3", "U8") or factor.dtype not in _FACTORS:
        raise _build_unsupported_error(codes)
    if not codes.shape or codes.shape[-1] % 4:
        raise _build_mismatch_error(codes, _NVFP4)
    words = (*codes.shape[:-1], codes.shape[-1] // 4)
    chunks = [
        TensorChunk("", CODES, words, codes),
        TensorChunk(SCALE, "U8", scale.shape, scale),
        TensorChunk(GLOBAL_SCALE, "F32", factor.shape, factor, reading),
    ]
    return _build_weight(name, _NVFP4, chunks)


def _build_weight(name: str, quantization: Quantization, chunks: list[TensorChunk]) -> Weight:
    words = chunks[0].shape
    shape = quantization.compute_shape(words) if words else ()
    return Weight(name, quantization.type.name, shape, tuple(chunks), quantization)


def convert_factors(chunk: TensorChunk, data: bytes | bytearray) -> bytes:
    """Return float values as float32 factors; divisors become their reciprocals.

    Raises:
        FormatError: A value is not a positive number.
    """
    name, dtype = chunk.tensor.name[:200], chunk.tensor.dtype
    width, letter = (4, "f") if dtype == "F32" else (2, "e" if dtype == "F16" else "H")
    values = struct.unpack(f"<{len(data) // width}{letter}", data)
    if dtype == "BF16":
        words = struct.pack(f"<{len(values)}I", *(value << 16 for value in values))
        values = struct.unpack(f"<{len(values)}f", words)
    if not all(0 < value < math.inf for value in values):
        raise FormatError(f"global scale {name} must be positive and finite")
    if chunk.reading is WeightReader.DIVISOR:
        values = tuple(1 / value for value in values)
    try:
        return struct.pack(f"<{len(values)}f", *values)
    except OverflowError:
        raise FormatError(f"global scale {name} is too small") from None


def _check(weight: Weight) -> None:
    quantization = weight.quantization
    assert quantization is not None  # noqa: S101
    rows = weight.shape[:-1]
    for chunk in weight.parts:
        if chunk.suffix in (SCALE, BIAS):
            fits = (
                quantization.fits(weight.shape)
                and chunk.shape == quantization.compute_scales_shape(weight.shape)
                and chunk.dtype in quantization.type.scale_dtypes
            )
        else:
            fits = chunk.suffix == "" or chunk.shape in ((), (1,), rows, (*rows, 1))
        if not fits:
            raise _build_mismatch_error(chunk.tensor, quantization)


def _build_mismatch_error(tensor: SourceTensor, quantization: Quantization) -> FormatError:
    return FormatError(
        f"{tensor.path}: {tensor.name[:200]} ({tensor.dtype} {list(tensor.shape)}) does not match "
        f"{quantization.type.name} in groups of {quantization.group_size}",
        hint="the weights do not match their config.json, or are damaged",
    )


def _build_unsupported_error(codes: SourceTensor) -> FormatError:
    return FormatError(
        f"{codes.path}: {codes.name[:200]} has an unsupported quantization", hint=_KNOWN
    )


def _check_method(directory: Path, config: Mapping[str, Any]) -> None:
    """Reject a config.json with an unsupported quantization. Raises FormatError."""
    key = quantization_config.find_unknown_key(config)
    if key is None:
        return
    stated = config[key]
    method = stated.get(quantization_config.METHOD) if isinstance(stated, Mapping) else None
    if method in CONVERTED:
        # Rotations would have to be reversed at run time.
        problem = "the weights were transformed before quantization"
    elif method is not None:
        problem = f"{quantization_config.METHOD} = {method!r:.60}"
    else:
        problem = f"{key} = {stated!r:.60}"
    path = directory / "config.json"
    raise FormatError(f"{path}: unsupported quantization: {problem}", hint=_USE_ORIGINAL)


def _check_unused(tensors: Mapping[str, SourceTensor]) -> None:
    """Reject unused tensors of quantized weights. Raises FormatError."""
    # The owner of ``x.scale_weight`` and of ``x.weight_scale`` is ``x``.
    split_names = [name.rpartition(".") for name in tensors]
    scaled = {
        owner.removesuffix(WEIGHT) for owner, _, word in split_names if "scale" in word.lower()
    }
    for name, tensor in tensors.items():
        if _is_orphan(name, tensor, tensors, scaled):
            problem = "belongs to a tensor with an unsupported quantization"
            raise FormatError(f"{tensor.path}: {name[:200]} {problem}", hint=_USE_ORIGINAL)


def _is_orphan(
    name: str, tensor: SourceTensor, tensors: Mapping[str, SourceTensor], scaled: AbstractSet[str]
) -> bool:
    if name.endswith(_ENDS) or _STATE in name:
        return True
    if name.endswith("_blocks"):
        return name.removesuffix("_blocks") + "_scales" in tensors
    for suffix in (SCALE, BIAS, GLOBAL_SCALE):
        if name.endswith(suffix) and name.removesuffix(suffix) in tensors:
            # A module is not also a tensor; readers would parse it as a blob of a quantized weight.
            return True
    stem = name.removesuffix(WEIGHT)
    # No network has U32 weights: these are codes with scales that are not named as in MLX.
    return stem != name and (
        tensor.dtype == CODES
        or (tensor.dtype in _OCTETS and stem in scaled)
        or (tensor.dtype in FLOATS and f"{stem}.scales" in tensors)
    )
