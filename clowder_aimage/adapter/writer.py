"""Adapters in the dialect of another tool, with unchanged values and types.

Alpha, divided by the rank, is the scale in all dialects; for rsLoRA it includes the root of the
rank. Names: diffusers' and peft's ``save_pretrained``, ComfyUI's
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
from clowder_aimage.adapter.outline import NAME, infer_shapes
from clowder_aimage.adapter.peft_config import METADATA
from clowder_aimage.adapter.reader import MatchedAdapter, match_adapter
from clowder_aimage.adapter.target import LayerTarget
from clowder_aimage.adapter.values import StoredArray
from clowder_aimage.errors import UsageError
from clowder_aimage.family.image_family import find_original_module, has_exchanged_halves
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
# Metadata that is not true of the converted file: a configuration and the hashes of kohya-ss.
_STALE = (METADATA, "sshs_model_hash", "sshs_legacy_hash")
_PEFT_SUFFIXES = {
    DOWN: "lora_A.weight",
    UP: "lora_B.weight",
    UP_BIAS: "lora_B.bias",
}
_KOHYA_SUFFIXES = {
    DOWN: "lora_down.weight",
    UP: "lora_up.weight",
    **{role: role for role in (*HADA, *KRON, DIFF, DIFF_BIAS, SET, DORA_SCALE)},
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
        entries = [(name, array.dtype, array.codes.shape) for name, array in self.tensors.items()]
        yield encode_header(entries, self.metadata)
        yield from (array.codes.tobytes() for array in self.tensors.values())


@dataclass(frozen=True, slots=True)
class _ConvertedLayer:
    """The stored arrays for a layer by role, and alpha and rank of its matrices."""

    component: str
    module: str
    arrays: Mapping[str, StoredArray]
    scaling: tuple[float, int] | None

    @property
    def scale(self) -> float:
        return 1.0 if self.scaling is None else self.scaling[0] / self.scaling[1]


@dataclass(frozen=True, slots=True)
class _Dialect:
    """Names of layers, and the suffixes of the roles that the tool reads."""

    name: str
    stem: Callable[[str, str], str]
    suffixes: Mapping[str, str]
    components: tuple[str, ...]
    is_fused: bool


def convert_adapter(
    path: Path,
    dialect: str,
    *,
    label: str,
    shapes: Shapes | None = None,
    config: Mapping[str, Any] | None = None,
) -> ConvertedAdapter:
    """Return the adapter at ``path`` in a dialect of DIALECTS.

    Args:
        path: A safetensors file, or a directory of peft.
        dialect: ``diffusers`` and ``peft`` have separate layers for query, key and value;
            ``comfyui`` and ``kohya`` stack them if possible.
        label: The adapter's name in messages.
        shapes: The tensors of its base; by default the layers of a known family, by name.
        config: The adapter's ``adapter_config.json``, by default that in the file's directory.

    Raises:
        UsageError: The dialect is unknown, or has no names for a change of the adapter.
        FormatError: As ``read_adapter`` does.
        OSError: It cannot be read.
    """
    chosen = DIALECTS.get(dialect)
    if chosen is None:
        raise UsageError(f"unknown dialect of adapters: {dialect[:60]!r}", hint=_CHOICES)
    with open_adapter(path, label, config) as source:
        if source.content.embeddings:
            _reject(label, chosen, "embeddings of words")
        base_shapes = infer_shapes(source.content.layers) if shapes is None else shapes
        source.check_size(base_shapes)
        matched = match_adapter(source, base_shapes, NAME)
        # The result is not needed: this checks the values.
        matched.read()
        layers = [
            converted
            for layer, target in matched.pairs
            for converted in _convert_layer(matched, layer, target, chosen)
        ]
        if chosen.is_fused:
            layers = list(_stack_thirds(layers, base_shapes))
        return _rename_layers(source, layers, chosen, base_shapes)


# -- values


def _convert_layer(
    matched: MatchedAdapter, layer: AdapterLayer, target: LayerTarget, dialect: _Dialect
) -> Iterator[_ConvertedLayer]:
    """Yield the arrays of a layer; for each of its tensors if the dialect separates them."""
    label, read_stored = matched.source.label, matched.source.values.read_stored
    if len(layer.kinds) > 1:
        _reject(label, dialect, f"{' and '.join(layer.kinds)} for one layer ({target.module})")
    arrays = {
        role: read_stored(name, layer.shapes[role])
        for role, name in layer.tensors.items()
        if role in _ORDER
    }
    if DORA_SCALE in arrays and arrays[DORA_SCALE].codes.ndim == 1:
        arrays[DORA_SCALE] = StoredArray(
            arrays[DORA_SCALE].dtype, arrays[DORA_SCALE].codes[:, None]
        )
    if target.is_exchanged != (dialect.is_fused and has_exchanged_halves(target.module)):
        arrays |= _exchange_halves(label, dialect, arrays)
    scaling = matched.read_scaling(layer, (*layer.kinds, LORA)[0], target)
    if LOKR in layer.kinds and scaling is not None:
        scale, rank = scaling[0] / scaling[1], layer.ranks.get(LOKR)
        scaling = None if rank is None else (scale * rank, rank)
        if scaling is None and scale != 1:
            # peft scales matrices of LoKr too; other tools do not.
            arrays[KRON[0]] = arrays[KRON[0]].multiply(scale)
    converted = _ConvertedLayer(target.component, target.module, arrays, scaling)
    if len(target.rows) == 1 or dialect.is_fused:
        yield converted
        return
    if LOKR in layer.kinds:
        _reject(label, dialect, "LoKr of stacked layers, which has no products for each of them")
    for rows in target.rows:
        row_arrays = {
            role: array[rows.start : rows.stop] if role in ROWS else array
            for role, array in arrays.items()
        }
        module = rows.tensor.partition("/")[2].removesuffix(".weight")
        yield _without_zeros(replace(converted, module=module, arrays=row_arrays))


def _exchange_halves(
    label: str, dialect: _Dialect, arrays: Mapping[str, StoredArray]
) -> dict[str, StoredArray]:
    """Return the arrays with rows, with their halves exchanged. Raises UsageError."""
    exchanged = {role: arrays[role] for role in ROWS if role in arrays}
    if DORA_SCALE in exchanged and len(exchanged[DORA_SCALE].codes) == 1:
        # A magnitude of columns has no rows.
        del exchanged[DORA_SCALE]
    for role, array in exchanged.items():
        half = len(array.codes) // 2
        if 2 * half < len(array.codes):
            _reject(label, dialect, f"halves of the rows of {role}")
        exchanged[role] = StoredArray.concatenate([array[half:], array[:half]])
    return exchanged


def _without_zeros(layer: _ConvertedLayer) -> _ConvertedLayer:
    """Return a layer without the columns of B that are zero, and without their rows of A.

    A stacked B of blocks has zeros for the other layers.
    """
    if UP not in layer.arrays or layer.scaling is None:
        return layer
    down, up = layer.arrays[DOWN], layer.arrays[UP]
    is_used = (up.codes != 0).any(axis=0)
    rank = int(is_used.sum())
    if not 0 < rank < layer.scaling[1]:
        return layer
    arrays = {**layer.arrays, DOWN: down[is_used], UP: up[:, is_used]}
    return replace(layer, arrays=arrays, scaling=(layer.scale * rank, rank))


def _stack_thirds(layers: Iterable[_ConvertedLayer], shapes: Shapes) -> Iterator[_ConvertedLayer]:
    """Yield the layers, with those for query, key and value of a block stacked if possible."""
    blocks: dict[tuple[str, str, str | None], dict[str, _ConvertedLayer]] = {}
    for layer in layers:
        if match := _THIRD.fullmatch(layer.module):
            key = (layer.component, match["block"], match["added"])
            blocks.setdefault(key, {})[match["letter"]] = layer
        else:
            yield layer
    for (component, block, added), thirds in blocks.items():
        names = [f"add_{letter}_proj" if added else f"to_{letter}" for letter in _THIRDS]
        rows = [shapes.get(f"{component}/{block}.{name}.weight", (0,))[0] for name in names]
        stacked = _stack(thirds, rows) if all(rows) else None
        if stacked is None:
            yield from thirds.values()
        else:
            stacked_name = "to_added_qkv" if added else "qkv"
            yield replace(stacked, component=component, module=f"{block}.{stacked_name}")


def _stack(thirds: Mapping[str, _ConvertedLayer], rows: list[int]) -> _ConvertedLayer | None:
    """Return a pair for stacked layers with the same product; None if they cannot be stacked.

    A common A is shared. Different A are stacked by rows, with B in blocks: then rank and alpha
    add up.
    """
    layers = list(thirds.values())
    template = layers[0]
    keys = {frozenset(layer.arrays) for layer in layers}
    is_whole = len(layers) == len(_THIRDS)
    allowed = [frozenset((DOWN, UP))] + [frozenset((DOWN, UP, DORA_SCALE))] * is_whole
    if len(keys) > 1 or keys.pop() not in allowed or len({layer.scale for layer in layers}) > 1:
        return None
    if any(
        layer.arrays[DORA_SCALE].codes.shape[1] != 1
        for layer in layers
        if DORA_SCALE in layer.arrays
    ):
        # Norms of columns would be those of all three layers.
        return None
    assert template.scaling is not None  # noqa: S101 - pairs have a rank
    ups = [thirds[third].arrays[UP] if third in thirds else None for third in _THIRDS]
    downs = [layer.arrays[DOWN] for layer in layers]
    scales_by_role = {}
    if DORA_SCALE in template.arrays:
        scales = [thirds[third].arrays[DORA_SCALE] for third in _THIRDS]
        scales_by_role[DORA_SCALE] = StoredArray.concatenate(scales)
    if is_whole and all(down.equals(downs[0]) for down in downs):
        pair = {DOWN: downs[0], UP: StoredArray.concatenate([up for up in ups if up is not None])}
        return replace(template, arrays=pair | scales_by_role)
    ranks = [third.scaling[1] for third in layers if third.scaling is not None]
    up, column = StoredArray.promote([up for up in ups if up is not None]), 0
    total = StoredArray(up[0].dtype, np.zeros((sum(rows), sum(ranks)), up[0].codes.dtype))
    for number, letter in enumerate(_THIRDS):
        if letter in thirds:
            block, start = up.pop(0).codes, sum(rows[:number])
            total.codes[start : start + rows[number], column : column + block.shape[1]] = block
            column += block.shape[1]
    downs = [thirds[third].arrays[DOWN] for third in _THIRDS if third in thirds]
    pair = {DOWN: StoredArray.concatenate(downs), UP: total}
    return replace(
        template, arrays=pair | scales_by_role, scaling=(template.scale * sum(ranks), sum(ranks))
    )


# -- names


def _rename_layers(
    source: OpenAdapter, layers: list[_ConvertedLayer], dialect: _Dialect, shapes: Shapes
) -> ConvertedAdapter:
    """Return the layers with the names of a dialect. Raises UsageError."""
    tensors: dict[str, StoredArray] = {}
    for layer in layers:
        if layer.component not in dialect.components:
            _reject(source.label, dialect, f"adapters of the component {layer.component}")
        stem = dialect.stem(layer.component, layer.module)
        arrays = layer.arrays
        if dialect.is_fused and UP_BIAS in arrays:
            arrays = _convert_bias(source.label, layer, dialect, shapes)
        for role in sorted(arrays, key=_ORDER.index):
            if role not in dialect.suffixes:
                _reject(source.label, dialect, _KINDS[role])
            tensors[f"{stem}.{dialect.suffixes[role]}"] = arrays[role]
        if dialect.is_fused and layer.scaling is not None:
            alpha = np.array(layer.scaling[0], np.float32)
            tensors[f"{stem}.alpha"] = StoredArray("F32", alpha)
    metadata = {
        key: text for key, text in source.values.header.metadata.items() if key not in _STALE
    }
    metadata |= {"format": "pt"}
    if dialect.is_fused:
        return ConvertedAdapter(tensors, metadata)
    config = _build_config(source, layers, dialect)
    if dialect.name == PEFT:
        return ConvertedAdapter(tensors, metadata, config)
    # diffusers passes all keys to peft's LoraConfig.
    stated = {f"transformer.{key}": value for key, value in config.items() if key != "peft_type"}
    return ConvertedAdapter(tensors, metadata | {METADATA: json.dumps(stated, sort_keys=True)})


def _convert_bias(
    label: str, layer: _ConvertedLayer, dialect: _Dialect, shapes: Shapes
) -> Mapping[str, StoredArray]:
    """Return the arrays with the bias of a pair as a difference of the layer's bias."""
    if f"{layer.component}/{layer.module}.bias" not in shapes:
        _reject(label, dialect, f"biases of layers that have none in the base ({layer.module})")
    if DIFF_BIAS in layer.arrays:
        _reject(label, dialect, f"two changes of one bias ({layer.module})")
    arrays = dict(layer.arrays)
    bias = arrays.pop(UP_BIAS)
    arrays[DIFF_BIAS] = bias if layer.scale == 1 else bias.multiply(layer.scale)
    return arrays


