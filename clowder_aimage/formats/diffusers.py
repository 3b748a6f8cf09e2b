"""Diffusers model directories: names, headers and configs, but no weights.

Layout of the directory: diffusers, ``DiffusionPipeline.save_pretrained``; of sharded weights:
transformers, "Sharded checkpoints".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clowder_aimage.errors import ModelError
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.inventory import Component, Inventory
from clowder_aimage.formats.prequantized import read_quantized
from clowder_aimage.formats.shard_index import read_weights

MODEL_INDEX = "model_index.json"
_WEIGHTED = ("text_encoder", "transformer", "vae")
COMPONENTS = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
_PIPELINES = {"ZImagePipeline": "z-image"}
# Files of a component that a pipeline reads, besides its weights. Other files are not the model.
_FILES = {
    "scheduler": ("scheduler_config.json",),
    "text_encoder": ("config.json", "generation_config.json"),
    "tokenizer": (
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("vocab.json", "merges.txt", "added_tokens.json"),
        *("chat_template.jinja", "chat_template.json"),
    ),
    "transformer": ("config.json",),
    "vae": ("config.json",),
}
_CLASSES = {
    "scheduler": "FlowMatchEulerDiscreteScheduler",
    "transformer": "ZImageTransformer2DModel",
    "vae": "AutoencoderKL",
}


def take_inventory(directory: Path) -> Inventory:
    """Read everything about a model directory except its weights.

    Raises:
        ModelError: The model is unsupported or incomplete, or cannot be read.
        FormatError: The quantization is unknown, or does not match the config.
    """
    index = _model_index(directory)
    pipeline = check_pipeline(index, str(directory / MODEL_INDEX))
    # a missing component is [null, null]
    if unknown := sorted(key for key in index if key not in COMPONENTS and _is_part(index[key])):
        raise ModelError(
            f"{directory / MODEL_INDEX}: unknown components: {', '.join(unknown)[:200]}",
            hint=f"the components of {pipeline} are {', '.join(COMPONENTS)}",
        )
    return Inventory(
        family=_PIPELINES[pipeline],
        pipeline=pipeline,
        components=tuple(_component(directory, name, index.get(name)) for name in COMPONENTS),
        files=(_file(directory, directory / MODEL_INDEX),),
        license=model_tree.read_license(directory),
    )


def check_pipeline(index: Mapping[str, Any], name: str) -> str:
    """Return the class of the pipeline in a model index called ``name``.

    Raises:
        ModelError: It is unsupported.
    """
    pipeline = str(index.get("_class_name", ""))
    if pipeline not in _PIPELINES:
        raise ModelError(
            f"{name}: unsupported pipeline {pipeline[:80]!r}",
            hint=f"supported: {', '.join(_PIPELINES)}",
        )
    return pipeline


def _is_part(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(isinstance(item, str) for item in value)
    )


def _model_index(directory: Path) -> Mapping[str, Any]:
    if not directory.is_dir():
        raise ModelError(
            f"{directory} is not a directory", hint="pass the directory that contains the model"
        )
    if not (directory / MODEL_INDEX).exists():
        raise ModelError(
            f"{MODEL_INDEX} not found in {directory}: not a diffusers model directory",
            hint="pass the directory that contains model_index.json, text_encoder/, transformer/, "
            "vae/, tokenizer/ and scheduler/",
        )
    model_tree.list_directory(directory, directory, model_tree.PICKLED)
    return model_tree.read_object(directory, directory / MODEL_INDEX)


def _component(root: Path, name: str, entry: object) -> Component:
    if not isinstance(entry, list) or not _is_part(entry):
        raise ModelError(f"{root / MODEL_INDEX}: the entry of the {name} is missing or invalid")
    if entry[1] != _CLASSES.get(name, entry[1]):
        raise ModelError(
            f"{root / MODEL_INDEX}: unsupported {name} {entry[1][:80]!r}",
            hint=f"expected {_CLASSES[name]}",
        )
    directory = root / name
    if not directory.is_dir():
        missing = f"the {name} is missing: {directory} is not a directory"
        raise ModelError(missing, hint=model_tree.MODEL_AGAIN)
    paths = model_tree.list_directory(root, directory, model_tree.PICKLED)
    if name == "tokenizer":
        _check_tokenizer(root, {path.name for path in paths})
    tensors = read_weights(directory, paths) if name in _WEIGHTED else ()
    file = "scheduler_config.json" if name == "scheduler" else "config.json"
    config = model_tree.read_object(root, directory / file) if name != "tokenizer" else {}
    weights, ignored = read_quantized(directory, tensors, config)
    layers = tuple(_file(root, path) for path in paths if path.name in _FILES[name])
    return Component(name, entry[0], entry[1], weights, layers, config, ignored)


def _check_tokenizer(root: Path, names: set[str]) -> None:
    directory = root / "tokenizer"
    config = directory / "tokenizer_config.json"
    configured = config.name in names and model_tree.read_object(root, config).get("chat_template")
    if not configured and not names & {"chat_template.jinja", "chat_template.json"}:
        raise ModelError(
            f"{directory} has no chat template for the prompt",
            hint="expected in chat_template.jinja or tokenizer_config.json",
        )
    if "tokenizer.json" not in names and not {"vocab.json", "merges.txt"} <= names:
        missing = f"{directory} has neither tokenizer.json nor vocab.json with merges.txt"
        raise ModelError(missing, hint=model_tree.MODEL_AGAIN)


def _file(root: Path, path: Path) -> model_tree.SourceFile:
    model_tree.check_inside(root, path)
    if path.suffix == ".json":
        model_tree.read_json(root, path)
    status = path.stat()
    name = path.relative_to(root).as_posix()
    return model_tree.SourceFile(name, path, status.st_size, status.st_mtime_ns)
