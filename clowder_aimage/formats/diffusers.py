"""Diffusers model directories: names, headers and configs, but no weights.

The components of a known pipeline are checked. Any other pipeline is packed with the components
of its model index, and its files are exported byte for byte; so is a single component.

Layout of the directory: diffusers, ``DiffusionPipeline.save_pretrained``; of sharded weights:
transformers, "Sharded checkpoints".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.formats import model_tree, shard_index
from clowder_aimage.formats.file_content import identify
from clowder_aimage.formats.inventory import Component, Inventory
from clowder_aimage.formats.prequantized import read_quantized
from clowder_aimage.formats.shard_index import build_header_files, read_weights, select_variant
from clowder_aimage.formats.transformers import TEXTS
from clowder_aimage.formats.weight_file import STEMS, are_usual
from clowder_aimage.tensor.weight import Weight

MODEL_INDEX = "model_index.json"
# An optional component of a pipeline.
CONTROLNET = "controlnet"
_WEIGHTED = ("text_encoder", "transformer", "vae", CONTROLNET)
COMPONENTS = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
Z_IMAGE, FLUX2 = "z-image", "flux2"
FAMILIES = (Z_IMAGE, FLUX2)
MAIN_PIPELINES = {"ZImagePipeline": Z_IMAGE, "Flux2KleinPipeline": FLUX2}
# The pipelines that can be run, and their families.
PIPELINES = MAIN_PIPELINES | {
    "ZImageControlNetPipeline": Z_IMAGE,
    "ZImageControlNetInpaintPipeline": Z_IMAGE,
}
# Limit of reference pictures in one request of a family.
_REFERENCES = {FLUX2: 4}
_NAME = re.compile(r"[A-Za-z0-9_]{1,100}")
# Classes without weights, although they may have a config.json.
_WEIGHTLESS = re.compile(r"Tokenizer|Processor|Extractor|Scheduler")
# Files of a component that a pipeline reads, besides its weights. Other files are not packed.
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
    CONTROLNET: ("config.json",),
}
# The classes of Z-Image's components.
CLASSES = {
    "scheduler": "FlowMatchEulerDiscreteScheduler",
    "transformer": "ZImageTransformer2DModel",
    "vae": "AutoencoderKL",
    CONTROLNET: "ZImageControlNetModel",
}
_FAMILY_CLASSES = {
    Z_IMAGE: CLASSES,
    FLUX2: CLASSES | {"transformer": "Flux2Transformer2DModel", "vae": "AutoencoderKLFlux2"},
}
# A distilled model takes 4 steps without guidance; the base model has those of its card.
_FLUX2_DEFAULTS = {True: {"steps": 4}, False: {"steps": 50, "guidance": 4}}


def take_inventory(directory: Path, variant: str = "") -> Inventory:
    """Return the inventory of a model directory, with the weights of a variant.

    Raises:
        ModelError: The model is unsupported or incomplete, or cannot be read.
        FormatError: The quantization is unknown, or does not match the config.
        UsageError: A component has several variants, or none has the chosen one.
    """
    if not (directory / MODEL_INDEX).exists() and is_component(directory):
        return _take_component(directory, variant)
    index = _read_model_index(directory)
    pipeline = check_pipeline(index, str(directory / MODEL_INDEX))
    if pipeline not in PIPELINES:
        return _take_generic_pipeline(directory, pipeline, index, variant)
    family = PIPELINES[pipeline]
    classes = _FAMILY_CLASSES[family]
    has_control = family == Z_IMAGE and (CONTROLNET in index or (directory / CONTROLNET).is_dir())
    names = (*COMPONENTS, *([CONTROLNET] if has_control else []))
    # Diffusers writes [null, null] for an optional component that is missing.
    if unknown := sorted(key for key in index if key not in names and _is_entry(index[key])):
        raise ModelError(
            f"{directory / MODEL_INDEX}: unknown components: {', '.join(unknown)[:200]}",
            hint=f"the components of {pipeline} are {', '.join(COMPONENTS)}",
        )
    return Inventory(
        family=family,
        pipeline=pipeline,
        components=tuple(
            _build_component(directory, name, index.get(name), variant, classes) for name in names
        ),
        files=(build_file(directory, directory / MODEL_INDEX),),
        license=model_tree.read_license(directory),
        defaults=read_request_defaults(family, index),
    )


def find_reference_limit(properties: Mapping[str, Any]) -> int:
    """Return the limit of reference pictures in a request to a model with this config.

    It is 0 for image-to-image models, which start from one picture.
    """
    # An AImage of another tool may state the pipeline only.
    family = properties.get("family") or PIPELINES.get(str(properties.get("pipeline")))
    return _REFERENCES.get(str(family), 0)


def read_request_defaults(family: str, index: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the defaults of requests to a model with this index."""
    return _FLUX2_DEFAULTS[index.get("is_distilled") is True] if family == FLUX2 else {}


