"""Adapters in the names of another tool: the same values, in the types that they were stored in.

Alpha, divided by the rank, is the scale in every dialect; where a tool folds the root of the rank
into it (rsLoRA), it is multiplied out. Names: diffusers' and peft's ``save_pretrained``, ComfyUI's
``comfy/lora.py``, kohya-ss ``networks/lora.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from clowder_aimage.adapter.file import OpenAdapter, open_adapter
from clowder_aimage.adapter.fit import Shapes
from clowder_aimage.adapter.layer import LOKR, LORA, AdapterLayer
from clowder_aimage.adapter.names import (
    DIFF,
    DIFF_BIAS,
    DORA_SCALE,
    DOWN,
    HADA,
    KRON,
    MAGNITUDE,
    ROWS,
    SET,
    SET_BIAS,
    TABLE_DOWN,
    TABLE_UP,
    UP,
    UP_BIAS,
)
from clowder_aimage.adapter.outline import NAME, outline_shapes
from clowder_aimage.adapter.peft_config import METADATA
from clowder_aimage.adapter.reader import MatchedAdapter, match_adapter
from clowder_aimage.adapter.target import LayerTarget
from clowder_aimage.adapter.values import StoredArray
from clowder_aimage.errors import UsageError
from clowder_aimage.family.image_family import exchanges_halves, original_module
from clowder_aimage.tensor import encode_header

_KINDS = {
    MAGNITUDE: "DoRA of peft, with norms of the changed weights",
    DORA_SCALE: "DoRA of kohya-ss, with norms of the weights",
    DIFF: "whole differences",
    DIFF_BIAS: "changes of biases without matrices",
    SET: "whole weights",
    SET_BIAS: "whole biases",
    TABLE_DOWN: "changes of embeddings",
    TABLE_UP: "changes of embeddings",
    UP_BIAS: "biases of low-rank pairs",
    **dict.fromkeys(HADA, "LoHa"),
    **dict.fromkeys(KRON, "LoKr"),
}

_TEXT = "text_encoder"
_PAIR = (DOWN, UP)
_THIRDS = "qkv"
_THIRD = re.compile(r"(?P<block>.+)\.(?:to_|(?P<added>add_))(?P<letter>[qkv])(?(added)_proj)")
_ORDER = (*_PAIR, *_KINDS)
_STALE = (METADATA, "sshs_model_hash", "sshs_legacy_hash")
_PEFT_PARTS = {
    DOWN: "lora_A.weight",
    UP: "lora_B.weight",
    UP_BIAS: "lora_B.bias",
}
_KOHYA_PARTS = {
    DOWN: "lora_down.weight",
    UP: "lora_up.weight",
    **{part: part for part in (*HADA, *KRON, DIFF, DIFF_BIAS, SET, DORA_SCALE)},
}


@dataclass(frozen=True, slots=True)
class ConvertedAdapter:
    """An adapter to write: tensors by name, the metadata of the header, and peft's configuration.

    With a configuration it is a directory: ``adapter_config.json``, ``adapter_model.safetensors``.
    """

    tensors: Mapping[str, StoredArray]
    metadata: Mapping[str, str]
    config: Mapping[str, Any] | None = None

    def encode(self) -> Iterator[bytes]:
        """Yield the bytes of the safetensors file."""
        entries = [(name, one.dtype, one.codes.shape) for name, one in self.tensors.items()]
        yield encode_header(entries, self.metadata)
        yield from (one.codes.tobytes() for one in self.tensors.values())


@dataclass(frozen=True, slots=True)
class _Piece:
    """The stored parts for one layer, and alpha and rank of its matrices."""

    component: str
    module: str
    parts: Mapping[str, StoredArray]
    scaling: tuple[float, int] | None

    @property
    def scale(self) -> float:
        return 1.0 if self.scaling is None else self.scaling[0] / self.scaling[1]


@dataclass(frozen=True, slots=True)
class _Dialect:
    """Names of layers and parts; ``parts`` are all that the tool reads."""

    name: str
    stem: Callable[[str, str], str]
    parts: Mapping[str, str]
    components: tuple[str, ...]
    is_fused: bool


def convert_adapter(
    path: Path,
    dialect: str,
    *,
    what: str,
    shapes: Shapes | None = None,
    config: Mapping[str, Any] | None = None,
) -> ConvertedAdapter:
    """Return the adapter at ``path`` in a dialect of DIALECTS.

    Args:
        path: A safetensors file, or a directory of peft.
        dialect: ``diffusers`` and ``peft`` have a layer each for query, key and value; ``comfyui``
            and ``kohya`` stack them where they can be stacked.
        what: The adapter's name in messages.
        shapes: The tensors of its base; without them, the layers are those of Z-Image by name.
        config: The adapter's ``adapter_config.json``, if it is not beside the file.

    Raises:
        UsageError: There is no such dialect, or it has no names for a part of the adapter.
        FormatError: As ``read_adapter`` does.
        OSError: It cannot be read.
    """
    chosen = DIALECTS.get(dialect)
    if chosen is None:
        raise UsageError(f"unknown dialect of adapters: {dialect[:60]!r}", hint=_CHOICES)
    with open_adapter(path, what, config) as source:
        known = outline_shapes(source.found.layers) if shapes is None else shapes
        source.check_size(known)
        matched = match_adapter(source, known, NAME)
        matched.read()  # for its checks of values
        pieces = [
            piece
            for layer, target in matched.pairs
            for piece in _pieces(matched, layer, target, chosen)
        ]
        if chosen.is_fused:
            pieces = list(_stacked(pieces, known))
        return _written(source, pieces, chosen, known)


# -- values


def _pieces(
    matched: MatchedAdapter, layer: AdapterLayer, target: LayerTarget, dialect: _Dialect
) -> Iterator[_Piece]:
    """Yield the parts of a layer, for each of its tensors where the dialect keeps them apart."""
    what, stored = matched.source.what, matched.source.values.stored
    if len(layer.kinds) > 1:
        _refuse(what, dialect, f"{' and '.join(layer.kinds)} for one layer ({target.module})")
    parts = {
        part: stored(name, layer.shapes[part])
        for part, name in layer.parts.items()
        if part in _ORDER
    }
    if DORA_SCALE in parts and parts[DORA_SCALE].codes.ndim == 1:
        parts[DORA_SCALE] = StoredArray(parts[DORA_SCALE].dtype, parts[DORA_SCALE].codes[:, None])
    if target.is_exchanged != (dialect.is_fused and exchanges_halves(target.module)):
        parts |= _exchanged(what, dialect, parts)
    scaling = matched.scaling(layer, (*layer.kinds, LORA)[0], target)
    if LOKR in layer.kinds and scaling is not None:
        scale, rank = scaling[0] / scaling[1], layer.ranks.get(LOKR)
        scaling = None if rank is None else (scale * rank, rank)
        if scaling is None and scale != 1:  # of peft, which scales whole factors
            parts[KRON[0]] = parts[KRON[0]].times(scale)
    whole = _Piece(target.component, target.module, parts, scaling)
    if len(target.parts) == 1 or dialect.is_fused:
        yield whole
        return
    if LOKR in layer.kinds:
        _refuse(what, dialect, "LoKr of stacked layers, which has no products for each of them")
    for rows in target.parts:
        own = {
            part: one[rows.start : rows.stop] if part in ROWS else one
            for part, one in parts.items()
        }
        module = rows.tensor.partition("/")[2].removesuffix(".weight")
        yield _without_zeros(replace(whole, module=module, parts=own))


def _exchanged(
    what: str, dialect: _Dialect, parts: Mapping[str, StoredArray]
) -> dict[str, StoredArray]:
    """Return the parts that have rows, their halves exchanged. Raises UsageError."""
    found = {part: parts[part] for part in ROWS if part in parts}
    if DORA_SCALE in found and len(found[DORA_SCALE].codes) == 1:
        del found[DORA_SCALE]  # a magnitude of columns
    for part, one in found.items():
        half = len(one.codes) // 2
        if 2 * half < len(one.codes):
            _refuse(what, dialect, f"halves of the rows of {part}")
        found[part] = StoredArray.concatenate([one[half:], one[:half]])
    return found


def _without_zeros(piece: _Piece) -> _Piece:
    """Return a piece without the columns of B that are zero, and without their rows of A.

    They are those of the other layers, if B was made of blocks.
    """
    if UP not in piece.parts or piece.scaling is None:
        return piece
    down, up = piece.parts[DOWN], piece.parts[UP]
    is_used = (up.codes != 0).any(axis=0)
    rank = int(is_used.sum())
    if not 0 < rank < piece.scaling[1]:
        return piece
    parts = {**piece.parts, DOWN: down[is_used], UP: up[:, is_used]}
    return replace(piece, parts=parts, scaling=(piece.scale * rank, rank))


def _stacked(pieces: Iterable[_Piece], shapes: Shapes) -> Iterator[_Piece]:
    """Yield the pieces, with those for query, key and value of a block as one where they can be."""
    blocks: dict[tuple[str, str, str | None], dict[str, _Piece]] = {}
    for piece in pieces:
        if match := _THIRD.fullmatch(piece.module):
            key = (piece.component, match["block"], match["added"])
            blocks.setdefault(key, {})[match["letter"]] = piece
        else:
            yield piece
    for (component, block, added), thirds in blocks.items():
        names = [f"add_{one}_proj" if added else f"to_{one}" for one in _THIRDS]
        rows = [shapes.get(f"{component}/{block}.{name}.weight", (0,))[0] for name in names]
        stacked = _stack(thirds, rows) if all(rows) else None
        if stacked is None:
            yield from thirds.values()
        else:
            whole = "to_added_qkv" if added else "qkv"
            yield replace(stacked, component=component, module=f"{block}.{whole}")


def _stack(thirds: Mapping[str, _Piece], rows: list[int]) -> _Piece | None:
    """Return a pair for stacked layers, whose product is the same; None if there is none.

    A is shared, or the A of all layers by rows, with B in blocks: then rank and alpha add up.
    """
    found = list(thirds.values())
    first = found[0]
    keys = {frozenset(piece.parts) for piece in found}
    is_whole = len(found) == len(_THIRDS)
    allowed = [frozenset((DOWN, UP))] + [frozenset((DOWN, UP, DORA_SCALE))] * is_whole
    if len(keys) > 1 or keys.pop() not in allowed or len({piece.scale for piece in found}) > 1:
        return None
    if any(p.parts[DORA_SCALE].codes.shape[1] != 1 for p in found if DORA_SCALE in p.parts):
        return None  # norms of columns are those of all three
    assert first.scaling is not None  # noqa: S101 - pairs have a rank
    ups = [thirds[one].parts[UP] if one in thirds else None for one in _THIRDS]
    downs = [piece.parts[DOWN] for piece in found]
    parts = {}
    if DORA_SCALE in first.parts:
        scales = [thirds[one].parts[DORA_SCALE] for one in _THIRDS]
        parts[DORA_SCALE] = StoredArray.concatenate(scales)
    if is_whole and all(down.equals(downs[0]) for down in downs):
        whole = {DOWN: downs[0], UP: StoredArray.concatenate([up for up in ups if up is not None])}
        return replace(first, parts=whole | parts)
    ranks = [one.scaling[1] for one in found if one.scaling is not None]
    up, column = StoredArray.alike([up for up in ups if up is not None]), 0
    total = StoredArray(up[0].dtype, np.zeros((sum(rows), sum(ranks)), up[0].codes.dtype))
    for number, letter in enumerate(_THIRDS):
        if letter in thirds:
            block, start = up.pop(0).codes, sum(rows[:number])
            total.codes[start : start + rows[number], column : column + block.shape[1]] = block
            column += block.shape[1]
    downs = [thirds[one].parts[DOWN] for one in _THIRDS if one in thirds]
    whole = {DOWN: StoredArray.concatenate(downs), UP: total}
    return replace(first, parts=whole | parts, scaling=(first.scale * sum(ranks), sum(ranks)))


# -- names


def _written(
    source: OpenAdapter, pieces: list[_Piece], dialect: _Dialect, shapes: Shapes
) -> ConvertedAdapter:
    """Return the pieces under the names of a dialect. Raises UsageError."""
    tensors: dict[str, StoredArray] = {}
    for piece in pieces:
        if piece.component not in dialect.components:
            _refuse(source.what, dialect, f"adapters of the component {piece.component}")
        stem = dialect.stem(piece.component, piece.module)
        parts = piece.parts
        if dialect.is_fused and UP_BIAS in parts:
            parts = _with_difference(source.what, piece, dialect, shapes)
        for part in sorted(parts, key=_ORDER.index):
            if part not in dialect.parts:
                _refuse(source.what, dialect, _KINDS[part])
            tensors[f"{stem}.{dialect.parts[part]}"] = parts[part]
        if dialect.is_fused and piece.scaling is not None:
            alpha = np.array(piece.scaling[0], np.float32)
            tensors[f"{stem}.alpha"] = StoredArray("F32", alpha)
    metadata = {
        key: text for key, text in source.values.header.metadata.items() if key not in _STALE
    }
    metadata |= {"format": "pt"}
    if dialect.is_fused:
        return ConvertedAdapter(tensors, metadata)
    config = _config(source, pieces, dialect)
    if dialect.name == PEFT:
        return ConvertedAdapter(tensors, metadata, config)
    # diffusers passes all of them to peft's LoraConfig
    stated = {f"transformer.{key}": value for key, value in config.items() if key != "peft_type"}
    return ConvertedAdapter(tensors, metadata | {METADATA: json.dumps(stated, sort_keys=True)})


def _with_difference(
    what: str, piece: _Piece, dialect: _Dialect, shapes: Shapes
) -> Mapping[str, StoredArray]:
    """Return the parts with the bias of a pair as the difference of the layer's bias."""
    if f"{piece.component}/{piece.module}.bias" not in shapes:
        _refuse(what, dialect, f"biases of layers that have none in the base ({piece.module})")
    if DIFF_BIAS in piece.parts:
        _refuse(what, dialect, f"two changes of one bias ({piece.module})")
    parts = dict(piece.parts)
    bias = parts.pop(UP_BIAS)
    parts[DIFF_BIAS] = bias if piece.scale == 1 else bias.times(piece.scale)
    return parts


