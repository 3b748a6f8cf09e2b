"""Adapters: a safetensors file or a PEFT directory with one, and the facts they state.

Names, kinds and metadata of all dialects are those of ``clowder_aimage.adapter``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clowder_aimage.adapter import peft_config
from clowder_aimage.adapter.description import describe
from clowder_aimage.adapter.fit import AdapterFit, Shapes, told_base
from clowder_aimage.adapter.layer import read_layers
from clowder_aimage.adapter.peft_config import PeftConfig
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.inventory import Inventory
from clowder_aimage.formats.shard_index import read_file
from clowder_aimage.oci import mediatype

CONFIG, WEIGHTS = peft_config.CONFIG, peft_config.WEIGHTS


def take(path: Path) -> Inventory:
    """Return the adapter at ``path``.

    Raises:
        ModelError: There is no adapter, or it is pickled.
        FormatError: It is damaged, or the halves of a pair do not match.
    """
    if not path.is_dir():
        beside = path.with_name(CONFIG)
        if path.name != WEIGHTS or not beside.is_file():
            return _take(path, {}, ())
        return _take(path, _config(model_tree.home(path.parent), beside), (beside,))
    files = model_tree.list_directory(model_tree.home(path), path)
    weights = [file for file in files if file.suffix == ".safetensors"]
    unsafe = [file for file in files if file.suffix.lower() in model_tree.PICKLED]
    if unsafe and not weights:
        hint = "save the adapter as safetensors (PEFT: safe_serialization=True)"
        raise model_tree.pickled(unsafe[0], hint)
    if len(weights) != 1:
        raise ModelError(
            f"{path} must contain one safetensors file with an adapter, not {len(weights)}",
            hint=f"pass the file itself, or keep only {WEIGHTS}",
        )
    others = tuple(file for file in files if file.name == CONFIG)
    config = _config(model_tree.home(path), path / CONFIG) if others else {}
    return _take(weights[0], config, others)


def _take(path: Path, config: Mapping[str, Any], others: tuple[Path, ...]) -> Inventory:
    header = read_file(path)
    adapter = describe(path, header, config)
    facts: dict[str, Any] = {
        "parameters": sum(math.prod(info.shape) for info in header.tensors.values()),
        "adapter": adapter,
        "name": adapter.get("title"),
    }
    files = [model_tree.source_file(None, path, path.name, mediatype.AIMAGE_LORA)]
    files += [model_tree.source_file(None, one, one.name) for one in others]
    licence = model_tree.read_license(path.parent) if others else None
    return Inventory.of_files("lora", files, facts, licence)


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts of the adapter in a file. Raises FormatError: it has none."""
    return describe(path, read_file(path))


def _config(root: Path, path: Path) -> Mapping[str, Any]:
    value = model_tree.read_json(root, path)
    if not isinstance(value, dict):
        raise FormatError(f"{path} is not a JSON object")
    return value


def check_fit(path: Path, shapes: Shapes, base: str, config: Path | None = None) -> None:
    """Check that the adapter at ``path`` matches the tensors of the model ``base``.

    ``config`` is its ``adapter_config.json``.

    Raises:
        FormatError: A layer is not in the model, or has another shape there.
    """
    header = read_file(path)
    peft = None
    if config is not None:
        peft = PeftConfig.parse(_config(model_tree.home(config.parent), config), str(config))
    tensors = {name: info.shape for name, info in header.tensors.items()}
    layers = read_layers(str(path), tensors, peft).layers
    fit = AdapterFit(str(path), base, shapes, told_base(header.metadata, (peft,)))
    for _ in fit.match(layers):
        pass