def is_component(directory: Path) -> bool:
    """Return True if a directory is a single diffusers model, such as a ``unet``."""
    weights = (path for path in directory.glob("*.safetensors") if "adapter" not in path.name)
    if not any(weights) or not (directory / "config.json").is_file():
        return False
    return bool(read_class_name(directory))


def read_class_name(directory: Path) -> str:
    """Return the class in a ``config.json``; empty if there is none."""
    config = model_tree.read_json(model_tree.find_boundary(directory), directory / "config.json")
    name = config.get("_class_name") if isinstance(config, dict) else None
    return name if isinstance(name, str) else ""


def _take_component(directory: Path, variant: str) -> Inventory:
    top = model_tree.find_boundary(directory)
    name = str(model_tree.read_object(top, directory / "config.json")["_class_name"])
    component = _build_generic_component(directory, "", ["diffusers", name], variant)
    _check_variant(directory, (component,), variant)
    return Inventory(
        family="",
        pipeline="",
        components=(component,),
        files=(),
        license=model_tree.read_license(directory),
        facts={"format": "diffusers", "architecture": name},
    )


def check_pipeline(index: Mapping[str, Any], name: str) -> str:
    """Return the class of the pipeline in a model index called ``name``.

    Raises:
        ModelError: It is missing, or is not the name of a class.
    """
    pipeline = index.get("_class_name", "")
    if not isinstance(pipeline, str) or not pipeline.isidentifier():
        raise ModelError(f"{name}: invalid pipeline class {pipeline!r:.80}")
    return pipeline


def _take_generic_pipeline(
    root: Path, pipeline: str, index: Mapping[str, Any], variant: str
) -> Inventory:
    names = sorted(name for name, entry in index.items() if _is_entry(entry))
    if not names:
        raise ModelError(f"{root / MODEL_INDEX} names no components")
    for name in names:
        if not _NAME.fullmatch(name):
            raise ModelError(f"{root / MODEL_INDEX}: invalid component name {name!r:.80}")
    components = tuple(_build_generic_component(root, name, index[name], variant) for name in names)
    _check_variant(root, components, variant)
    return Inventory(
        family="",
        pipeline=pipeline,
        components=components,
        files=(build_file(root, root / MODEL_INDEX),),
        license=model_tree.read_license(root),
        facts={"format": "diffusers"},
    )


def _check_variant(root: Path, components: Iterable[Component], variant: str) -> None:
    files = (file.path.name for component in components for file in component.files)
    if variant and not any(f".{variant}" in name for name in files):
        raise UsageError(f"no component of {root} has weights in the variant {variant!r:.80}")


def _build_generic_component(root: Path, name: str, entry: list[str], variant: str) -> Component:
    directory = _resolve_directory(root, name) if name else root
    top = model_tree.find_boundary(root)
    files_by_name = {path.name: path for path in model_tree.list_directory(top, directory)}
    paths = [
        files_by_name[file_name] for file_name in sorted(select_variant(files_by_name, variant))
    ]
    texts = [p for p in paths if p.suffix in TEXTS and ".index." not in p.name]
    files = tuple(build_file(root, path) for path in texts)
    has_config = "config.json" in files_by_name
    config = model_tree.read_object(top, directory / "config.json") if has_config else {}
    if not any(path.suffix == ".safetensors" for path in paths):
        _check_pickles(files_by_name.values())
        if has_config and not _WEIGHTLESS.search(entry[1]):
            raise ModelError(
                f"{directory} contains no weights in safetensors", hint=model_tree.MODEL_AGAIN
            )
        return Component(name, entry[0], entry[1], (), files, config)
    tensors = read_weights(directory, paths)
    try:
        weights, ignored = read_quantized(directory, tensors, config)
    except FormatError as error:
        error.remedy, error.facts["other"] = "whole_files", error.hint or model_tree.MODEL_AGAIN
        raise
    # With the headers an export writes the files byte for byte.
    if not _is_changed(weights, ignored):
        files += build_header_files(f"{name}/" if name else "", paths)
    return Component(name, entry[0], entry[1], weights, files, config, ignored)


