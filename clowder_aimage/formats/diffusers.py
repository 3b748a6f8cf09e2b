"""Diffusers model directories: names, headers and configs, no weights.

Layout of such a directory: diffusers, ``DiffusionPipeline.save_pretrained``; of sharded weights:
transformers, "Sharded checkpoints".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats.model_tree import (
    PICKLED,
    SourceFile,
    check_inside,
    check_not_pointer,
    list_directory,
)
from clowder_aimage.formats.prequantized import read_quantized
from clowder_aimage.formats.shard_index import read_weights
from clowder_aimage.tensor.weight import Weight

MODEL_INDEX = "model_index.json"
WEIGHTED = ("text_encoder", "transformer", "vae")
COMPONENTS = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
_PIPELINES = {"ZImagePipeline": "z-image"}
# What a pipeline reads of a part, beside its weights: whatever else lies around is not the model.
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
_MAX_FILE = 256 * 1024 * 1024
_MAX_CARD = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Component:
    """One part of a pipeline: its class and library, as model_index.json names them.

    A Transformers model is a single part without a name. ``ignored`` are names of tensors that are
    left out.
    """

    name: str
    library: str
    class_name: str
    weights: tuple[Weight, ...]
    files: tuple[SourceFile, ...]
    config: Mapping[str, Any]
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """All that a plan is made from.

    ``family`` and ``pipeline`` are empty for what is no diffusers directory; ``facts`` are
    properties of the AImage config that its format tells.
    """

    family: str
    pipeline: str
    components: tuple[Component, ...]
    files: tuple[SourceFile, ...]
    license: str | None
    facts: Mapping[str, Any] = field(default_factory=dict)


def take_inventory(directory: Path) -> Inventory:
    """Read everything about a model directory except its weights.

    Raises:
        ModelError: it is not a model that we pack, or not a whole and honest one, or it cannot
            be read.
        FormatError: it is quantized, and it cannot be told how, or not as its config says.
    """
    try:
        return _take_inventory(directory)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or directory}: {error.strerror}") from error


def _take_inventory(directory: Path) -> Inventory:
    index = _model_index(directory)
    pipeline = str(index.get("_class_name", ""))
    if pipeline not in _PIPELINES:
        raise ModelError(
            f"{directory / MODEL_INDEX} names the pipeline {pipeline[:80]!r}, which is not known",
            hint=f"models of {', '.join(_PIPELINES)} can be packed",
        )
    if unknown := sorted(key for key, value in index.items() if _is_unknown(key, value)):
        raise ModelError(
            f"{directory / MODEL_INDEX} names parts that are not known: {', '.join(unknown)[:200]}",
            hint=f"a {pipeline} has {', '.join(COMPONENTS)}",
        )
    return Inventory(
        family=_PIPELINES[pipeline],
        pipeline=pipeline,
        components=tuple(_component(directory, name, index.get(name)) for name in COMPONENTS),
        files=(_file(directory, MODEL_INDEX),),
        license=read_license(directory),
    )


def _is_unknown(key: str, value: object) -> bool:
    """Return whether it is a part that we would leave out.

    One that the model lacks is [null, null].
    """
    return key not in COMPONENTS and _is_part(value)


def _is_part(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(isinstance(item, str) for item in value)
    )


def _model_index(directory: Path) -> Mapping[str, Any]:
    if not directory.is_dir():
        raise ModelError(
            f"{directory} is not a directory", hint="name the directory that holds the model"
        )
    if not (directory / MODEL_INDEX).exists():
        raise ModelError(
            f"there is no {MODEL_INDEX} in {directory}: not a diffusers model directory",
            hint="name the directory that holds model_index.json, text_encoder/, transformer/, "
            "vae/, tokenizer/ and scheduler/",
        )
    list_directory(directory, directory, PICKLED)
    return read_object(directory, MODEL_INDEX)


def _component(root: Path, name: str, entry: object) -> Component:
    if not isinstance(entry, list) or not _is_part(entry):
        raise ModelError(f"{root / MODEL_INDEX} does not say what the {name} is")
    if entry[1] != _CLASSES.get(name, entry[1]):
        raise ModelError(
            f"{root / MODEL_INDEX} names the {name} {entry[1][:80]!r}, which is not known",
            hint=f"it must be a {_CLASSES[name]}",
        )
    directory = root / name
    if not directory.is_dir():
        raise ModelError(
            f"the {name} is missing: there is no directory {directory}",
            hint="download the model again, in full",
        )
    paths = list_directory(root, directory, PICKLED)
    if name == "tokenizer":
        _check_tokenizer(root, {path.name for path in paths})
    tensors = read_weights(directory, paths) if name in WEIGHTED else ()
    files = [path for path in paths if path.name in _FILES[name]]
    file = "scheduler_config.json" if name == "scheduler" else "config.json"
    config = read_object(root, f"{name}/{file}") if name != "tokenizer" else {}
    weights, ignored = read_quantized(directory, tensors, config)
    return Component(
        name,
        entry[0],
        entry[1],
        weights,
        tuple(_file(root, f"{name}/{path.name}") for path in files),
        config,
        ignored,
    )


def _check_tokenizer(root: Path, names: set[str]) -> None:
    directory = root / "tokenizer"
    configured = "tokenizer_config.json" in names and read_object(
        root, "tokenizer/tokenizer_config.json"
    ).get("chat_template")
    if not configured and not names & {"chat_template.jinja", "chat_template.json"}:
        raise ModelError(
            f"{directory} has no chat template, which the prompt is written in",
            hint="it belongs into chat_template.jinja, or into tokenizer_config.json",
        )
    if "tokenizer.json" not in names and not {"vocab.json", "merges.txt"} <= names:
        raise ModelError(
            f"{directory} has no tokenizer.json, nor vocab.json with merges.txt",
            hint="download the model again, in full",
        )


def _file(root: Path, name: str) -> SourceFile:
    path = root / name
    check_inside(root, path)
    status = path.stat()
    if path.suffix == ".json":
        _parse_json(root, name)
    return SourceFile(name, path, status.st_size, status.st_mtime_ns)


def read_object(root: Path, name: str) -> Mapping[str, Any]:
    """Return the JSON object in a file of the model directory ``root``. Raises ModelError."""
    value = _parse_json(root, name)
    if not isinstance(value, dict):
        raise ModelError(f"{root / name} is not a JSON object")
    return value


def _parse_json(root: Path, name: str) -> object:
    path = root / name
    if not path.is_file():
        raise ModelError(f"{path} is missing", hint="download the model again, in full")
    check_inside(root, path)
    if path.stat().st_size > _MAX_FILE:
        raise ModelError(f"{path} is too large for a JSON file")
    raw = path.read_bytes()
    check_not_pointer(path, raw)
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def read_license(root: Path) -> str | None:
    """Return the licence in the front matter of the model card.

    Source: Hugging Face hub, "Model Cards".
    """
    path = root / "README.md"
    if not path.is_file():
        return None
    check_inside(root, path)
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        lines = file.read(_MAX_CARD).splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:]:
        if line.strip() == "---":
            return None
        key, colon, value = line.partition(":")
        if key == "license" and colon:
            return value.partition(" #")[0].strip().strip("\"'") or None
    return None
