"""ollama's tensor models: a Docker manifest with name, dtype and shape on each layer.

The format: ollama's "Image Gen Storage Format" and "Tensor Blob Format". Both generations are
read: layers of ``application/vnd.ollama.image.config`` as well as ``.json``.
"""

from __future__ import annotations

from dataclasses import replace

from clowder_aimage.dialect.aimage import AImage, Layer, check_names, from_named, to_named
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Descriptor, Manifest, mediatype, read_json
from clowder_aimage.oci.manifest import encode

# A foreign tool keeps unknown fields of a config, so the AImage config travels in one.
CARRIED_CONFIG = "vnd.clowder.aimage.config"
_OLLAMA = "application/vnd.ollama.image."
_FILES = (mediatype.OLLAMA_JSON, mediatype.OLLAMA_CONFIG)
_READ = {mediatype.OLLAMA_TENSOR: mediatype.AIMAGE_SAFETENSORS} | dict.fromkeys(
    _FILES, mediatype.AIMAGE_FILE
)
_WRITE = {
    mediatype.AIMAGE_SAFETENSORS: mediatype.OLLAMA_TENSOR,
    mediatype.AIMAGE_FILE: mediatype.OLLAMA_JSON,
}


class Ollama:
    """What ollama reads and writes. A layer of another kind keeps Clowder's media type."""

    name = "ollama"

    def matches(self, manifest: Manifest) -> bool:
        return any(layer.media_type in _READ for layer in manifest.layers)

    def read(self, manifest: Manifest, config: bytes) -> AImage:
        named = [_named(layer, i) for i, layer in enumerate(manifest.layers)]
        layers = check_names(tuple(from_named(layer, _media_type(_READ, layer)) for layer in named))
        return AImage(carried_config(config) or foreign_config(layers), layers)

    def write(self, aimage: AImage) -> tuple[Manifest, bytes]:
        config = _config(aimage)
        document = {
            "schemaVersion": 2,
            "mediaType": mediatype.DOCKER_MANIFEST,
            "config": Descriptor.of(
                mediatype.DOCKER_CONFIG, config, algorithm=aimage.algorithm
            ).to_json(),
            "layers": [
                to_named(layer, _media_type(_WRITE, layer.descriptor)) for layer in aimage.layers
            ],
        }
        return Manifest.build(document), config


def _named(layer: Descriptor, position: int) -> Descriptor:
    """ollama gives no name to the texts of a Modelfile (license, template, system ...)."""
    kind = layer.media_type.removeprefix(_OLLAMA)
    if "name" in layer.extra or layer.media_type in _READ or kind == layer.media_type:
        return layer
    return replace(layer, extra={**layer.extra, "name": f"{kind}.{position}"})


def _media_type(table: dict[str, str], descriptor: Descriptor) -> str:
    return table.get(descriptor.media_type, descriptor.media_type)


def _config(aimage: AImage) -> bytes:
    """The config as ollama shows it, with the AImage config inside, byte for byte as text."""
    properties = aimage.properties
    value = {
        "model_format": "safetensors",
        "model_family": properties.get("pipeline", ""),
        "capabilities": ["image"],
        CARRIED_CONFIG: aimage.config_text,
    }
    return encode(value)


def carried_config(config: bytes) -> bytes | None:
    """The AImage config that travels inside another tool's config, if there is one.

    Raises:
        FormatError: it cannot be one.
    """
    try:
        carried = read_json(config, "the config")[CARRIED_CONFIG]
    except (FormatError, KeyError, TypeError):
        return None
    if not isinstance(carried, str):
        return None
    try:
        return carried.encode()
    except UnicodeEncodeError:
        raise FormatError(f"{CARRIED_CONFIG} is not Unicode text") from None


def foreign_config(layers: tuple[Layer, ...]) -> bytes:
    """A config for an artifact that another tool made: only what its manifest tells."""
    components = sorted({layer.component for layer in layers if layer.is_tensor} - {""})
    return encode({"schemaVersion": 1, "components": {name: {} for name in components}})
