"""Quantization as the configurations of a model state it.

Blobs tell how they are quantized themselves. Where a model came with a file a tensor and no such
metadata, its configuration tells: MLX writes ``quantization`` into a component's config.json,
ollama's first generation ``quantization`` and ``group_size`` into model_index.json. What packs a
model and what runs it ask here, so that neither takes what the other refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.tensor.quantization import CONVERTED, QUANT_TYPES

KEYS = ("quantization", "quantization_config")
METHOD = "quant_method"
TRANSFORMED = "transform_config"
_MLX = (None, "mlx")  # as quant_method, of a table in MLX's words


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The configurations, to be asked about one tensor after another."""

    config: Mapping[str, Any]  # of the component
    index: Mapping[str, Any]  # model_index.json

    def of(self, name: str) -> tuple[str | None, int | None]:
        """Return name and group size of the quantization of tensor ``name``, where stated.

        A module that MLX's table names has its own entry there, which takes nothing from the table:
        without a mode it is affine, without a group size the shapes tell it.
        """
        for key in KEYS:
            value = self.config.get(key)
            if not isinstance(value, dict):
                continue
            entry = value.get(name.removesuffix(".weight"))
            if isinstance(entry, dict):
                return mlx_type(entry)
            if "bits" in value:
                return mlx_type(value)
        kind, size = self.index.get("quantization"), self.index.get("group_size")
        return (kind if isinstance(kind, str) else None, size if type(size) is int else None)


def mlx_type(entry: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Our name and the group size for MLX's words: mode, bits, group_size."""
    mode, bits, size = entry.get("mode", "affine"), entry.get("bits"), entry.get("group_size")
    for kind in QUANT_TYPES.values():
        if (kind.mode, kind.bits) == (mode, bits) and type(bits) is int:
            return kind.name, size if type(size) is int else None
    return None, None


def unknown_key(config: Mapping[str, Any]) -> str | None:
    """Return the key under which a component's configuration states an unknown quantization."""
    for key in KEYS:
        value = config.get(key)
        if value is not None and not (isinstance(value, dict) and _is_known(value)):
            return key
    return None


def _is_known(value: Mapping[str, Any]) -> bool:
    """Return whether it is a maker whose tensors are converted, or MLX's table.

    Types and sizes for all, for some modules, or both.
    """
    method = value.get(METHOD)
    if method in CONVERTED:
        # rotations and other transforms would have to be computed while the model runs
        return not value.get(TRANSFORMED)
    entries = [entry for entry in value.values() if isinstance(entry, dict)]
    if "bits" in value or "group_size" in value:
        if "group_size" not in value:
            return False
        entries.append(dict(value))
    return method in _MLX and bool(entries) and all(map(_is_mlx, entries))


def _is_mlx(entry: Mapping[str, Any]) -> bool:
    """Return whether there is such a type, in groups of such a size where one is said."""
    name, size = mlx_type(entry)
    said = "group_size" in entry
    return name is not None and (not said or size in QUANT_TYPES[name].group_sizes)