def _config(source: OpenAdapter, pieces: list[_Piece], dialect: _Dialect) -> dict[str, Any]:
    """Return peft's configuration. Raises UsageError for what one configuration cannot state."""
    parts = {part for piece in pieces for part in piece.parts}
    is_loha = not parts.isdisjoint(HADA)
    if len({piece.component for piece in pieces}) > 1:
        _refuse(source.what, dialect, "adapters of two components in one file")
    if is_loha and not parts <= {*HADA}:
        _refuse(source.what, dialect, "LoHa beside other kinds")
    is_dora = MAGNITUDE in parts
    if is_dora and any(MAGNITUDE not in piece.parts for piece in pieces):
        _refuse(source.what, dialect, "DoRA of some layers only")
    numbers = {piece.module: piece.scaling for piece in pieces if piece.scaling is not None}
    alphas = {module: _plain(alpha) for module, (alpha, _) in numbers.items()}
    ranks = {module: rank for module, (_, rank) in numbers.items()}
    alpha, rank = _most(alphas.values()), _most(ranks.values())
    config: dict[str, Any] = {
        "peft_type": "LOHA" if is_loha else "LORA",
        "r": rank,
        "alpha" if is_loha else "lora_alpha": alpha,
        "rank_pattern": {name: one for name, one in ranks.items() if one != rank},
        "alpha_pattern": {name: one for name, one in alphas.items() if one != alpha},
        "target_modules": sorted(ranks),
    }
    if not is_loha:
        config |= {"use_dora": is_dora, "lora_bias": UP_BIAS in parts}
    if dialect.name == PEFT:
        config["base_model_name_or_path"] = source.config.base if source.config else None
    return config


