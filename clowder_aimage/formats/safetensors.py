"""A single safetensors file, such as a checkpoint: each tensor becomes a blob.

The header is a separate layer, from which an export restores the file byte for byte. A file is
packed whole if its tensors cannot be layers: quantized tensors need a config, and some names are
not valid file names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from clowder_aimage.dialect.aimage import check_name
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.inventory import Component, Inventory, clean_text
from clowder_aimage.formats.prequantized import read_quantized
from clowder_aimage.formats.shard_index import build_header_files, read_file
from clowder_aimage.tensor.weight import SourceTensor, Weight

FORMAT = "safetensors"
# Layers that fit into a manifest of the size that registries accept.
_MAX_LAYERS = 8000


def take(path: Path) -> Inventory:
    """Return the model of one file.

    Raises:
        ModelError: It contains no tensors, or cannot be read.
        FormatError: It is damaged.
    """
    source = model_tree.build_source_file(None, path, path.name)
    header = read_file(path)
    tensors = SourceTensor.of(path, header)
    if not tensors:
        raise ModelError(f"{path} contains no tensors")
    # Keys of the ModelSpec of Stability AI ("modelspec" 1.0).
    stated = {
        "name": clean_text(header.metadata.get("modelspec.title")),
        "architecture": clean_text(header.metadata.get("modelspec.architecture")),
    }
    license_ = clean_text(header.metadata.get("modelspec.license"))
    properties = {key: value for key, value in stated.items() if value is not None}
    weights = _build_weights(path, tensors)
    if weights is None:
        count = sum(math.prod(tensor.shape) for tensor in tensors)
        counted = properties | {"parameters": count}
        return Inventory.of_files(FORMAT, (source,), counted, license_)
    component = Component("", "", "", weights, build_header_files("", (path,)), {})
    return Inventory("", "", (component,), (), license_, {"format": FORMAT} | properties)


def _build_weights(path: Path, tensors: Sequence[SourceTensor]) -> tuple[Weight, ...] | None:
    """Return the weights if each can be a layer, else None."""
    try:
        weights, ignored = read_quantized(path, tensors, {})
        for weight in weights:
            check_name(weight.name)
    except FormatError:
        return None
    is_plain = not ignored and all(weight.quantization is None for weight in weights)
    # In layer names a slash ends the component, and the extension marks a whole file.
    names = [weight.name for weight in weights]
    is_named = not any("/" in name or name.endswith(".safetensors") for name in names)
    return weights if is_plain and is_named and len(weights) <= _MAX_LAYERS else None
