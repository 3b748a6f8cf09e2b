"""Docker Model Runner's models: read only.

The format: github.com/docker/model-spec, spec.md (Media Types) and config.md (Fields), both at
2df8ca095fd3, and github.com/docker/model-runner: pkg/distribution/types/config.go (1d14f67b9299;
the type ``model.file`` is newer) and pkg/distribution/builder/from_directory.go (ac57eb7ab338:
config v0.2, each file a layer with its path). The two configs differ: model-spec has architecture
and count under the format's name, model-runner beside it.

Files without a path get the names of pkg/distribution/internal/bundle/unpack.go (199337214db0),
except that the template and the projector get their usual names.
"""

from __future__ import annotations

from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.dialect.dialect import Dialect
from clowder_aimage.dialect.layer_name import UsedNames, clean_path, name_layers, number_names
from clowder_aimage.dialect.vendor import (
    FILEPATH,
    VendorFile,
    build_vendor_config,
    get_nested,
    guess_media_type,
    name_files,
    read_object,
)
from clowder_aimage.oci import Descriptor, Manifest, mediatype

# v0.1+json, v0.2+json
_CONFIG = "application/vnd.docker.ai.model.config."
_AI = "application/vnd.docker.ai."
# A config, a tokenizer ...: only its path identifies it.
_FILE = _AI + "model.file"
_PROJECTOR = VendorFile("mmproj", ".gguf", mediatype.AIMAGE_GGUF)
_VENDOR_FILES = {
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
        paths = [_find_path(layer) for layer in manifest.layers]
        files = [
            None if path else _VENDOR_FILES.get(layer.media_type)
            for path, layer in zip(paths, manifest.layers, strict=True)
        ]
        used = UsedNames(path for path in paths if path)
        names = [
            path or (name and used.add(number_names(name)))
            for path, name in zip(paths, name_files(files), strict=True)
        ]
        layers = name_layers(manifest.layers, names, _read)
        return AImage(_build_config(layers, config), layers, manifest.subject)


def _find_path(layer: Descriptor) -> str:
    """Return the file's path, or an empty string if there is none. Raises FormatError."""
    path = clean_path(layer.annotations.get(FILEPATH, ""))
    is_bare = layer.media_type.endswith(".tar") and not path.endswith(".tar")
    return f"{path}.tar" if path and is_bare else path


def _read(layer: Descriptor, name: str) -> Layer:
    file = _VENDOR_FILES.get(layer.media_type)
    media_type = (file and file.media_type) or layer.media_type
    if media_type == _FILE:
        media_type = guess_media_type(name) or mediatype.AIMAGE_FILE
    elif media_type == mediatype.AIMAGE_TRANSFORMERS:
        # An adapter's weights are safetensors, too.
        media_type = guess_media_type(name) or media_type
    return Layer(Descriptor(media_type, layer.digest, layer.size), name)


def _build_config(layers: tuple[Layer, ...], config: bytes) -> bytes:
    value = read_object(config)
    fields = get_nested(value, "config")
    sections = [get_nested(fields, word) for word in _FORMATS]

    def list_values(*keys: str) -> list[object]:
        return [get_nested(section, key) for section in (fields, *sections) for key in keys]

    return build_vendor_config(
        layers,
        {
            "name": [get_nested(section, "general.name") for section in sections],
            "format": (get_nested(fields, "format"),),
            "formatVersion": (get_nested(fields, "format_version"),),
            "architecture": list_values("architecture", "general.architecture"),
            "parameters": list_values("parameters", "parameter_count"),
            "quantization": list_values("quantization"),
            "context": (get_nested(fields, "context_size"),),
            "license": [get_nested(section, "general.license") for section in sections],
            "created": (
                get_nested(value, "descriptor", "created"),
                get_nested(value, "descriptor", "createdAt"),
            ),
        },
    )