def _most(values: Iterable[Any]) -> Any:
    found = list(values)
    return max(dict.fromkeys(found), key=found.count)


def _plain(value: float) -> float | int:
    return int(value) if value.is_integer() else value


def _refuse(what: str, dialect: _Dialect, kind: str) -> NoReturn:
    raise UsageError(
        f"{what} cannot be written as {dialect.name}, which does not have {kind}",
        hint="choose another dialect, or keep the file as it is",
    )


def _text_module(module: str) -> str:
    return module.removeprefix("model.")


def _comfyui(component: str, module: str) -> str:
    if component == _TEXT:
        return f"text_encoders.qwen3_4b.transformer.model.{_text_module(module)}"
    return f"diffusion_model.{original_module(module)}"


def _kohya(component: str, module: str) -> str:
    is_text = component == _TEXT
    name = f"te_{_text_module(module)}" if is_text else f"unet_{original_module(module)}"
    return f"lora_{name}".replace(".", "_")


DIFFUSERS, COMFYUI, KOHYA, PEFT = "diffusers", "comfyui", "kohya", "peft"
DIALECTS = {
    one.name: one
    for one in (
        _Dialect(
            DIFFUSERS,
            lambda component, module: f"{component}.{module}",
            _PEFT_PARTS | {MAGNITUDE: "lora_magnitude_vector"},
            ("transformer",),
            is_fused=False,
        ),
        _Dialect(
            PEFT,
            lambda _, module: f"base_model.model.{module}",
            _PEFT_PARTS
            | {MAGNITUDE: "lora_magnitude_vector", **{part: part for part in HADA}}
            | {TABLE_DOWN: "lora_embedding_A", TABLE_UP: "lora_embedding_B"},
            ("transformer", _TEXT),
            is_fused=False,
        ),
        _Dialect(COMFYUI, _comfyui, _KOHYA_PARTS, ("transformer", _TEXT), is_fused=True),
        _Dialect(KOHYA, _kohya, _KOHYA_PARTS, ("transformer", _TEXT), is_fused=True),
    )
}
_CHOICES = f"choose one of {', '.join(DIALECTS)}"