def _build_config(
    source: OpenAdapter, layers: list[_ConvertedLayer], dialect: _Dialect
) -> dict[str, Any]:
    """Return peft's configuration. Raises UsageError: A configuration cannot state the changes."""
    roles = {role for layer in layers for role in layer.arrays}
    is_loha = not roles.isdisjoint(HADA)
    if len({layer.component for layer in layers}) > 1:
        _reject(source.label, dialect, "adapters of two components in one file")
    if is_loha and not roles <= {*HADA}:
        _reject(source.label, dialect, "LoHa beside other kinds")
    is_dora = MAGNITUDE in roles
    if is_dora and any(MAGNITUDE not in layer.arrays for layer in layers):
        _reject(source.label, dialect, "DoRA of some layers only")
    numbers = {layer.module: layer.scaling for layer in layers if layer.scaling is not None}
    alphas = {module: _to_plain(alpha) for module, (alpha, _) in numbers.items()}
    ranks = {module: rank for module, (_, rank) in numbers.items()}
    alpha, rank = _find_most_common(alphas.values()), _find_most_common(ranks.values())
    config: dict[str, Any] = {
        "peft_type": "LOHA" if is_loha else "LORA",
        "r": rank,
        "alpha" if is_loha else "lora_alpha": alpha,
        "rank_pattern": {name: number for name, number in ranks.items() if number != rank},
        "alpha_pattern": {name: number for name, number in alphas.items() if number != alpha},
        "target_modules": sorted(ranks),
    }
    if not is_loha:
        config |= {"use_dora": is_dora, "lora_bias": UP_BIAS in roles}
    if dialect.name == PEFT:
        config["base_model_name_or_path"] = source.config.base if source.config else None
    return config


