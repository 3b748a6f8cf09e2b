"""Transformers directories: config.json and weights at the top level (``save_pretrained``).

Each tensor becomes a blob, as in pipeline components, or files are stored whole. Configurations,
tokenizers, chat templates and the model's code are included; the code is never run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.inventory import Component, Inventory
from clowder_aimage.formats.prequantized import read_quantized
from clowder_aimage.formats.shard_index import read_weights
from clowder_aimage.oci import mediatype

_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"
# The pooling of embeddings in sentence-transformers.
POOLING = "1_Pooling/config.json"
TEXTS = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken", ".jsonl")
_TRAINING = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")
_NOT = (*_TRAINING, "trainer_state.json", "all_results.json", "train_results.json")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "seq_length")


def take(directory: Path) -> Inventory:
    """Return the model with one layer per tensor.

    Raises:
        ModelError: It is not a complete Transformers directory, or it is pickled.
        FormatError: A file is damaged, or its quantization is unknown.
    """
    config, paths = _read(directory)
    tensors = read_weights(directory, paths)
    weights, ignored = read_quantized(directory, tensors, config)
    files = tuple(_list_files(directory, paths))
    properties = {"format": "transformers"} | build_facts(config)
    component = Component("", "transformers", _find_class(config), weights, files, config, ignored)
    return Inventory("", "", (component,), (), model_tree.read_license(directory), properties)


def take_whole(directory: Path) -> Inventory:
    """Return the model with whole files. Raises as ``take`` does."""
    config, paths = _read(directory)
    # This also checks the shards and their index.
    tensors = read_weights(directory, paths)
    weight_files = [
        model_tree.build_source_file(directory, path, path.name, mediatype.AIMAGE_TRANSFORMERS)
        for path in paths
        if path.name.endswith((_WEIGHTS, _INDEX))
    ]
    count = sum(math.prod(tensor.shape) for tensor in tensors)
    files = [*weight_files, *_list_files(directory, paths)]
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
    paths = model_tree.list_directory(top, directory, model_tree.PICKLED, _NOT)
    if weighted := sorted(directory.glob("*/*" + _WEIGHTS)):
        raise ModelError(
            f"{weighted[0]} is in a subdirectory and would be skipped",
            hint="only diffusers models may have several components; pack each component by itself",
        )
    config = model_tree.read_object(directory, directory / "config.json")
    if not _find_class(config):
        raise FormatError(f"{directory / 'config.json'} has neither architectures nor model_type")
    for path in paths:
        if path.name.endswith(_INDEX):
            model_tree.read_json(top, path)
    return config, paths


def _list_files(directory: Path, paths: list[Path]) -> list[model_tree.SourceFile]:
    files = [
        model_tree.build_source_file(directory, path, path.name)
        for path in paths
        if path.suffix in TEXTS and not path.name.endswith(_INDEX)
    ]
    pooling = directory / POOLING
    if pooling.exists():
        files.append(model_tree.build_source_file(directory, pooling, POOLING))
    return files
