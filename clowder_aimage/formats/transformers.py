"""Transformers directories: config.json and weights at the top level (``save_pretrained``).

Each tensor becomes a blob, as in pipeline components, or files are stored whole. Configurations,
tokenizers, chat templates and the model's code are other files of the directory; the code is never
run. Modules of sentence-transformers (``modules.json``) keep their weights in whole files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.inventory import Component, Inventory
from clowder_aimage.formats.left_out import is_copy
from clowder_aimage.formats.prequantized import read_quantized
from clowder_aimage.formats.shard_index import read_weights
from clowder_aimage.oci import mediatype

_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"
# The pooling of embeddings in sentence-transformers.
POOLING = "1_Pooling/config.json"
# The modules of a model, and the weights of one (sentence-transformers, SentenceTransformer.py).
MODULES, MODULE_WEIGHTS, MODULE_PICKLE = "modules.json", "model.safetensors", "pytorch_model.bin"
TEXTS = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken", ".jsonl")
_MODULE = re.compile(r"[\w-][\w.-]{0,99}")
MODULE_AGAIN = "save the model again with sentence-transformers, which writes safetensors"
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "seq_length")


def take(directory: Path) -> Inventory:
    """Return the model with one layer per tensor.

    Raises:
        ModelError: It is not a complete Transformers directory, or a module is pickled.
        FormatError: A file is damaged, or its quantization is unknown.
    """
    config, paths = _read(directory)
    tensors = read_weights(directory, paths)
    weights, ignored = read_quantized(directory, tensors, config)
    properties = {"format": "transformers"} | build_facts(config)
    component = Component("", "transformers", _find_class(config), weights, (), config, ignored)
    return Inventory(
        "",
        "",
        (component,),
        tuple(_list_modules(directory)),
        model_tree.read_license(directory),
        properties,
        read=tuple(paths),
    )


def take_whole(directory: Path) -> Inventory:
    """Return the model with whole files. Raises as ``take`` does."""
    config, paths = _read(directory)
    # This also checks the shards and their index.
    tensors = read_weights(directory, paths)
    weight_files = [_build_weights(directory, path.name) for path in paths]
    count = sum(math.prod(tensor.shape) for tensor in tensors)
    files = [*weight_files, *_list_modules(directory)]
    properties = {"parameters": count} | build_facts(config)
    return Inventory.of_files("transformers", files, properties, model_tree.read_license(directory))


def build_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of the AImage config that are in ``config.json``."""
    text = config.get("text_config")
    # Multimodal models have the fields of their language model in text_config.
    inner = text if isinstance(text, dict) else {}
    context = next(
        (
            value
            for key in _CONTEXT
            for value in (config.get(key), inner.get(key))
            if type(value) is int and value > 0
        ),
        None,
    )
    stated = {"architecture": _find_class(config) or None, "context": context}
    return {key: value for key, value in stated.items() if value is not None}


def _find_class(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else ""


def _read(directory: Path) -> tuple[Mapping[str, Any], list[Path]]:
    if not directory.is_dir():
        raise ModelError(
            f"{directory} is not a directory", hint="pass the directory that contains config.json"
        )
    if not (directory / "config.json").exists():
        raise FormatError(f"config.json not found in {directory}: not a Transformers directory")
    top = model_tree.find_boundary(directory)
    paths = [
        path
        for path in model_tree.list_directory(top, directory)
        if path.name.endswith((_WEIGHTS, _INDEX))
    ]
    originals = [path for path in paths if not is_copy(path.name)]
    if any(path.name.endswith(_WEIGHTS) for path in originals):
        paths = originals
    if not any(path.name.endswith(_INDEX) for path in paths):
        # Transformers loads this one, whatever is beside it.
        paths = [path for path in paths if path.name == MODULE_WEIGHTS] or paths
    config = model_tree.read_object(directory, directory / "config.json")
    if not _find_class(config):
        raise FormatError(f"{directory / 'config.json'} has neither architectures nor model_type")
    for path in paths:
        if path.name.endswith(_INDEX):
            model_tree.read_json(top, path)
    return config, paths


def _list_modules(directory: Path) -> list[model_tree.SourceFile]:
    """Return the weights of the modules of sentence-transformers. Raises ModelError."""
    if not (directory / MODULES).is_file():
        return []
    value = model_tree.read_json(model_tree.find_boundary(directory), directory / MODULES)
    files = []
    for name in list_module_names(value):
        weights, pickle = directory / name / MODULE_WEIGHTS, directory / name / MODULE_PICKLE
        if weights.exists():
            files.append(_build_weights(directory, f"{name}/{MODULE_WEIGHTS}"))
        elif pickle.exists():
            raise model_tree.build_pickle_error(pickle, MODULE_AGAIN)
    return files


def list_module_names(modules: object) -> list[str]:
    """Return the directories of the modules in ``modules.json``, except the model's own."""
    entries = modules if isinstance(modules, list) else []
    names = [entry.get("path") for entry in entries if isinstance(entry, dict)]
    return [name for name in names if isinstance(name, str) and _MODULE.fullmatch(name)]


def _build_weights(directory: Path, name: str) -> model_tree.SourceFile:
    kind = mediatype.AIMAGE_TRANSFORMERS
    return model_tree.build_source_file(directory, directory / name, name, kind)
