"""Quantization in a component's config.json: parsed, and written for exported files.

Blobs state their quantization, files do not: MLX reads ``quantization`` in config.json (MLX-LM,
``load_model``: one entry for all modules, and one for each that differs), other tools read
``quantization_config`` (with ``quant_method`` for ModelOpt). If config.json is already correct, it
is kept byte for byte.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from clowder_aimage.formats.weight_file import is_modelopt, stem
from clowder_aimage.tensor import QUANT_TYPES, Quantization
from clowder_aimage.tensor.quantization_config import METHOD, mlx_entry, mlx_type, unknown_key
from clowder_aimage.tensor.weight import Weight

_MLX, _OTHERS = "quantization", "quantization_config"
_METHODS = ("modelopt", "modelopt_fp4")


def merged(config: Mapping[str, Any], weights: Sequence[Weight]) -> bytes | None:
    """Return a config.json with the quantization of ``weights``, or None if ``config`` has it."""
    made = dict(config)
    mlx = {
        stem(weight): weight.quantization
        for weight in weights
        if weight.quantization is not None and not is_modelopt(weight)
    }
    if any(_said(config, name) != quantization for name, quantization in mlx.items()):
        made[_MLX] = _table(mlx)
    if any(weight.quantization for weight in weights) and unknown_key(made) == _OTHERS:
        del made[_OTHERS]  # it describes the form before import, which is not exported
    if any(map(is_modelopt, weights)) and not _is_modelopt(config):
        made[_OTHERS] = _modelopt(weights)
    if made == config:
        return None
    return (json.dumps(made, indent=2, ensure_ascii=False) + "\n").encode()


def _said(config: Mapping[str, Any], module: str) -> Quantization | None:
    """Return the quantization of a module, as readers of the directory will find it.

    A missing group size could be derived from the shapes, which is not relied upon here.
    """
    name, size = mlx_type(mlx_entry(config, module) or {})
    if name is None or size not in QUANT_TYPES[name].group_sizes:
        return None
    return Quantization.parse(name, size)


def _table(mlx: Mapping[str, Quantization]) -> dict[str, Any]:
    """Return the entry for most modules, and entries for those that differ."""
    count = Counter(mlx.values())
    usual = max(count, key=lambda kind: (count[kind], kind.type.name, kind.group_size))
    differing = {name: _entry(kind) for name, kind in sorted(mlx.items()) if kind != usual}
    return _entry(usual) | differing


def _entry(kind: Quantization) -> dict[str, Any]:
    return {"group_size": kind.group_size, "bits": kind.type.bits, "mode": kind.type.mode}


def _is_modelopt(config: Mapping[str, Any]) -> bool:
    others = config.get(_OTHERS)
    return isinstance(others, dict) and others.get(METHOD) in _METHODS


def _modelopt(weights: Sequence[Weight]) -> dict[str, Any]:
    """Return ModelOpt's form ("unified checkpoint"): the algorithm and the excluded modules."""
    left = [w for w in weights if w.quantization is None and len(w.shape) == 2]
    return {
        METHOD: "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": sorted(stem(weight) for weight in left),
    }
