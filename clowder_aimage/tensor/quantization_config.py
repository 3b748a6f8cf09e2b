"""Quantization stated outside of blobs: types in configurations, scales in other layers.

MLX writes ``quantization`` into a component's config.json, ollama's first generation writes
``quantization`` and ``group_size`` into model_index.json. The latter stores codes, scales and
biases in separate layers (``x.weight``, ``x.weight_scale``, ``x.weight_qbias``), and so do MLX
checkpoints (``x.scales``, ``x.biases``). Format: ollama, x/imagegen/manifest; MLX-LM.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from clowder_aimage.tensor.blob import BIAS, CODES, GLOBAL_SCALE, MLX_PARTS, SCALE, WEIGHT
from clowder_aimage.tensor.header import Header, TensorInfo
from clowder_aimage.tensor.quantization import (
    CONVERTED,
    GROUP_SIZE,
    QUANT_TYPE,
    QUANT_TYPES,
    Quantization,
)

KEYS = ("quantization", "quantization_config")
METHOD = "quant_method"
# The name of a quantization and its group size.
StatedType = tuple[str | None, int | None]
_PART_SUFFIXES = {SCALE: "_scale", BIAS: "_qbias", GLOBAL_SCALE: "_global_scale"}


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The configurations that state the quantization of a component's tensors."""

    # The component's config.json.
    config: Mapping[str, Any]
    # model_index.json
    index: Mapping[str, Any]

    def of(self, name: str) -> StatedType:
        """Return the name and group size of the quantization of tensor ``name``, if stated."""
        entry = find_mlx_entry(self.config, name.removesuffix(WEIGHT))
        if entry is not None:
            return parse_mlx_type(entry)
        kind, size = self.index.get("quantization"), self.index.get("group_size")
        return (kind if isinstance(kind, str) else None, size if type(size) is int else None)


def find_mlx_entry(config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """Return the entry for a module in MLX's table in a component's config.json.

    A module's entry does not inherit from the table (the default mode is affine, the default
    group size follows from the shapes). Without one the table itself is returned.
    """
    for key in KEYS:
        table = config.get(key)
        if isinstance(table, dict):
            entry = table.get(module)
            if isinstance(entry, dict) or "bits" in table:
                return entry if isinstance(entry, dict) else table
    return None


def parse_mlx_type(entry: Mapping[str, Any]) -> StatedType:
    """Return the name of the type and the group size of an MLX entry: mode, bits, group_size."""
    mode, bits, size = entry.get("mode", "affine"), entry.get("bits"), entry.get("group_size")
    for kind in QUANT_TYPES.values():
        if (kind.mode, kind.bits) == (mode, bits) and type(bits) is int:
            return kind.name, size if type(size) is int else None
    return None, None


def find_unknown_key(config: Mapping[str, Any]) -> str | None:
    """Return the key of an unknown quantization in a component's configuration."""
    for key in KEYS:
        value = config.get(key)
        if value is not None and not (isinstance(value, dict) and _is_known(value)):
            return key
    return None


def _is_known(value: Mapping[str, Any]) -> bool:
    """Return True if tensors of this method are converted, or this is MLX's table."""
    method = value.get(METHOD)
    if method in CONVERTED:
        # Rotations and other transforms would have to be computed at run time.
        return not value.get("transform_config")
    entries = [entry for entry in value.values() if isinstance(entry, dict)]
    if "bits" in value or "group_size" in value:
        if "group_size" not in value:
            return False
        entries.append(dict(value))
    return method in (None, "mlx") and bool(entries) and all(map(_is_mlx, entries))


def _is_mlx(entry: Mapping[str, Any]) -> bool:
    name, size = parse_mlx_type(entry)
    return name is not None and ("group_size" not in entry or size in QUANT_TYPES[name].group_sizes)


def find_part_layers(name: str, layers: Container[str]) -> dict[str, str]:
    """Return the layers with the scales and biases of the codes in the layer ``name``.

    The keys are SCALE, BIAS and GLOBAL_SCALE; the result is empty if there are no scales.
    """
    if name.endswith(WEIGHT):
        for stem, words in ((name, _PART_SUFFIXES), (name.removesuffix(WEIGHT), MLX_PARTS)):
            if stem + words[SCALE] in layers:
                parts = {suffix: stem + word for suffix, word in words.items()}
                return {suffix: layer for suffix, layer in parts.items() if layer in layers}
    return {}


def complete(header: Header, stated: Callable[[str], StatedType]) -> Header:
    """Return the header with types of codes from ``stated`` and group sizes from the shapes.

    Raises:
        FormatError: The type is unknown.
    """
    metadata = dict(header.metadata)
    for key, codes in header.tensors.items():
        scales = _find_scales(key, header.tensors) if codes.dtype == CODES else None
        if scales is None:
            continue
        kind, size = metadata.get(f"{key}.{QUANT_TYPE}", metadata.get(QUANT_TYPE)), None
        if kind is None:
            kind, size = stated(key)
            if kind is None:
                continue
            metadata[f"{key}.{QUANT_TYPE}"] = kind
        if size is None and GROUP_SIZE not in metadata:
            size = compute_group_size(kind, codes.shape, scales.shape)
        if size is not None:
            metadata.setdefault(f"{key}.{GROUP_SIZE}", str(size))
    return replace(header, metadata=metadata)


def compute_group_size(kind: str, codes: tuple[int, ...], scales: tuple[int, ...]) -> int | None:
    """Return the number of row values per scale, or None if ``kind`` does not support it.

    Raises:
        FormatError: The type is unknown.
    """
    quantization = Quantization.parse(kind)
    if not codes or not scales or not scales[-1]:
        return None
    size, remainder = divmod(quantization.compute_shape(codes)[-1], scales[-1])
    return size if not remainder and size in quantization.type.group_sizes else None


def _find_scales(key: str, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    scales = tensors.get(key + SCALE)
    if scales is None and key.endswith(WEIGHT):
        scales = tensors.get(key.removesuffix(WEIGHT) + MLX_PARTS[SCALE])
    return scales
