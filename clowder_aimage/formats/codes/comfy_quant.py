"""Quantized weight files of ComfyUI. Their layers are decoded exactly, on reading.

A layer ``x`` is described by a tensor ``x.comfy_quant`` (JSON), or in ``_quantization_metadata`` of
the header; older files have a tensor ``scaled_fp8``. Its weight ``x.weight`` has codes, and
``x.weight_scale`` (older: ``x.scale_weight``) and ``x.weight_scale_2`` have scales. 8-bit floats
without a scale are a cast. Scales of activations are omitted. Values are stored as BF16 if all
possible products are exact in it, else as F32. Sources: comfy/quant_ops.py, comfy/ops.py and
``convert_old_quants`` in comfy/utils.py of ComfyUI.

Rotated weights are supported in int8_tensorwise. Other formats of 4 bits, and SVDQuant (Nunchaku),
are rejected.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError
from clowder_aimage.formats.codes.coded_tensor import (
    FACTORS,
    CodedTensor,
    DecodedCount,
    check_package,
    read_bytes,
)
from clowder_aimage.oci import read_json
from clowder_aimage.tensor.weight import SourceTensor

METADATA = "_quantization_metadata"
_CONFIG, _MARKER, _WEIGHT = ".comfy_quant", "scaled_fp8", ".weight"
_MAX_CONFIG = 4096  # bytes
_FLOATS = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
# The dtypes of codes, by format.
_CODE_DTYPES = {
    "float8_e4m3fn": ("F8_E4M3", "U8"),
    "float8_e5m2": ("F8_E5M2", "U8"),
    "int8_tensorwise": ("I8",),
    "mxfp8": ("F8_E4M3", "U8"),
    "nvfp4": ("U8",),
}
# Values of a block, its bytes, and the dtypes of its scale.
_BLOCKS = {"mxfp8": (32, 32, ("F8_E8M0", "U8")), "nvfp4": (16, 8, ("F8_E4M3", "U8"))}
_INPUTS = (".input_scale", ".scale_input")
_SCALES = (".weight_scale", ".scale_weight")
_UNSUPPORTED = {
    ".qweight": "SVDQuant (Nunchaku) or another packed format",
    ".wscales": "SVDQuant (Nunchaku)",
    ".pre_quant_scale": "scales of channels before the quantization (pre_quant_scale)",
    ".weight_scale_inv": "scales of blocks of 128 x 128 (weight_scale_inv)",
    ".weight_s_rel": "the format asym_w4a8_int8",
    ".weight_codebook": "the format asym_w4a8_int8",
}
_ROTATED = "int8_convrot"
# Sizes of rotated groups: powers of four, for which regular Hadamard matrices are defined here.
_GROUPS = (4, 16, 64, 256, 1024)
_HINT = f"supported: {', '.join(_CODE_DTYPES)}; otherwise use the unquantized model"
_DAMAGED = "the file is damaged, or was written by an unknown tool"
# Prefixes of tensors that the metadata of some files lack.
_PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")


def decode_quantized(
    path: Path, tensors: Sequence[SourceTensor], metadata: Mapping[str, str]
) -> tuple[tuple[SourceTensor, ...], DecodedCount]:
    """Return the tensors of a file, decoded if they are quantized, and the count of decoded ones.

    Raises:
        FormatError: A format is unsupported, a description or scale is invalid or missing.
        UsageError: A required package is not installed.
    """
    tensors_by_name = {tensor.name: tensor for tensor in tensors}
    for name in tensors_by_name:
        for ending, feature in _UNSUPPORTED.items():
            if name.endswith(ending):
                raise _build_unsupported_error(path, name, f"has {feature}, which is not supported")
    formats = _read_formats(path, tensors_by_name, metadata)
    layers = {
        name: (kind, 1)
        for name, tensor in tensors_by_name.items()
        if (kind := _FLOATS.get(tensor.dtype)) and not (name.endswith(_SCALES) or _is_marker(name))
    } | formats
    if not layers:
        return tuple(tensors), {}
    check_package("numpy")
    consumed = {
        name for name in tensors_by_name if name.endswith((_CONFIG, *_INPUTS)) or _is_marker(name)
    }
    coded_tensors: dict[str, CodedTensor] = {}
    for name, (kind, group) in layers.items():
        coded = _build_coded(tensors_by_name, tensors_by_name[name], kind, name in formats)
        coded_tensors[name] = coded if group == 1 else _set_rotation(coded, group)
        scales = (coded_tensors[name].factors, coded_tensors[name].scales)
        consumed |= {scale.name for scale in scales if scale is not None}
    _check_unused(path, tensors_by_name, consumed | coded_tensors.keys())
    values = tuple(
        coded_tensors[name].build_tensor(name) if name in coded_tensors else tensor
        for name, tensor in tensors_by_name.items()
        if name not in consumed
    )
    return values, Counter((coded.format, coded.dtype) for coded in coded_tensors.values())


def _is_marker(name: str) -> bool:
    return name == _MARKER or name.endswith(f".{_MARKER}")


def _read_formats(
    path: Path, tensors: Mapping[str, SourceTensor], metadata: Mapping[str, str]
) -> dict[str, tuple[str, int]]:
    """Return the stated formats and sizes of rotated groups, by the names of the weights."""
    formats = {}
    for stem, value in _read_descriptions(path, tensors, metadata).items():
        names = [f"{prefix}{stem}{_WEIGHT}" for prefix in _PREFIXES]
        name = next((name for name in names if name in tensors), None)
        if name is None:
            problem = "is described as quantized, but has no weight"
            raise FormatError(f"{path}: {stem[:200]} {problem}", hint=_DAMAGED)
        formats[name] = _parse_format(path, stem, value)
    return formats


def _read_descriptions(
    path: Path, tensors: Mapping[str, SourceTensor], metadata: Mapping[str, str]
) -> dict[str, Any]:
    """Return the descriptions of layers, by name. Those of the header have precedence."""
    descriptions: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not name.endswith(_CONFIG):
            continue
        if tensor.dtype != "U8" or tensor.nbytes > _MAX_CONFIG:
            raise FormatError(f"{tensor.path}: {name[:200]} is not a text", hint=_DAMAGED)
        label = f"{name[:200]} in {tensor.path}"
        descriptions[name.removesuffix(_CONFIG)] = read_json(read_bytes(tensor), label)
    if METADATA not in metadata:
        return descriptions
    value = read_json(metadata[METADATA].encode(), f"{METADATA} in {path}")
    layers = value.get("layers") if isinstance(value, dict) else None
    if not isinstance(layers, dict):
        raise FormatError(f"{path}: {METADATA} does not describe layers", hint=_DAMAGED)
    return descriptions | layers


def _parse_format(path: Path, stem: str, value: Any) -> tuple[str, int]:
    """Return the format in the description of a layer, and the size of its rotated groups, or 1.

    Raises FormatError.
    """
    settings = {"format": value} if isinstance(value, str) else value
    kind = settings.get("format") if isinstance(settings, dict) else None
    if not isinstance(settings, dict) or not isinstance(kind, str):
        raise FormatError(f"{path}: the description of {stem[:200]} has no format", hint=_DAMAGED)
    if kind not in _CODE_DTYPES:
        raise _build_unsupported_error(path, stem, f"has the unsupported format {kind!r:.60}")
    size = settings.get("group_size")
    if size is not None and kind in _BLOCKS and size != _BLOCKS[kind][0]:
        raise _build_unsupported_error(path, stem, f"has {kind} in groups of {size!r:.20}")
    inner = settings.get("params")
    settings = {**(inner if isinstance(inner, dict) else {}), **settings}
    if not settings.get("convrot"):
        return kind, 1
    group = settings.get("convrot_groupsize", 256)
    if kind != "int8_tensorwise" or type(group) is not int or group not in _GROUPS:
        raise _build_unsupported_error(
            path, stem, f"has {kind} rotated (convrot) in groups of {group!r:.20}"
        )
    return kind, group


def _set_rotation(coded: CodedTensor, group: int) -> CodedTensor:
    if len(coded.shape) != 2 or coded.shape[1] % group:
        raise _build_tensor_error(coded.codes, f"is not a matrix in groups of {group}")
    return replace(coded, format=_ROTATED, dtype="F32", block=group, size=group)


def _build_coded(
    tensors: Mapping[str, SourceTensor], codes: SourceTensor, kind: str, is_described: bool
) -> CodedTensor:
    if codes.dtype not in _CODE_DTYPES[kind]:
        raise _build_tensor_error(codes, f"does not have codes of {kind}")
    stem = codes.name.removesuffix(_WEIGHT)
    suffixes = _SCALES if stem != codes.name else ()
    scales = [tensors[stem + suffix] for suffix in suffixes if stem + suffix in tensors]
    if len(scales) > 1 or (is_described and not scales):
        raise _build_tensor_error(codes, "has two scales" if scales else "has no weight_scale")
    if kind in _BLOCKS:
        coded = _build_block_tensor(codes, kind, scales[0], tensors.get(f"{codes.name}_scale_2"))
    else:
        coded = CodedTensor(codes, kind, "F32", codes.shape, factors=scales[0] if scales else None)
    _check_factors(coded)
    return replace(coded, dtype=_choose_dtype(coded))


def _build_block_tensor(
    codes: SourceTensor, kind: str, scales: SourceTensor, factors: SourceTensor | None
) -> CodedTensor:
    from clowder_aimage.formats.codes.scaled_code import compute_scales_shape

    block, size, dtypes = _BLOCKS[kind]
    if len(codes.shape) != 2 or not all(codes.shape) or codes.shape[1] % size:
        raise _build_tensor_error(codes, f"is not a matrix of {kind}")
    shape = (codes.shape[0], codes.shape[1] // size * block)
    expected = compute_scales_shape(kind, *shape)
    if scales.dtype not in dtypes or scales.shape not in (expected, (math.prod(expected),)):
        raise _build_tensor_error(
            scales, f"does not match the codes: {kind} needs {list(expected)}"
        )
    if (factors is None) == (kind == "nvfp4"):
        raise _build_tensor_error(codes, f"has {'no' if factors is None else 'a'} weight_scale_2")
    return CodedTensor(codes, kind, "F32", shape, block, size, factors, scales)


def _check_factors(coded: CodedTensor) -> None:
    """Check the scale of a tensor or of its rows. Raises FormatError."""
    import numpy as np

    factors, rows = coded.factors, coded.shape[:1]
    if factors is None:
        return
    shapes = [(*rows, 1)] if coded.format not in _BLOCKS and len(coded.shape) == 2 else []
    shapes += [rows] if coded.format == "int8_tensorwise" else []
    if factors.dtype not in FACTORS or not (
        math.prod(factors.shape) == 1 or factors.shape in shapes
    ):
        raise _build_tensor_error(factors, f"is not a scale of {list(coded.shape)}")
    if not np.isfinite(coded.read_factors()).all():
        raise _build_tensor_error(factors, "is not finite")


def _choose_dtype(coded: CodedTensor) -> str:
    """Return BF16 if all products of codes and scales are exact in it, else F32."""
    import numpy as np

    from clowder_aimage.formats.codes import scaled_code

    factors, kind = coded.read_factors(), coded.format
    if factors.size > 1:
        return "F32"
    values = scaled_code.build_table(kind, factors)
    if coded.scales is not None:
        # Only scales that occur in the file are considered: F32 takes twice the memory.
        values = values[np.bincount(coded.read_scales(), minlength=256) > 0]
        if not np.isfinite(values[:, np.isfinite(scaled_code.compute_code_values(kind))]).all():
            raise _build_tensor_error(coded.scales, "has scales that are not finite, or too large")
    return "BF16" if scaled_code.fits_bf16(values) else "F32"


def _check_unused(path: Path, tensors: Mapping[str, SourceTensor], consumed: set[str]) -> None:
    for name in tensors.keys() - consumed:
        if name.endswith((*_SCALES, ".weight_scale_2")):
            raise FormatError(f"{path}: {name[:200]} belongs to no quantized weight", hint=_DAMAGED)


def _build_tensor_error(tensor: SourceTensor, problem: str) -> FormatError:
    return FormatError(
        f"{tensor.path}: {tensor.name[:200]} ({tensor.dtype} {list(tensor.shape)}) {problem}",
        hint=_DAMAGED,
    )


def _build_unsupported_error(path: Path, name: str, problem: str) -> FormatError:
    return FormatError(f"{path}: {name[:200]} {problem}", hint=_HINT)