def _find_most_common(values: Iterable[Any]) -> Any:
    numbers = list(values)
    return max(dict.fromkeys(numbers), key=numbers.count)


def _to_plain(value: float) -> float | int:
    return int(value) if value.is_integer() else value


def _reject(label: str, dialect: _Dialect, kind: str) -> NoReturn:
    raise UsageError(
        f"{label} cannot be written as {dialect.name}, which does not have {kind}",
        hint="choose another dialect, or keep the file as it is",
    )


def _strip_model_prefix(module: str) -> str:
    return module.removeprefix("model.")


def _build_comfyui_name(component: str, module: str) -> str:
    if component == _TEXT:
        return f"text_encoders.qwen3_4b.transformer.model.{_strip_model_prefix(module)}"
    return f"diffusion_model.{find_original_module(module)}"


def _build_kohya_name(component: str, module: str) -> str:
    is_text = component == _TEXT
    name = (
        f"te_{_strip_model_prefix(module)}" if is_text else f"unet_{find_original_module(module)}"
    )
    return f"lora_{name}".replace(".", "_")


DIFFUSERS, COMFYUI, KOHYA, PEFT = "diffusers", "comfyui", "kohya", "peft"
DIALECTS = {
    dialect.name: dialect
    for dialect in (
        _Dialect(
            DIFFUSERS,
            lambda component, module: f"{component}.{module}",
            _PEFT_SUFFIXES | {MAGNITUDE: "lora_magnitude_vector"},
            ("transformer",),
            is_fused=False,
        ),
        _Dialect(
            PEFT,
            lambda _, module: f"base_model.model.{module}",
            _PEFT_SUFFIXES
            | {MAGNITUDE: "lora_magnitude_vector", **{role: role for role in HADA}}
            | {TABLE_DOWN: "lora_embedding_A", TABLE_UP: "lora_embedding_B"},
            ("transformer", _TEXT),
            is_fused=False,
        ),
        _Dialect(
            COMFYUI, _build_comfyui_name, _KOHYA_SUFFIXES, ("transformer", _TEXT), is_fused=True
        ),
        _Dialect(KOHYA, _build_kohya_name, _KOHYA_SUFFIXES, ("transformer", _TEXT), is_fused=True),
    )
}
_CHOICES = f"choose one of {', '.join(DIALECTS)}"
