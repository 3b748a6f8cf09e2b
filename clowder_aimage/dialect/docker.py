"""Docker Model Runner's models: read only.

The format: github.com/docker/model-spec, spec.md (Media Types) and config.md (Fields), both at
2df8ca095fd3, and github.com/docker/model-runner: pkg/distribution/types/config.go (1d14f67b9299;
the type ``model.file`` is newer) and pkg/distribution/builder/from_directory.go (ac57eb7ab338:
config v0.2, each file a layer with its path). The two configs differ: model-spec has architecture
and count under the format's name, model-runner beside it.

Files without a path get the names of pkg/distribution/internal/bundle/unpack.go (199337214db0),
except the template and the projector, which get their usual names.
"""

from __future__ import annotations

from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.dialect.dialect import Dialect
from clowder_aimage.dialect.layer_name import UsedNames, clean_path, name_layers, numbered
from clowder_aimage.dialect.vendor import (
    FILEPATH,
    VendorFile,
    at,
    part_names,
    read_object,
    type_of_file,
    vendor_config,
)
from clowder_aimage.oci import Descriptor, Manifest, mediatype

_CONFIG = "application/vnd.docker.ai.model.config."  # v0.1+json, v0.2+json
_AI = "application/vnd.docker.ai."
_FILE = _AI + "model.file"  # a config, a tokenizer ...: only its path identifies it
_PROJECTOR = VendorFile("mmproj", ".gguf", mediatype.AIMAGE_GGUF)
_PARTS = {
    _AI + "gguf.v3": VendorFile("model", ".gguf", mediatype.AIMAGE_GGUF, is_split=True),
    _AI + "gguf.v3.lora": VendorFile("adapter", ".gguf", mediatype.AIMAGE_LORA),
    _AI + "gguf.v3.mmproj": _PROJECTOR,
    _AI + "mmproj": _PROJECTOR,
    _AI + "safetensors": VendorFile(
        "model", ".safetensors", mediatype.AIMAGE_TRANSFORMERS, is_split=True
    ),
    _AI + "license": VendorFile("LICENSE", "", mediatype.AIMAGE_FILE),
    _AI + "chat.template.jinja": VendorFile("chat_template", ".jinja", mediatype.AIMAGE_FILE),
    _AI + "dduf": VendorFile("model", ".dduf"),
    _AI + "vllm.config.tar": VendorFile("config", ".tar"),
    _AI + "dir.tar": VendorFile("directory", ".tar"),
}
_FORMATS = ("gguf", "safetensors", "diffusers")


class DockerDialect(Dialect):
    """A GGUF or safetensors model with one file a layer."""

    name = "docker"
    product = "Docker Model Runner"

    def matches(self, manifest: Manifest) -> bool:
        return manifest.config.media_type.startswith(_CONFIG)

    def read(self, manifest: Manifest, config: bytes) -> AImage:
        paths = [_path(layer) for layer in manifest.layers]
        parts = [
            None if path else _PARTS.get(layer.media_type)
            for path, layer in zip(paths, manifest.layers, strict=True)
        ]
        taken = UsedNames(path for path in paths if path)
        known = [
            path or (name and taken.add(numbered(name)))
            for path, name in zip(paths, part_names(parts), strict=True)
        ]
        layers = name_layers(manifest.layers, known, _read)
        return AImage(_config_of(layers, config), layers, manifest.subject)


def _path(layer: Descriptor) -> str:
    """Return the file's path, or an empty string if there is none. Raises FormatError."""
    path = clean_path(layer.annotations.get(FILEPATH, ""))
    is_bare = layer.media_type.endswith(".tar") and not path.endswith(".tar")
    return f"{path}.tar" if path and is_bare else path


def _read(layer: Descriptor, name: str) -> Layer:
    part = _PARTS.get(layer.media_type)
    media_type = (part and part.media_type) or layer.media_type
    if media_type == _FILE:
        media_type = type_of_file(name) or mediatype.AIMAGE_FILE
    elif media_type == mediatype.AIMAGE_TRANSFORMERS:
        media_type = type_of_file(name) or media_type  # an adapter's weights are safetensors, too
    return Layer(Descriptor(media_type, layer.digest, layer.size), name)


def _config_of(layers: tuple[Layer, ...], config: bytes) -> bytes:
    value = read_object(config)
    fields = at(value, "config")
    below = [at(fields, word) for word in _FORMATS]

    def everywhere(*keys: str) -> list[object]:
        return [at(place, key) for place in (fields, *below) for key in keys]

    return vendor_config(
        layers,
        {
            "name": [at(place, "general.name") for place in below],
            "format": (at(fields, "format"),),
            "formatVersion": (at(fields, "format_version"),),
            "architecture": everywhere("architecture", "general.architecture"),
            "parameters": everywhere("parameters", "parameter_count"),
            "quantization": everywhere("quantization"),
            "context": (at(fields, "context_size"),),
            "license": [at(place, "general.license") for place in below],
            "created": (at(value, "descriptor", "created"), at(value, "descriptor", "createdAt")),
        },
    )
