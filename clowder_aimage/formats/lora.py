"""LoRA adapters: a safetensors file or a PEFT directory with one, and the facts they state.

Low-rank pairs are named ``x.lora_A.weight`` and ``x.lora_B.weight`` (PEFT, ComfyUI),
``x.lora_down.weight`` and ``x.lora_up.weight`` (diffusers, kohya) or ``x.lora.down.weight``. Rank
and targets are read from the tensors; alpha from ``x.alpha`` if all values agree, or from
``adapter_config.json`` (PEFT, "Checkpoint format"). Trigger words and weight are in the metadata:
``trigger_word``, ``trigger_words``, ``ss_tag_frequency`` (kohya), ``modelspec.trigger_phrase``
(Stability's modelspec), ``recommended_weight``, ``default_weight``.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.inventory import Inventory
from clowder_aimage.formats.model_tree import MAX_JSON
from clowder_aimage.formats.shard_index import read_file
from clowder_aimage.oci import mediatype, read_json
from clowder_aimage.tensor import Header
from clowder_aimage.tensor.weight import SourceTensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_DOWN = re.compile(r"(.+?)[._]lora(?:_A|_down|\.down|_embedding_A)(?:\.default)?(?:\.weight)?")
_UP = re.compile(r"(.+?)[._]lora(?:_B|_up|\.up|_embedding_B)(?:\.default)?(?:\.weight)?")
_ALPHA = ".alpha"
_PREFIX = re.compile(r"(?:base_model\.model\.|diffusion_model\.|model\.diffusion_model\.)")
Shapes = Mapping[str, tuple[int, ...]]  # of the model's tensors, by name
_APART = re.compile(r"[._]+")
_STACKED = "attention_qkv"
# names of the network used by kohya and ComfyUI
_NETWORKS = (
    *("lora_unet_", "lora_transformer_", "lora_te_"),
    *("transformer_", "unet_", "text_encoder_"),
)
_WORDS = 200  # words kept of ss_tag_frequency


def take(path: Path) -> Inventory:
    """Return the adapter at ``path``.

    Raises:
        ModelError: There is no adapter, or it is pickled.
        FormatError: It is damaged, or the halves of a pair do not match.
    """
    if not path.is_dir():
        return _take(path, {}, ())
    files = model_tree.list_directory(model_tree.home(path), path)
    weights = [file for file in files if file.suffix == ".safetensors"]
    unsafe = [file for file in files if file.suffix.lower() in model_tree.PICKLED]
    if unsafe and not weights:
        hint = "save the adapter as safetensors (PEFT: safe_serialization=True)"
        raise model_tree.pickled(unsafe[0], hint)
    if len(weights) != 1:
        raise ModelError(
            f"{path} must contain one safetensors file with an adapter, not {len(weights)}",
            hint=f"pass the file itself, or keep only {WEIGHTS}",
        )
    others = tuple(file for file in files if file.name == CONFIG)
    config = _config(model_tree.home(path), path / CONFIG) if others else {}
    return _take(weights[0], config, others)


def _take(path: Path, config: Mapping[str, Any], others: tuple[Path, ...]) -> Inventory:
    header = read_file(path)
    facts: dict[str, Any] = {
        "parameters": sum(math.prod(info.shape) for info in header.tensors.values()),
        "adapter": _describe(path, header, config),
        "name": _text(header.metadata.get("modelspec.title")),
    }
    files = [model_tree.source_file(None, path, path.name, mediatype.AIMAGE_LORA)]
    files += [model_tree.source_file(None, one, one.name) for one in others]
    licence = model_tree.read_license(path.parent) if others else None
    return Inventory.of_files("lora", files, facts, licence)


def read_facts(path: Path) -> dict[str, Any]:
    """Return the trigger words and the weight that a file states. Raises FormatError."""
    metadata = read_file(path).metadata
    weight = _number(metadata.get("recommended_weight"), metadata.get("default_weight"))
    return {"triggerWords": _trigger_words(metadata), "weight": weight}


def _describe(path: Path, header: Header, config: Mapping[str, Any]) -> dict[str, Any]:
    pairs = read_pairs(path, header)
    ranks = {pair.rank for pair in pairs}
    metadata = header.metadata
    facts: dict[str, Any] = {
        "type": "lora",
        "rank": max(ranks),
        "alpha": _alpha(path, header, config),
        "targets": sorted({pair.target for pair in pairs}),
        "triggerWords": _trigger_words(metadata),
        "weight": _number(metadata.get("recommended_weight"), metadata.get("default_weight")),
        "base": _text(config.get("base_model_name_or_path"))
        or _text(metadata.get("ss_base_model_version")),
    }
    return {key: value for key, value in facts.items() if value not in (None, [])}


@dataclass(frozen=True, slots=True)
class LoraPair:
    """A low-rank pair: the update of a ``rows`` by ``columns`` matrix, of rank ``rank``."""

    target: str
    rank: int
    rows: int
    columns: int


def read_pairs(path: Path, header: Header | None = None) -> list[LoraPair]:
    """Return the low-rank pairs in the file at ``path``.

    Raises:
        FormatError: One half of a pair is missing, or the halves do not match.
    """
    header = header or read_file(path)
    down = {match[1]: name for name in header.tensors if (match := _DOWN.fullmatch(name))}
    up = {match[1]: name for name in header.tensors if (match := _UP.fullmatch(name))}
    if not down:
        raise FormatError(
            f"{path} is not a LoRA: no tensor is named lora_A or lora_down",
            hint="other adapter types (LoHa, LoKr, DoRA alone) are not supported",
        )
    if odd := sorted(down.keys() ^ up.keys()):
        raise FormatError(f"{path}: {odd[0][:200]} has only one half of a low-rank pair")
    found = []
    for stem, name in sorted(down.items()):
        first, second = header.tensors[name].shape, header.tensors[up[stem]].shape
        if len(first) < 2 or len(second) < 2 or first[0] != second[1] or not first[0]:
            raise FormatError(
                f"{path}: incompatible shapes of {stem[:200]}: {list(first)} and {list(second)}"
            )
        rows, columns = second[0], first[1]
        if "lora_embedding" in name:  # an embedding table: one row per word
            rows, columns = columns, rows
        found.append(LoraPair(_PREFIX.sub("", stem), first[0], rows, columns))
    return found


def _alpha(path: Path, header: Header, config: Mapping[str, Any]) -> float | int | None:
    stated = config.get("lora_alpha")
    if isinstance(stated, int | float) and not isinstance(stated, bool):
        return stated
    found = {
        _scalar(tensor) for tensor in SourceTensor.of(path, header) if tensor.name.endswith(_ALPHA)
    }
    if len(found) != 1:
        return None
    value = found.pop()
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value


def _scalar(tensor: SourceTensor) -> float | None:
    """Return the number in a scalar tensor, or None for other tensors."""
    if math.prod(tensor.shape) != 1 or tensor.dtype not in ("F32", "F16", "BF16", "F64"):
        return None
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.nbytes)
    if tensor.dtype == "BF16":
        data = b"\0\0" + data
    code = {4: "<f", 2: "<e", 8: "<d"}[len(data)]
    return float(struct.unpack(code, data)[0])


def _trigger_words(metadata: Mapping[str, str]) -> list[str]:
    words = [_text(metadata.get("trigger_word")), _text(metadata.get("modelspec.trigger_phrase"))]
    words += [word.strip() for word in metadata.get("trigger_words", "").split(",")]
    if not any(words):
        words = _tags(metadata.get("ss_tag_frequency", ""))
    return list(dict.fromkeys(word for word in words if word))


def _tags(text: str) -> list[str | None]:
    """Return the tags shared by all pictures of a data set; kohya counts them by directory."""
    try:
        counts = read_json(text.encode(), "it", MAX_JSON) if text else {}
    except (FormatError, UnicodeEncodeError):
        return []
    found: list[str | None] = []
    for tags in counts.values() if isinstance(counts, dict) else ():
        if isinstance(tags, dict) and tags:
            numbers = {tag: n for tag, n in tags.items() if isinstance(n, int)}
            most = max(numbers.values(), default=0)
            found += [tag.strip() for tag, n in numbers.items() if n == most]
    return found[:_WORDS]


def _number(*texts: str | None) -> float | None:
    for text in texts:
        try:
            value = float(text or "")
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return None


def _text(value: object) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def _config(root: Path, path: Path) -> Mapping[str, Any]:
    value = model_tree.read_json(root, path)
    if not isinstance(value, dict):
        raise FormatError(f"{path} is not a JSON object")
    kind = value.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"{path}: unsupported adapter type {kind!r:.40}")
    return value


def check_fit(what: str, pairs: Sequence[LoraPair], shapes: Shapes, base: str) -> None:
    """Check that the pairs of the adapter ``what`` match the tensors of the model ``base``.

    Dots and underscores in names are ignored, since tools differ in them. A stacked query, key and
    value is not one tensor in a diffusers model, but three.

    Raises:
        FormatError: A pair has no tensor in the model, or does not match its shape.
    """
    known: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if name.endswith(".weight") and len(shape) >= 2:
            stem = name.removesuffix(".weight")
            known.setdefault(_plain(stem), []).append(shape)
            known.setdefault(_plain(stem.partition("/")[2] or stem), []).append(shape)
    for pair in pairs:
        expected = _find(pair.target, known)
        if not expected:
            raise FormatError(f"{what} does not match {base}, which has no {pair.target[:200]}")
        if not any(shape[0] == pair.rows and shape[1] == pair.columns for shape in expected):
            raise FormatError(
                f"{what} does not match {base}: for {pair.target[:200]} it has "
                f"{[pair.rows, pair.columns]}, the model {list(expected[0])}"
            )


def _find(target: str, known: Mapping[str, list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Return the possible shapes of a target in the model, or those of its stacked thirds."""
    name = _plain(target)
    if found := known.get(name) or known.get(f"{name}_0"):
        return found
    if not name.endswith(_STACKED):
        return []
    stem = name.removesuffix("qkv")
    thirds = [known[own][0] for letter in "qkv" if (own := f"{stem}to_{letter}") in known]
    return [(sum(third[0] for third in thirds), *thirds[0][1:])] if len(thirds) == 3 else []


def _plain(name: str) -> str:
    name = _APART.sub("_", name)
    for network in _NETWORKS:
        name = name.removeprefix(network)
    return name
