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
from clowder_aimage.dialect.clowder import (
    build_layer_annotations,
    build_manifest_annotations,
    parse_layer,
)
from clowder_aimage.dialect.dialect import Dialect, build_manifest
from clowder_aimage.dialect.file_kind import select_kind
from clowder_aimage.dialect.layer_name import clean_path, name_layers
from clowder_aimage.dialect.ollama import CARRIED_CONFIG, encode_carried_config
from clowder_aimage.dialect.vendor import (
    FILEPATH,
    build_vendor_config,
    get_nested,
    guess_media_type,
    read_object,
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
        aimage_config = (
            _build_config(layers, config) if carried is None else encode_carried_config(carried)
        )
        return AImage(aimage_config, layers, manifest.subject)

    def write(self, aimage: AImage, /) -> tuple[Manifest, bytes]:
        if not aimage.layers:
            raise FormatError("a ModelPack requires at least one layer, but the AImage has none")
        annotations = build_manifest_annotations(aimage) | {CARRIED_CONFIG: aimage.config_text}
        layers, config = [_write(layer) for layer in aimage.layers], encode(_describe(aimage))
        return build_manifest(
            aimage, CONFIG, config, layers, artifact_type=MANIFEST, annotations=annotations
        )


def _name(layer: Descriptor) -> str | None:
    """Return the path of the file, with ``.tar`` for an archive. Raises FormatError."""
    if mediatype.MEDIATYPE in layer.annotations:
        return layer.annotations.get(mediatype.NAME)
    name = clean_path(layer.annotations.get(FILEPATH, ""))
    return (f"{name}.tar" if name and _parse_packing(layer.media_type) == "tar" else name) or None


def _parse_packing(media_type: str) -> str:
    """Return the packing of a layer (``raw``, ``tar`` ...); empty for foreign layers."""
    match = _LAYER.fullmatch(media_type)
    return (match[2] or "raw") if match else ""


def _read(layer: Descriptor, name: str) -> Layer:
    annotated = layer.annotations.get(mediatype.MEDIATYPE)
    media_type = _resolve_media_type(layer, name) if annotated is None else annotated
    plain = Descriptor(media_type, layer.digest, layer.size)
    return Layer(plain, name) if annotated is None else parse_layer(layer, plain, name)


def _resolve_media_type(layer: Descriptor, name: str) -> str:
    """Return Clowder's media type for a file of a known format, else the vendor's."""
    match = _LAYER.fullmatch(layer.media_type)
    if match is None or match[2] == "tar" or match[3]:
        return layer.media_type
    default = layer.media_type if match[1] == "weight" else mediatype.AIMAGE_FILE
    return _FORMS.get(match[2] or "") or guess_media_type(name) or default


def _build_config(layers: tuple[Layer, ...], config: bytes) -> bytes:
    value = read_object(config)
    about, technical = get_nested(value, "descriptor"), get_nested(value, "config")
    licenses = get_nested(about, "licenses")
    return build_vendor_config(
        layers,
        {
            "name": (get_nested(about, "name"), get_nested(about, "title")),
            "family": (get_nested(about, "family"),),
            "format": (get_nested(technical, "format"),),
            "architecture": (get_nested(technical, "architecture"),),
            "parameters": (get_nested(technical, "paramSize"),),
            "dtype": (get_nested(technical, "precision"),),
            "quantization": (get_nested(technical, "quantization"),),
            # The format does not state whether several licenses all apply or are alternatives.
            "license": licenses if isinstance(licenses, list) and len(licenses) == 1 else (),
            "source": (get_nested(about, "sourceURL"),),
            "created": (get_nested(about, "createdAt"),),
        },
    )


def _describe(aimage: AImage) -> dict[str, Any]:
    """Return the ModelPack config (docs/config.md, Properties)."""
    properties = aimage.properties
    source = _get_text(properties, "source")
    license_ = _get_text(properties, "license")
    about = {
        "createdAt": _get_text(properties, "created"),
        "family": _get_text(properties, "family"),
        "name": _get_text(properties, "name"),
        "sourceURL": source if source and source.startswith(("https://", "http://")) else None,
        "licenses": [license_] if license_ else None,
    }
    dtype = _get_text(properties, "dtype")
    technical = {
        "architecture": _get_text(properties, "architecture"),
        "format": _format(aimage),
        "paramSize": _format_param_size(properties.get("parameters")),
        "precision": _PRECISIONS.get(dtype, dtype.lower()) if dtype else None,
        "quantization": _get_text(properties, "quantization"),
    }
    diff_ids = [str(layer.descriptor.digest) for layer in aimage.layers]
    return {
        "descriptor": {key: value for key, value in about.items() if value is not None},
        "modelfs": {"type": "layers", "diffIds": diff_ids},
        "config": {key: value for key, value in technical.items() if value is not None},
    }


def _get_text(properties: Mapping[str, Any], key: str) -> str | None:
    value = properties.get(key)
    return value if isinstance(value, str) and value else None


def _format(aimage: AImage) -> str | None:
    word = _get_text(aimage.properties, "format")
    if word is None and any(layer.is_tensor for layer in aimage.layers):
        return "safetensors"
    return _FORMAT_WORDS.get(word, word) if word else None


def _format_param_size(count: object) -> str | None:
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
    annotations = {FILEPATH: _build_path(layer)} | build_layer_annotations(layer)
    value = Descriptor(_choose_media_type(layer), plain.digest, plain.size).to_json()
    return value | {"annotations": annotations | {mediatype.MEDIATYPE: plain.media_type}}


def _build_path(layer: Layer) -> str:
    """Return the path of the layer's file: tensors are complete safetensors files."""
    if _parse_packing(layer.descriptor.media_type) == "tar":
        return layer.name.removesuffix(".tar") or layer.name
    base, compression = mediatype.split_compression(layer.descriptor.media_type)
    is_tensor = base == mediatype.AIMAGE_SAFETENSORS
    ending = ".safetensors" if is_tensor and not layer.name.endswith(".safetensors") else ""
    return layer.name + ending + _ENDINGS[compression]


def _choose_media_type(layer: Layer) -> str:
    media_type = layer.descriptor.media_type
    if _parse_packing(media_type):
        return media_type
    return f"application/vnd.cncf.model.{select_kind(layer)}.v1.raw"
