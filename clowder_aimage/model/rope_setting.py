"""Settings of rotary positions in both forms of transformers, without arrays.

``rope_parameters`` (5) may have an object for each type of layer; ``rope_theta`` and
``rope_scaling`` are those of 4. Source: transformers, ``modeling_rope_utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clowder_aimage.errors import ModelError

KINDS = ("default", "linear", "yarn", "llama3", "longrope")
# Names of the field for the base, and for the rotated share of a head
_THETAS = ("rope_theta", "rotary_emb_base")
_SHARES = ("partial_rotary_factor", "rotary_pct")
# Older names of a kind. Dynamic scaling changes only texts longer than the model's context, which
# are refused
_KINDS = {"su": "longrope", "dynamic": "default", "mrope": "default"}
FULL, SLIDING, ALL = "full_attention", "sliding_attention", ""


def list_rope_settings(
    config: Mapping[str, Any], theta: float = 10000.0
) -> dict[str, dict[str, Any]]:
    """Return the settings of the rotary embedding by type of layer; ALL stands for all layers.

    theta: the base of a model that states none. Raises ModelError.
    """
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    for value in (scaling, parameters):
        if value is not None and not isinstance(value, dict):
            raise ModelError("rope_parameters of config.json must be an object")
    nested = {key: value for key, value in (parameters or {}).items() if isinstance(value, dict)}
    if not nested and config.get("rope_local_base_freq") is not None:
        nested = {FULL: parameters or {}, SLIDING: {"rope_theta": config["rope_local_base_freq"]}}
    if nested and scaling:
        nested[FULL] = {**nested.get(FULL, {}), **scaling}
    usual = {"rope_theta": _find(config, _THETAS, theta)}
    if (share := _find(config, _SHARES)) is not None:
        usual["partial_rotary_factor"] = share
    if (length := config.get("original_max_position_embeddings")) is not None:
        usual["original_max_position_embeddings"] = length
    return {
        layer: usual | {key: value for key, value in settings.items() if value is not None}
        for layer, settings in (nested or {ALL: scaling or parameters or {}}).items()
    }


def find_rope_kind(settings: Mapping[str, Any]) -> str:
    """Return the kind of scaling of a layer; empty if it is unknown."""
    kind = settings.get("rope_type", settings.get("type", "default"))
    kind = _KINDS.get(kind, kind) if isinstance(kind, str) else ""
    # Phi-3 called its scaling yarn first, and Phi-3.5-MoE scales queries and keys otherwise
    if kind == "yarn" and "short_factor" in settings:
        kind = "longrope"
    return kind if kind in KINDS and "short_mscale" not in settings else ""


def _find(config: Mapping[str, Any], keys: tuple[str, ...], default: Any = None) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), default)
