"""AImages of other tools, and of whole files, described as ``create`` describes their files.

Their manifests state little: which model the files are follows from their names, and its properties
from its configs. The directory of the model becomes the top level.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage, Layer, check_names
from clowder_aimage.dialect.vendor import VendorFile, guess_media_type, name_files
from clowder_aimage.errors import FormatError, NotFoundError
from clowder_aimage.formats.diffusers import (
    FAMILIES,
    MODEL_INDEX,
    PIPELINES,
    check_pipeline,
    read_request_defaults,
)
from clowder_aimage.formats.gguf_header import read_header
from clowder_aimage.formats.transformers import build_facts
from clowder_aimage.generation.model_default import derive_defaults
from clowder_aimage.model.model_file import find_object
from clowder_aimage.oci import mediatype
from clowder_aimage.oci.manifest import encode

_DIFFUSERS, _GGUF, _TRANSFORMERS = "diffusers", "gguf", "transformers"
# Formats that are run, or of parts of a model, whatever files are beside them
_OTHER = ("onnx", "savedmodel", "torchscript", "lora", "controlnet")
_CONFIG, _SCHEDULER = "config.json", "scheduler/scheduler_config.json"
_PARTS = {"vae": "vae/config.json", "scheduler": _SCHEDULER}
_MAGIC = b"GGUF"
# Properties that follow from the files
_DERIVED = ("format", "family", "pipeline", "architecture", "context", "components", "defaults")


def arrange(files: BlobFiles, aimage: AImage) -> AImage:
    """Return an AImage with the properties of its model: itself if it states them.

    It is also returned itself if its files are no model, or if they are not in the store. Raises
    ModelError, FormatError: a config of the model is damaged.
    """
    if _is_settled(aimage):
        return aimage
    try:
        return _arrange(files, aimage)
    except NotFoundError:
        return aimage


def _is_settled(aimage: AImage) -> bool:
    properties, format_ = aimage.properties, aimage.properties.get("format")
    if properties.get("family") in FAMILIES or "adapter" in properties or format_ in _OTHER:
        return True
    # ``create`` of a later version may know another family
    if "family" in properties and properties.get("components"):
        return True
    # A component alone has an architecture
    if format_ == _DIFFUSERS and properties.keys() & {"pipeline", "architecture"}:
        return True
    ggufs = [layer for layer in aimage.layers if _is_gguf(layer)]
    if format_ == _GGUF:
        return bool(ggufs) and all(layer.name.endswith(".gguf") for layer in ggufs)
    is_whole = format_ == _TRANSFORMERS and aimage.find(_CONFIG) is not None
    return is_whole and aimage.find(MODEL_INDEX) is None


def _is_gguf(layer: Layer) -> bool:
    return layer.descriptor.media_type in (mediatype.AIMAGE_GGUF, mediatype.AIMAGE_LORA)


def _arrange(files: BlobFiles, aimage: AImage) -> AImage:
    layers = _name_files(files, [_classify(layer) for layer in aimage.layers])
    format_, directory = _find_model(layers)
    if not format_:
        return aimage
    layers = [
        replace(layer, name=layer.name.removeprefix(directory))
        if layer.name.startswith(directory)
        else layer
        for layer in layers
    ]
    arranged = AImage(aimage.config, check_names(tuple(layers)), aimage.subject)
    describe = {_DIFFUSERS: _describe_pipeline, _GGUF: _describe_gguf}.get(format_, _describe_text)
    stated = {name: value for name, value in aimage.properties.items() if name not in _DERIVED}
    config = {"schemaVersion": 1, **stated, "components": {}, **describe(files, arranged)}
    return AImage(encode(config), arranged.layers, arranged.subject)


def _classify(layer: Layer) -> Layer:
    """Return a layer with the media type of its file's format."""
    plain = layer.descriptor
    if mediatype.is_ours(plain.media_type) and plain.media_type != mediatype.AIMAGE_FILE:
        return layer
    media_type = guess_media_type(layer.name) or plain.media_type
    return replace(layer, descriptor=replace(plain, media_type=media_type))


