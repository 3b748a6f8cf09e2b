"""A lone safetensors file, such as a checkpoint: each tensor becomes a blob.

The header is a layer of its own, with which an export writes the file byte for byte. A file whose
tensors cannot be layers is packed whole: quantized ones, whose codes need a configuration, and
names that are not valid file names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from clowder_aimage.dialect.aimage import check_name
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.inventory import Component, Inventory, printable
from clowder_aimage.formats.prequantized import read_quantized
from clowder_aimage.formats.shard_index import header_files, read_file
from clowder_aimage.tensor.weight import SourceTensor, Weight

FORMAT = "safetensors"
_MOST = 8000  # layers, which fit into the manifest that registries accept


def take(path: Path) -> Inventory:
    """Return the model of one file.

    Raises:
        ModelError: It contains no tensors, or cannot be read.
        FormatError: It is damaged.
    """
    source = model_tree.source_file(None, path, path.name)
    header = read_file(path)
    tensors = SourceTensor.of(path, header)
    if not tensors:
        raise ModelError(f"{path} contains no tensors")
    stated = {
        "name": printable(header.metadata.get("modelspec.title")),
        "architecture": printable(header.metadata.get("modelspec.architecture")),
    }
    license_ = printable(header.metadata.get("modelspec.license"))
    facts = {key: value for key, value in stated.items() if value is not None}
    weights = _weights(path, tensors)
    if weights is None:
        count = sum(math.prod(tensor.shape) for tensor in tensors)
        known = facts | {"parameters": count}
        return Inventory.of_files(FORMAT, (source,), known, license_)
    component = Component("", "", "", weights, header_files("", (path,)), {})
    return Inventory("", "", (component,), (), license_, {"format": FORMAT} | facts)


def _weights(path: Path, tensors: Sequence[SourceTensor]) -> tuple[Weight, ...] | None:
    """Return the weights if each can be a layer, else None."""
    try:
        weights, ignored = read_quantized(path, tensors, {})
        for weight in weights:
            check_name(weight.name)
    except FormatError:
        return None
    is_plain = not ignored and all(weight.quantization is None for weight in weights)
    # a slash would name a component, an ending a whole file
    names = [weight.name for weight in weights]
    is_named = not any("/" in name or name.endswith(".safetensors") for name in names)
    return weights if is_plain and is_named and len(weights) <= _MOST else None
