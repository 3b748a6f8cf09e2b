"""Description of an adapter from its header: type, rank, trigger words and strength.

Keys: kohya-ss (``ss_``), Stability's modelspec, ai-toolkit, the sidecars of webui.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from clowder_aimage.adapter import names
from clowder_aimage.adapter.fit import BASES
from clowder_aimage.adapter.layer import (
    DORA,
    FULL,
    LOHA,
    LOKR,
    LORA,
    TABLE,
    AdapterLayer,
    read_layers,
)
from clowder_aimage.adapter.peft_config import CONFIG, PeftConfig, parse_metadata
from clowder_aimage.adapter.target import strip_network_prefixes
from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError
from clowder_aimage.tensor import Header

# The first of an adapter's kinds is its type.
_KINDS = (DORA, LOKR, LOHA, LORA, FULL)
_PHRASES = ("trigger_word", "modelspec.trigger_phrase", "activation_text", "activation text")
_WORDS = "trigger_words"
_STRENGTHS = (
    *("recommended_weight", "preferred_weight", "default_weight", "preferred weight"),
    *("strength", "default_strength", "multiplier", "scale"),
)
_TITLES = ("modelspec.title", "ss_output_name")
_TAGS = "ss_tag_frequency"
# Words of _TAGS in a description.
_MAX_TAGS = 200
# Bytes of the tags in a header.
_MAX_JSON = 64 * 1024 * 1024
_CODES = {"F64": "<d", "F32": "<f", "F16": "<e", "BF16": "<f", "I64": "<q", "I32": "<i"}


def describe(path: Path, header: Header, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the description of the adapter at ``path``, with the keys of the config's schema.

    ``config`` is the value of peft's ``adapter_config.json``.

    Raises:
        FormatError: It is not an adapter, is incomplete, or of an unsupported kind.
    """
    label, metadata = str(path), header.metadata
    peft = PeftConfig.parse(config, f"{CONFIG} of {path}") if config else None
    shapes = {name: info.shape for name, info in header.tensors.items()}
    layers = read_layers(label, shapes, peft).layers
    configs = [*((peft,) if peft else ()), *parse_metadata(metadata, label).values()]
    kind_set = {kind for layer in layers for kind in _list_kinds(layer)}
    kinds = [kind for kind in _KINDS if kind in kind_set]
    summary = {
        "type": kinds[0],
        "types": kinds if len(kinds) > 1 else None,
        "title": _find_text(metadata, _TITLES),
        "rank": max((rank for layer in layers for rank in layer.ranks.values()), default=None),
        "alpha": _read_alpha(path, header, layers, configs),
        "targets": sorted({strip_network_prefixes(layer.stem) for layer in layers}),
        "triggerWords": _trigger_words(metadata),
        "weight": _parse_number(metadata.get(key) for key in _STRENGTHS),
        "base": (peft and peft.base) or _find_text(metadata, BASES),
    }
    return {key: value for key, value in summary.items() if value not in (None, [])}


def _list_kinds(layer: AdapterLayer) -> list[str]:
    kinds = [LORA if kind == TABLE else kind for kind in layer.kinds]
    kinds += [DORA] if layer.is_decomposed else []
    changes = {names.DIFF, names.DIFF_BIAS, names.SET, names.SET_BIAS}
    return kinds + ([FULL] if changes & layer.tensors.keys() else [])


def _read_alpha(
    path: Path, header: Header, layers: Iterable[AdapterLayer], configs: Iterable[PeftConfig]
) -> float | int | None:
    """Return the common alpha of all layers, from tensors or else a configuration, or None."""
    tensors = [layer.tensors[names.ALPHA] for layer in layers if names.ALPHA in layer.tensors]
    with path.open("rb") as file:
        alphas = {_read_scalar(file, header, name) for name in tensors}
    if not alphas:
        alphas = {next((config.alpha for config in configs if config.alpha is not None), None)}
    if len(alphas) != 1:
        return None
    value = alphas.pop()
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value


def _read_scalar(file: BinaryIO, header: Header, name: str) -> float | None:
    """Return the number in a scalar tensor; None for other tensors."""
    info = header.tensors[name]
    if math.prod(info.shape) != 1 or info.dtype not in _CODES:
        return None
    file.seek(header.data_offset + info.start)
    data = file.read(info.nbytes)
    # BF16 is the upper half of a float32.
    data = b"\0\0" + data if info.dtype == "BF16" else data
    return float(struct.unpack(_CODES[info.dtype], data)[0])


def _trigger_words(metadata: Mapping[str, str]) -> list[str]:
    words = [_strip_text(metadata.get(key)) for key in _PHRASES]
    words += [word.strip() for word in _split_words(metadata.get(_WORDS, ""))]
    if not any(words):
        words = _parse_tags(metadata.get(_TAGS, ""))
    return list(dict.fromkeys(word for word in words if word))


def _split_words(text: str) -> list[str]:
    """Return the words of a list in JSON or separated by commas."""
    if text.startswith("["):
        value = _parse_json(text)
        return [word for word in value if isinstance(word, str)] if isinstance(value, list) else []
    return text.split(",")


def _parse_tags(text: str) -> list[str | None]:
    """Return the tags common to all pictures of a data set; kohya counts them by directory."""
    counts = _parse_json(text) if text else {}
    common_tags: list[str | None] = []
    for tags in counts.values() if isinstance(counts, dict) else ():
        if isinstance(tags, dict) and tags:
            numbers = {tag: n for tag, n in tags.items() if isinstance(n, int)}
            highest = max(numbers.values(), default=0)
            common_tags += [tag.strip() for tag, n in numbers.items() if n == highest]
    return common_tags[:_MAX_TAGS]


def _parse_json(text: str) -> Any:
    try:
        return read_json(text.encode(), "it", _MAX_JSON)
    except (FormatError, UnicodeEncodeError):
        return None


def _parse_number(texts: Iterable[str | None]) -> float | None:
    for text in texts:
        try:
            value = float(text or "")
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return None


def _find_text(metadata: Mapping[str, str], keys: Iterable[str]) -> str | None:
    return next((text for key in keys if (text := _strip_text(metadata.get(key)))), None)


def _strip_text(value: object) -> str | None:
    return value.strip() or None if isinstance(value, str) else None