def _name_files(files: BlobFiles, layers: Sequence[Layer]) -> list[Layer]:
    """Name layers that their manifest does not name, by their kind and number."""
    endings = (".gguf", ".safetensors")
    unnamed = [layer for layer in layers if _is_gguf(layer) and not layer.name.endswith(endings)]
    kinds = [_choose_file(files, layer) for layer in unnamed]
    names = dict(zip((layer.name for layer in unnamed), name_files(kinds), strict=True))
    return [replace(layer, name=names.get(layer.name) or layer.name) for layer in layers]


def _choose_file(files: BlobFiles, layer: Layer) -> VendorFile:
    if layer.descriptor.media_type == mediatype.AIMAGE_GGUF:
        return VendorFile("model", ".gguf", is_split=True)
    with files.open(layer.descriptor) as file:
        return VendorFile("adapter", ".gguf" if file.read(4) == _MAGIC else ".safetensors")


def _find_model(layers: Iterable[Layer]) -> tuple[str, str]:
    """Return the format of a model, and its directory with a slash; empty without a model."""
    by_directory: dict[str, set[str]] = {}
    for layer in layers:
        directory, slash, name = layer.name.rpartition("/")
        by_directory.setdefault(directory + slash, set()).add(name)
    directories = sorted(by_directory, key=lambda name: (name.count("/"), name))
    for directory in directories:
        if MODEL_INDEX in by_directory[directory]:
            return _DIFFUSERS, directory
    if any(layer.descriptor.media_type == mediatype.AIMAGE_GGUF for layer in layers):
        return _GGUF, ""
    for directory in directories:
        names = by_directory[directory]
        if _CONFIG in names and any(name.endswith(".safetensors") for name in names):
            return _TRANSFORMERS, directory
    return "", ""


def _describe_pipeline(files: BlobFiles, aimage: AImage) -> dict[str, Any]:
    index = find_object(files, aimage, MODEL_INDEX) or {}
    pipeline = check_pipeline(index, MODEL_INDEX)
    family = PIPELINES.get(pipeline)
    if family is None:
        return {"format": _DIFFUSERS, "pipeline": pipeline}
    configs = {name: find_object(files, aimage, path) or {} for name, path in _PARTS.items()}
    weighted = {layer.component for layer in aimage.layers if layer.is_tensor or layer.is_shard}
    defaults = {**read_request_defaults(family, index), **derive_defaults(family, configs)}
    stated = aimage.properties.get("defaults")
    defaults |= stated if isinstance(stated, dict) else {}
    components: dict[str, Any] = {name: {} for name in sorted(weighted - {""})}
    facts = {"family": family, "pipeline": pipeline, "components": components}
    return facts | ({"defaults": defaults} if defaults else {})


def _describe_gguf(files: BlobFiles, aimage: AImage) -> dict[str, Any]:
    kind = mediatype.AIMAGE_GGUF
    layer = next(layer for layer in aimage.layers if layer.descriptor.media_type == kind)
    with files.find_path(layer.descriptor).open("rb", buffering=1 << 16) as file:
        metadata = read_header(file, layer.descriptor.size, is_whole=True).metadata
    architecture = metadata.get("general.architecture")
    context = metadata.get(f"{architecture}.context_length")
    facts: dict[str, Any] = {"format": _GGUF}
    if isinstance(architecture, str) and architecture.isprintable():
        facts["architecture"] = architecture
    return facts | ({"context": context} if type(context) is int and context > 0 else {})


def _describe_text(files: BlobFiles, aimage: AImage) -> dict[str, Any]:
    config = find_object(files, aimage, _CONFIG)
    if config is None:
        raise FormatError(f"{_CONFIG} not found")
    return {"format": _TRANSFORMERS, **build_facts(config)}
