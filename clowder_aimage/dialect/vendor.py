"""Common parts of other vendors' dialects: names of files, their media types, the AImage config.

A vendor's config is read leniently: a value of another type, or one that is invalid in the AImage
config's schema, is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from clowder_aimage.dialect.aimage import Layer
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import mediatype, read_json
from clowder_aimage.oci.manifest import encode

# modelpack/model-spec, docs/annotations.md, Layer Annotation Keys; Docker writes it, too.
FILEPATH = "org.cncf.model.filepath"

_SUFFIXES = {
    ".gguf": mediatype.AIMAGE_GGUF,
    ".onnx": mediatype.AIMAGE_ONNX,
    ".safetensors": mediatype.AIMAGE_TRANSFORMERS,
    ".safetensors.index.json": mediatype.AIMAGE_TRANSFORMERS,
}
# Of a pipeline of diffusers.
MODEL_INDEX = "model_index.json"
# The names of PEFT and diffusers.
_ADAPTERS = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
FORMATS = {
    mediatype.AIMAGE_GGUF: "gguf",
    mediatype.AIMAGE_TRANSFORMERS: "transformers",
    mediatype.AIMAGE_ONNX: "onnx",
    mediatype.AIMAGE_LORA: "lora",
}
# The largest integer that all JSON readers agree on (RFC 7493).
_MAX_COUNT = (1 << 53) - 1
_COUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmbtq]?)", re.IGNORECASE)
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12, "q": 10**15}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)
_PRECISIONS = {
    **dict.fromkeys(("bf16", "bfloat16"), "BF16"),
    **dict.fromkeys(("f16", "fp16", "float16"), "F16"),
    **dict.fromkeys(("f32", "fp32", "float32"), "F32"),
}


class VendorFile(NamedTuple):
    """The name for layers of a kind.

    The n-th is numbered, or all are if they are parts of one file (``is_split``). Without a media
    type they keep the vendor's.
    """

    stem: str
    suffix: str
    media_type: str = ""
    is_split: bool = False


def name_files(files: Sequence[VendorFile | None]) -> list[str | None]:
    """Return names for layers of these kinds, in order: ``license``, ``license-2``.

    Parts are named ``model-00001-of-00003.gguf``, as in llama.cpp and Hugging Face.
    """
    total, counts = Counter(files), Counter[VendorFile | None]()
    names: list[str | None] = []
    for file in files:
        counts[file] += 1
        number = counts[file]
        if file is None:
            names.append(None)
        elif file.is_split and total[file] > 1:
            names.append(f"{file.stem}-{number:05}-of-{total[file]:05}{file.suffix}")
        else:
            names.append(f"{file.stem}{f'-{number}' if number > 1 else ''}{file.suffix}")
    return names


def guess_media_type(name: str) -> str | None:
    """Return Clowder's media type for a file of a known format, by its name."""
    file_name = name.rpartition("/")[2].lower()
    if file_name in _ADAPTERS:
        return mediatype.AIMAGE_LORA
    return next(
        (media_type for suffix, media_type in _SUFFIXES.items() if file_name.endswith(suffix)), None
    )


def read_object(config: bytes) -> Mapping[str, Any]:
    """Return a vendor's config, empty if it is not a JSON object: it is not essential."""
    try:
        value = read_json(config, "the config")
    except FormatError:
        return {}
    return value if isinstance(value, dict) else {}


def get_nested(value: object, *keys: str) -> Any:
    """Return the nested value of ``value`` at ``keys``, or None."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def build_vendor_config(
    layers: Sequence[Layer], candidates: Mapping[str, Sequence[object]]
) -> bytes:
    """Return an AImage config (schemas/aimage-config.schema.json) from layers and ``candidates``.

    The first valid candidate of each property is used.
    """
    properties: dict[str, Any] = {"schemaVersion": 1}
    for key, parse in _PROPERTIES.items():
        values = (parse(candidate) for candidate in candidates.get(key, ()))
        value = next((value for value in values if value is not None), None)
        if key == "format":
            value = _find_format(layers) or value
        if value is not None:
            properties[key] = value
    properties["size"] = sum(layer.descriptor.size for layer in layers)
    return encode(properties | {"components": {}})


def read_count(candidate: object) -> int | None:
    """Parse a number of parameters: an integer, or text such as ``8B`` or ``361.82 M``."""
    if type(candidate) is int:
        return candidate if 0 <= candidate <= _MAX_COUNT else None
    match = _COUNT.fullmatch(candidate.strip()) if isinstance(candidate, str) else None
    if match is None or ("." in match[1] and not match[2]):
        return None
    # Imported late: it takes a tenth of the time of a listing.
    from decimal import Decimal

    count = int(Decimal(match[1]) * _SCALES[match[2].lower()])
    return count if count <= _MAX_COUNT else None


def _find_format(layers: Sequence[Layer]) -> str | None:
    """Return the format of the layers in Clowder's words: vendors use different names."""
    if any(layer.name.rpartition("/")[2] == MODEL_INDEX for layer in layers):
        return "diffusers"
    formats = {FORMATS.get(layer.descriptor.media_type) for layer in layers}
    return next((word for word in FORMATS.values() if word in formats), None)


def _parse_text(candidate: object) -> str | None:
    text = candidate.strip() if isinstance(candidate, str) else ""
    return text if text and len(text) <= 1024 and text.isprintable() else None


def _parse_word(candidate: object) -> str | None:
    text = (_parse_text(candidate) or "").lower()
    return text if re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", text) else None


def _parse_context(candidate: object) -> int | None:
    return candidate if type(candidate) is int and 1 <= candidate <= _MAX_COUNT else None


def _parse_dtype(candidate: object) -> str | None:
    return _PRECISIONS.get(candidate.lower()) if isinstance(candidate, str) else None


def _parse_time(candidate: object) -> str | None:
    return candidate if isinstance(candidate, str) and _TIME.fullmatch(candidate) else None


_PROPERTIES: dict[str, Callable[[object], Any]] = {
    "name": _parse_text,
    "family": _parse_word,
    "format": _parse_word,
    "formatVersion": _parse_text,
    "architecture": _parse_text,
    "parameters": read_count,
    "dtype": _parse_dtype,
    "quantization": _parse_text,
    "context": _parse_context,
    "license": _parse_text,
    "source": _parse_text,
    "created": _parse_time,
}
