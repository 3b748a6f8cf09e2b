"""ollama's models: a Docker manifest, of tensors or of GGUF files.

Tensor models have name, dtype and shape on each layer. The format: ollama's "Image Gen Storage
Format" and "Tensor Blob Format". Both generations are read: layers of
``application/vnd.ollama.image.config`` as well as ``.json``.

GGUF models are only read. Their layers have no names: the media type determines their kind
(github.com/ollama/ollama, server/images.go, GetModel, at 5dbb81b72c4b), and the config describes
the model (types/model/config.go, ConfigV2, at 0abf7fac54ed). Several layers of a model are the
parts of a split file, in order.
"""

from __future__ import annotations

from dataclasses import replace

from clowder_aimage.dialect.aimage import AImage, Layer, check_names, from_named, to_named
from clowder_aimage.dialect.dialect import Dialect, build_manifest
from clowder_aimage.dialect.layer_name import name_layers
from clowder_aimage.dialect.vendor import VendorFile, build_vendor_config, name_files, read_object
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Descriptor, Manifest, mediatype, read_json
from clowder_aimage.oci.manifest import encode

# Other tools keep unknown fields of a config, so one of them contains the AImage config.
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
_VENDOR_FILES = {
    _OLLAMA + "model": VendorFile("model", ".gguf", mediatype.AIMAGE_GGUF, is_split=True),
    _OLLAMA + "draft": VendorFile("draft", ".gguf", mediatype.AIMAGE_GGUF, is_split=True),
    _OLLAMA + "projector": VendorFile("projector", ".gguf", mediatype.AIMAGE_GGUF),
    _OLLAMA + "adapter": VendorFile("adapter", ".gguf", mediatype.AIMAGE_LORA),
    _OLLAMA + "template": VendorFile("template", "", mediatype.AIMAGE_FILE),
    # A former name of the template.
    _OLLAMA + "prompt": VendorFile("prompt", "", mediatype.AIMAGE_FILE),
    _OLLAMA + "license": VendorFile("license", "", mediatype.AIMAGE_FILE),
    _OLLAMA + "params": VendorFile("params", ".json", mediatype.AIMAGE_FILE),
    _OLLAMA + "system": VendorFile("system", "", mediatype.AIMAGE_FILE),
    _OLLAMA + "messages": VendorFile("messages", ".json", mediatype.AIMAGE_FILE),
    _OLLAMA + "embed": VendorFile("embed", ".json", mediatype.AIMAGE_FILE),
}


class OllamaDialect(Dialect):
    """ollama's models, and tensor models as ollama writes them.

    A layer of another kind keeps Clowder's media type.
    """

    name = "ollama"

    def matches(self, manifest: Manifest) -> bool:
        kinds = {layer.media_type for layer in manifest.layers}
        return not kinds.isdisjoint(_READ.keys() | _VENDOR_FILES.keys()) or _is_ours(manifest)

    def read(self, manifest: Manifest, config: bytes) -> AImage:
        is_tensors = any(layer.media_type in _READ for layer in manifest.layers)
        if not is_tensors and not _is_ours(manifest):
            return _read_gguf(manifest, config)
        named_layers = [_name_text(layer, i) for i, layer in enumerate(manifest.layers)]
        layers = check_names(
            tuple(from_named(layer, _map_media_type(_READ, layer)) for layer in named_layers)
        )
        return AImage(
            find_carried_config(config) or build_foreign_config(layers), layers, manifest.subject
        )

    def write(self, aimage: AImage, /) -> tuple[Manifest, bytes]:
        config = {
            "model_format": "safetensors",
            "model_family": aimage.properties.get("pipeline", ""),
            "capabilities": ["image"],
            # The config's bytes as text: its digest must not change.
            CARRIED_CONFIG: aimage.config_text,
        }
        layers = [
            to_named(layer, _map_media_type(_WRITE, layer.descriptor)) for layer in aimage.layers
        ]
        kind, raw = mediatype.DOCKER_MANIFEST, encode(config)
        return build_manifest(aimage, mediatype.DOCKER_CONFIG, raw, layers, media_type=kind)


def _is_ours(manifest: Manifest) -> bool:
    """Return True if aimage wrote it: Docker's media type, and a name in each layer."""
    is_docker = manifest.media_type == mediatype.DOCKER_MANIFEST
    return is_docker and {"name" in layer.extra for layer in manifest.layers} == {True}


def _read_gguf(manifest: Manifest, config: bytes) -> AImage:
    """Read a GGUF model. Raises FormatError."""
    files = [_VENDOR_FILES.get(layer.media_type) for layer in manifest.layers]
    layers = name_layers(manifest.layers, name_files(files), _read_file)
    fields = read_object(config)
    vendor = build_vendor_config(
        layers,
        {
            "name": (fields.get("base_name"),),
            "format": (fields.get("model_format"),),
            "architecture": (fields.get("model_family"),),
            "parameters": (fields.get("model_type"),),
            "quantization": (fields.get("file_type"),),
            "context": (fields.get("context_length"),),
        },
    )
    return AImage(find_carried_config(config) or vendor, layers, manifest.subject)


def _read_file(layer: Descriptor, name: str) -> Layer:
    file = _VENDOR_FILES.get(layer.media_type)
    media_type = file.media_type if file else layer.media_type
    return Layer(Descriptor(media_type, layer.digest, layer.size), name)


def _name_text(layer: Descriptor, position: int) -> Descriptor:
    """Name a text of a Modelfile (license, template, system ...): ollama gives it no name."""
    kind = layer.media_type.removeprefix(_OLLAMA)
    if "name" in layer.extra or layer.media_type in _READ or kind == layer.media_type:
        return layer
    return replace(layer, extra={**layer.extra, "name": f"{kind}.{position}"})


def _map_media_type(table: dict[str, str], descriptor: Descriptor) -> str:
    return table.get(descriptor.media_type, descriptor.media_type)


def find_carried_config(config: bytes) -> bytes | None:
    """Return the AImage config embedded in another tool's config, or None. Raises FormatError."""
    try:
        carried = read_json(config, "the config")[CARRIED_CONFIG]
    except (FormatError, KeyError, TypeError):
        return None
    return encode_carried_config(carried) if isinstance(carried, str) else None


def encode_carried_config(text: str) -> bytes:
    """Encode an embedded AImage config. Raises FormatError."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise FormatError(f"{CARRIED_CONFIG} is not Unicode text") from None


def build_foreign_config(layers: tuple[Layer, ...]) -> bytes:
    """Return a config for an artifact of another tool, from its layers."""
    components = sorted({layer.component for layer in layers if layer.is_tensor} - {""})
    return encode({"schemaVersion": 1, "components": {name: {} for name in components}})
