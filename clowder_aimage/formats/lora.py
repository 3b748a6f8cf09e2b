"""Adapters: a safetensors file or a PEFT directory with one, and its description.

Names, kinds and metadata of all dialects are those of ``clowder_aimage.adapter``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clowder_aimage.adapter import peft_config
from clowder_aimage.adapter.description import describe
from clowder_aimage.adapter.fit import AdapterFit, Shapes, format_base_names
from clowder_aimage.adapter.layer import read_layers
from clowder_aimage.adapter.peft_config import PeftConfig
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.file_content import identify
from clowder_aimage.formats.inventory import Inventory
from clowder_aimage.formats.shard_index import read_file
from clowder_aimage.formats.sidecar import add_sidecar, describe_adapter, read_sidecar
from clowder_aimage.oci import mediatype

CONFIG, WEIGHTS = peft_config.CONFIG, peft_config.WEIGHTS


def take(path: Path) -> Inventory:
    """Return the adapter at ``path``.

    Raises:
        ModelError: There is no adapter, or it is pickled.
        FormatError: It is damaged, or the halves of a pair do not match.
    """
    if not path.is_dir():
        config_path = path.with_name(CONFIG)
        if path.name != WEIGHTS or not config_path.is_file():
            return _take(path, {}, ())
        return _take(
            path, _read_config(model_tree.find_boundary(path.parent), config_path), (config_path,)
        )
    files = model_tree.list_directory(model_tree.find_boundary(path), path)
    weights = [file for file in files if file.suffix == ".safetensors"]
    if not weights and (pickled := [file for file in files if identify(file).is_pickled]):
        hint = "save the adapter as safetensors (PEFT: safe_serialization=True)"
        raise model_tree.build_pickle_error(pickled[0], hint)
    if len(weights) != 1:
        raise ModelError(
            f"{path} must contain one safetensors file with an adapter, not {len(weights)}",
            hint=f"pass the file itself, or keep only {WEIGHTS}",
        )
    config_files = tuple(file for file in files if file.name == CONFIG)
    config = _read_config(model_tree.find_boundary(path), path / CONFIG) if config_files else {}
    return _take(weights[0], config, config_files)


def _take(path: Path, config: Mapping[str, Any], config_files: tuple[Path, ...]) -> Inventory:
    header = read_file(path)
    adapter = describe(path, header, config)
    facts: dict[str, Any] = {
        "parameters": sum(math.prod(info.shape) for info in header.tensors.values()),
        "adapter": adapter,
        "name": adapter.get("title"),
    }
    files = [model_tree.build_source_file(None, path, path.name, mediatype.AIMAGE_LORA)]
    files += [
        model_tree.build_source_file(None, config_file, config_file.name)
        for config_file in config_files
    ]
    licence = model_tree.read_license(path.parent) if config_files else None
    return add_sidecar(Inventory.of_files("lora", files, facts, licence), path)


def read_facts(path: Path) -> dict[str, Any]:
    """Return the description of the adapter in a file, and beside it.

    Raises FormatError: It has no adapter.
    """
    return describe_adapter(describe(path, read_file(path)), read_sidecar(path).facts)


def _read_config(root: Path, path: Path) -> Mapping[str, Any]:
    value = model_tree.read_json(root, path)
    if not isinstance(value, dict):
        raise FormatError(f"{path} is not a JSON object")
    return value


def check_fit(path: Path, shapes: Shapes, base: str, config: Path | None = None) -> None:
    """Check that the adapter at ``path`` matches the tensors of the model ``base``.

    ``config`` is its ``adapter_config.json``.

    Raises:
        FormatError: A layer is missing in the model, or has another shape.
    """
    header = read_file(path)
    peft = None
    if config is not None:
        peft = PeftConfig.parse(
            _read_config(model_tree.find_boundary(config.parent), config), str(config)
        )
    tensors = {name: info.shape for name, info in header.tensors.items()}
    layers = read_layers(str(path), tensors, peft).layers
    fit = AdapterFit(str(path), base, shapes, format_base_names(header.metadata, (peft,)))
    # Matching raises on the first layer that does not fit; the matches are not needed.
    for _ in fit.match(layers):
        pass
