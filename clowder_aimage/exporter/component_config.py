"""Quantization in the config.json of an exported component.

Blobs state their quantization, files do not: MLX reads ``quantization`` in config.json (MLX-LM,
``load_model``: an entry for most modules, and entries for different ones), other tools read
``quantization_config`` (with ``quant_method`` for ModelOpt). A correct config.json is not changed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from clowder_aimage.formats.weight_file import get_stem, is_modelopt
from clowder_aimage.tensor import QUANT_TYPES, Quantization
from clowder_aimage.tensor.quantization_config import (
    METHOD,
    find_mlx_entry,
    find_unknown_key,
    parse_mlx_type,
)
from clowder_aimage.tensor.weight import Weight

_MLX, _OTHER_TOOLS = "quantization", "quantization_config"
_METHODS = ("modelopt", "modelopt_fp4")


def merge_quantization(config: Mapping[str, Any], weights: Sequence[Weight]) -> bytes | None:
    """Return a config.json with the quantization of ``weights``; None if ``config`` states it."""
    merged_config = dict(config)
    mlx = {
        get_stem(weight): weight.quantization
        for weight in weights
        if weight.quantization is not None and not is_modelopt(weight)
    }
    if any(_parse_quantization(config, name) != quantization for name, quantization in mlx.items()):
        merged_config[_MLX] = _encode_mlx(mlx)
    if (
        any(weight.quantization for weight in weights)
        and find_unknown_key(merged_config) == _OTHER_TOOLS
    ):
        # It describes the form before the import, which is not exported.
        del merged_config[_OTHER_TOOLS]
    if any(map(is_modelopt, weights)) and not _is_modelopt(config):
        merged_config[_OTHER_TOOLS] = _encode_modelopt(weights)
    if merged_config == config:
        return None
    return (json.dumps(merged_config, indent=2, ensure_ascii=False) + "\n").encode()


def _parse_quantization(config: Mapping[str, Any], module: str) -> Quantization | None:
    """Return the quantization of a module in a config, or None if it is missing or incomplete."""
    # Readers may not derive a missing group size from the shapes.
    name, size = parse_mlx_type(find_mlx_entry(config, module) or {})
    if name is None or size not in QUANT_TYPES[name].group_sizes:
        return None
    return Quantization.parse(name, size)


def _encode_mlx(mlx: Mapping[str, Quantization]) -> dict[str, Any]:
    """Return the entry for most modules, with entries for the different ones."""
    count = Counter(mlx.values())
    most_common = max(count, key=lambda kind: (count[kind], kind.type.name, kind.group_size))
    differing = {
        name: _encode_entry(kind) for name, kind in sorted(mlx.items()) if kind != most_common
    }
    return _encode_entry(most_common) | differing


def _encode_entry(kind: Quantization) -> dict[str, Any]:
    return {"group_size": kind.group_size, "bits": kind.type.bits, "mode": kind.type.mode}


def _is_modelopt(config: Mapping[str, Any]) -> bool:
    entry = config.get(_OTHER_TOOLS)
    return isinstance(entry, dict) and entry.get(METHOD) in _METHODS


def _encode_modelopt(weights: Sequence[Weight]) -> dict[str, Any]:
    """Return ModelOpt's form ("unified checkpoint"): the algorithm and the excluded modules."""
    unquantized = [w for w in weights if w.quantization is None and len(w.shape) == 2]
    return {
        METHOD: "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": sorted(get_stem(weight) for weight in unquantized),
    }
