"""What configurations say of quantized weights, and which of them can be believed.

Blobs tell how they are quantized themselves. Where a model came with a file a tensor and no such
metadata, its configuration tells: MLX writes ``quantization`` into a component's config.json,
ollama's first generation ``quantization`` and ``group_size`` into model_index.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.model.fields import Fields
from clowder_aimage.tensor import QUANT_TYPES
from clowder_aimage.tensor.quantization import CONVERTED

KEYS = ("quantization", "quantization_config")


@dataclass(frozen=True, slots=True)
class Stated:
    """The configurations, to be asked about one tensor after another."""

    config: Mapping[str, Any]  # of the component
    index: Mapping[str, Any]  # model_index.json

    def of(self, name: str) -> tuple[str | None, int | None]:
        """The quantization's name and group size of the tensor ``name``, as far as they are said.

        A module that MLX's table names has its own entry there, which takes nothing from the table:
        without a mode it is affine, without a group size the shapes tell it.
        """
        for key in KEYS:
            value = self.config.get(key)
            if isinstance(value, dict) and "bits" in value:
                entry = value.get(name.removesuffix(".weight"), value)
                return mlx_type(entry if isinstance(entry, dict) else value)
        kind, size = self.index.get("quantization"), self.index.get("group_size")
        return (kind if isinstance(kind, str) else None, size if type(size) is int else None)


def mlx_type(entry: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Our name and the group size for MLX's words: mode, bits, group_size."""
    mode, bits, size = entry.get("mode", "affine"), entry.get("bits"), entry.get("group_size")
    for kind in QUANT_TYPES.values():
        if (kind.mode, kind.bits) == (mode, bits):
            return kind.name, size if type(size) is int else None
    return None, None


def accept_quantization(fields: Fields) -> None:
    """Read the fields about quantization, if a configuration has them.

    They change nothing here: the blobs say how they are quantized, and the strict load refuses
    whatever is not a weight that can be read.

    Raises:
        ModelError: for a way of quantizing whose tensors cannot be read.
    """
    for key in KEYS:
        value = fields.raw(key)
        if value is not None and not (isinstance(value, dict) and _known(value)):
            raise fields.refuse(key, "this quantisation is not supported")


def _known(value: Mapping[str, Any]) -> bool:
    method = value.get("quant_method")
    if method is not None:
        # rotations and other transforms would have to be computed while the model runs
        return method in CONVERTED and not value.get("transform_config")
    modules = (entry for entry in value.values() if isinstance(entry, dict))
    return "group_size" in value and all(map(_known_mlx, (value, *modules)))


def _known_mlx(entry: Mapping[str, Any]) -> bool:
    """Whether there is such a type, in groups of such a size where one is said."""
    name, size = mlx_type(entry)
    said = "group_size" in entry
    return name is not None and (not said or size in QUANT_TYPES[name].group_sizes)