def _check_pickles(paths: Iterable[Path]) -> None:
    """Raise ModelError: The weights of a component are pickled."""
    for path in paths:
        if identify(path).is_pickled:
            raise model_tree.build_pickle_error(path, "convert the weights to safetensors")


def _resolve_directory(root: Path, name: str) -> Path:
    directory = root / name
    if not directory.is_dir():
        missing = f"the {name} is missing: {directory} is not a directory"
        raise ModelError(missing, hint=model_tree.MODEL_AGAIN)
    return directory


def _is_entry(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(isinstance(item, str) for item in value)
    )


def _read_model_index(directory: Path) -> Mapping[str, Any]:
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
    return model_tree.read_object(directory, directory / MODEL_INDEX)


def _build_component(
    root: Path, name: str, entry: object, variant: str, classes: Mapping[str, str]
) -> Component:
    # Users copy a control network into the directory without changing model_index.json.
    if name == CONTROLNET and entry is None:
        entry = ["diffusers", classes[name]]
    if not isinstance(entry, list) or not _is_entry(entry):
        raise ModelError(f"{root / MODEL_INDEX}: the entry of the {name} is missing or invalid")
    if entry[1] != classes.get(name, entry[1]):
        raise ModelError(
            f"{root / MODEL_INDEX}: unsupported {name} {entry[1][:80]!r}",
            hint=f"expected {classes[name]}",
        )
    directory = _resolve_directory(root, name)
    paths = model_tree.list_directory(root, directory)
    if name in _WEIGHTED and not any(path.suffix == ".safetensors" for path in paths):
        _check_pickles(paths)
    if variant:
        chosen = select_variant((path.name for path in paths), variant)
        paths = [path for path in paths if path.name in chosen]
    if name == "tokenizer":
        _check_tokenizer(root, {path.name for path in paths})
    tensors = read_weights(directory, paths) if name in _WEIGHTED else ()
    file = "scheduler_config.json" if name == "scheduler" else "config.json"
    config = model_tree.read_object(root, directory / file) if name != "tokenizer" else {}
    weights, ignored = read_quantized(directory, tensors, config)
    layers = tuple(build_file(root, path) for path in paths if path.name in _FILES[name])
    is_sharded = any(shard_index.is_index(path.name) for path in paths)
    if is_sharded and not _is_changed(weights, ignored):
        # Headers are stored only for shards that an export would write differently.
        stem = STEMS.get(entry[0], STEMS["transformers"])
        layers += () if are_usual(stem, weights, paths) else build_header_files(f"{name}/", paths)
    return Component(name, entry[0], entry[1], weights, layers, config, ignored)


def _is_changed(weights: Iterable[Weight], ignored: tuple[str, ...]) -> bool:
    """Return True if an export writes other tensors than those of the files."""
    return bool(ignored) or any(weight.quantization for weight in weights)


def list_tokenizer_files(root: Path) -> tuple[model_tree.SourceFile, ...]:
    """Return the files of ``root/tokenizer`` that a pipeline reads. Raises ModelError."""
    paths = model_tree.list_directory(root, root / "tokenizer")
    _check_tokenizer(root, {path.name for path in paths})
    return tuple(build_file(root, path) for path in paths if path.name in _FILES["tokenizer"])


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


def build_file(root: Path, path: Path) -> model_tree.SourceFile:
    """Return a file of the model in ``root``; JSON is checked. Raises ModelError, FormatError."""
    top = model_tree.find_boundary(root)
    model_tree.check_inside(top, path)
    if path.suffix == ".json":
        model_tree.read_json(top, path)
    status = path.stat()
    name = path.relative_to(root).as_posix()
    return model_tree.SourceFile(name, path, status.st_size, status.st_mtime_ns)
