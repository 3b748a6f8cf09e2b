"""CNCF ModelPack, the common form of several vendors: read, and written on request.

The format: github.com/modelpack/model-spec, docs/spec.md (OCI Image Manifest Specification For
Model Artifacts), docs/config.md, docs/annotations.md, and in code specs-go/v1/mediatype.go
(158c46c73bd8), annotations.go (27666dd23073) and config.go. Before the CNCF adopted it, media types
began with ``application/vnd.cnai.`` (docs/spec.md at f66a5c197a91); these are also read.

Its config allows no other properties (schema/config-schema.json at 11571da63d78), so the AImage
config is in an annotation of the manifest, and the AImage's layer fields are layer annotations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.dialect.clowder import annotated_layer, layer_annotations, manifest_annotations
from clowder_aimage.dialect.dialect import Dialect, build_manifest
from clowder_aimage.dialect.layer_name import clean_path, name_layers
from clowder_aimage.dialect.ollama import CARRIED_CONFIG, carried_text
from clowder_aimage.dialect.vendor import (
    FILEPATH,
    FORMATS,
    at,
    read_object,
    type_of_file,
    vendor_config,
)
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Descriptor, Manifest, mediatype
from clowder_aimage.oci.manifest import encode

MANIFEST = "application/vnd.cncf.model.manifest.v1+json"
CONFIG = "application/vnd.cncf.model.config.v1+json"
_EARLIER = (
    "application/vnd.cnai.model.manifest.v1+json",
    "application/vnd.cnai.model.config.v1+json",
)
# The forms gguf and safetensors are Docker Model Runner's (pkg/distribution/modelpack/types.go).
_LAYER = re.compile(
    r"application/vnd\.(?:cncf|cnai)\.model\.(weight|weight\.config|doc|code|dataset)\.v1"
    r"(?:\.(raw|tar|gguf|safetensors))?(?:\+(gzip|zstd))?"
)
_FORMS = {"gguf": mediatype.AIMAGE_GGUF, "safetensors": mediatype.AIMAGE_TRANSFORMERS}
_WEIGHTS = {
    *FORMATS,
    mediatype.AIMAGE_SAFETENSORS,
    mediatype.AIMAGE_TORCHSCRIPT,
    mediatype.AIMAGE_SAVEDMODEL,
}
_TEXTS = (".json", ".txt", ".jinja")
_DOCS = ("readme", "license", "licence", "notice", "copying")
_CODE = (".py", ".sh", ".ipynb")
_ENDINGS = {"": "", "gzip": ".gz", "zstd": ".zst"}
_PRECISIONS = {"F16": "fp16", "F32": "fp32", "F64": "fp64"}
_FORMAT_WORDS = {"transformers": "safetensors", "lora": "safetensors", "savedmodel": "tensorflow"}
_SCALES = ((10**15, "Q"), (10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


class ModelPackDialect(Dialect):
    """A ModelPack; a layer of one file is written raw, under the path of the file."""

    name = "modelpack"

    def matches(self, manifest: Manifest) -> bool:
        kinds = (manifest.artifact_type, manifest.config.media_type)
        return any(kind in (MANIFEST, CONFIG, *_EARLIER) for kind in kinds)

    def read(self, manifest: Manifest, config: bytes) -> AImage:
        layers = name_layers(manifest.layers, list(map(_name, manifest.layers)), _read)
        carried = manifest.annotations.get(CARRIED_CONFIG)
        aimage_config = _config(layers, config) if carried is None else carried_text(carried)
        return AImage(aimage_config, layers, manifest.subject)

    def write(self, aimage: AImage, /) -> tuple[Manifest, bytes]:
        if not aimage.layers:
            raise FormatError("a ModelPack requires at least one layer, but the AImage has none")
        annotations = manifest_annotations(aimage) | {CARRIED_CONFIG: aimage.config_text}
        layers, config = [_write(layer) for layer in aimage.layers], encode(_describe(aimage))
        return build_manifest(
            aimage, CONFIG, config, layers, artifact_type=MANIFEST, annotations=annotations
        )


def _name(layer: Descriptor) -> str | None:
    """Return the path of the file, with ``.tar`` for an archive. Raises FormatError."""
    if mediatype.MEDIATYPE in layer.annotations:
        return layer.annotations.get(mediatype.NAME)
    name = clean_path(layer.annotations.get(FILEPATH, ""))
    return (f"{name}.tar" if name and _form(layer.media_type) == "tar" else name) or None


def _form(media_type: str) -> str:
    """Return the packing of a layer (``raw``, ``tar`` ...); empty for foreign layers."""
    match = _LAYER.fullmatch(media_type)
    return (match[2] or "raw") if match else ""


def _read(layer: Descriptor, name: str) -> Layer:
    annotated = layer.annotations.get(mediatype.MEDIATYPE)
    media_type = _media_type(layer, name) if annotated is None else annotated
    plain = Descriptor(media_type, layer.digest, layer.size)
    return Layer(plain, name) if annotated is None else annotated_layer(layer, plain, name)


def _media_type(layer: Descriptor, name: str) -> str:
    """Return Clowder's media type for a file of a known format, else the vendor's."""
    match = _LAYER.fullmatch(layer.media_type)
    if match is None or match[2] == "tar" or match[3]:
        return layer.media_type
    default = layer.media_type if match[1] == "weight" else mediatype.AIMAGE_FILE
    return _FORMS.get(match[2] or "") or type_of_file(name) or default


def _config(layers: tuple[Layer, ...], config: bytes) -> bytes:
    value = read_object(config)
    about, technical = at(value, "descriptor"), at(value, "config")
    licenses = at(about, "licenses")
    return vendor_config(
        layers,
        {
            "name": (at(about, "name"), at(about, "title")),
            "family": (at(about, "family"),),
            "format": (at(technical, "format"),),
            "architecture": (at(technical, "architecture"),),
            "parameters": (at(technical, "paramSize"),),
            "dtype": (at(technical, "precision"),),
            "quantization": (at(technical, "quantization"),),
            # The format does not state whether several licenses all apply or are alternatives.
            "license": licenses if isinstance(licenses, list) and len(licenses) == 1 else (),
            "source": (at(about, "sourceURL"),),
            "created": (at(about, "createdAt"),),
        },
    )


def _describe(aimage: AImage) -> dict[str, Any]:
    """Return the ModelPack config (docs/config.md, Properties)."""
    properties = aimage.properties
    source = _text(properties, "source")
    license_ = _text(properties, "license")
    about = {
        "createdAt": _text(properties, "created"),
        "family": _text(properties, "family"),
        "name": _text(properties, "name"),
        "sourceURL": source if source and source.startswith(("https://", "http://")) else None,
        "licenses": [license_] if license_ else None,
    }
    dtype = _text(properties, "dtype")
    technical = {
        "architecture": _text(properties, "architecture"),
        "format": _format(aimage),
        "paramSize": _param_size(properties.get("parameters")),
        "precision": _PRECISIONS.get(dtype, dtype.lower()) if dtype else None,
        "quantization": _text(properties, "quantization"),
    }
    diff_ids = [str(layer.descriptor.digest) for layer in aimage.layers]
    return {
        "descriptor": {key: value for key, value in about.items() if value is not None},
        "modelfs": {"type": "layers", "diffIds": diff_ids},
        "config": {key: value for key, value in technical.items() if value is not None},
    }


def _text(properties: Mapping[str, Any], key: str) -> str | None:
    value = properties.get(key)
    return value if isinstance(value, str) and value else None


def _format(aimage: AImage) -> str | None:
    word = _text(aimage.properties, "format")
    if word is None and any(layer.is_tensor for layer in aimage.layers):
        return "safetensors"
    return _FORMAT_WORDS.get(word, word) if word else None


def _param_size(count: object) -> str | None:
    """Return ``6.7B``: a count with at most one decimal, and the letter of its scale."""
    if type(count) is not int:
        return None
    for scale, letter in _SCALES:
        if count >= scale * 0.9995 or letter == "K":
            tenths = (count * 10 + scale // 2) // scale
            text = f"{tenths // 10}.{tenths % 10}".removesuffix(".0")
            return f"{text}{letter}" if tenths > 0 else None
    return None


def _write(layer: Layer) -> dict[str, Any]:
    plain = layer.descriptor
    annotations = {FILEPATH: _path(layer)} | layer_annotations(layer)
    value = Descriptor(_type_to_write(layer), plain.digest, plain.size).to_json()
    return value | {"annotations": annotations | {mediatype.MEDIATYPE: plain.media_type}}


def _path(layer: Layer) -> str:
    """Return the path of the layer's file: tensors are complete safetensors files."""
    if _form(layer.descriptor.media_type) == "tar":
        return layer.name.removesuffix(".tar") or layer.name
    base, compression = mediatype.split_compression(layer.descriptor.media_type)
    is_tensor = base == mediatype.AIMAGE_SAFETENSORS
    ending = ".safetensors" if is_tensor and not layer.name.endswith(".safetensors") else ""
    return layer.name + ending + _ENDINGS[compression]


def _type_to_write(layer: Layer) -> str:
    media_type = layer.descriptor.media_type
    if _form(media_type):
        return media_type
    base, _ = mediatype.split_compression(media_type)
    file_name = layer.name.rpartition("/")[2].lower()
    if base in _WEIGHTS and not file_name.endswith(_TEXTS):
        kind = "weight"
    elif file_name.startswith(_DOCS) or file_name.endswith(".md"):
        kind = "doc"
    else:
        kind = "code" if file_name.endswith(_CODE) else "weight.config"
    return f"application/vnd.cncf.model.{kind}.v1.raw"
