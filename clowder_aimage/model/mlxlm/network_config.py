"""config.json of transformers, for the networks of mlx-lm.

Transformers has two forms of the settings of rotary positions, and each network reads one of them;
it ignores what it does not know. So a network gets both forms, and a setting that it would ignore
is refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from clowder_aimage.errors import ModelError
from clowder_aimage.model.mlxlm.network_kind import FIXED, PROMISED, NetworkKind
from clowder_aimage.model.mlxlm.setting_type import check_bases, check_types
from clowder_aimage.model.rope_setting import ALL, FULL, SLIDING, list_rope_settings

_ROPE = ("rope_theta", "rope_parameters", "rope_scaling", "rotary_emb_base", "rope_local_base_freq")
_PATTERN, _TYPES, _WINDOW = "sliding_window_pattern", "layer_types", "sliding_window"


def translate_config(config: Mapping[str, Any], parameters: Collection[str]) -> dict[str, Any]:
    """Return a configuration as a network reads it that has these ``parameters``.

    Raises:
        ModelError: A setting is invalid, or changes the network but is not read by it.
    """
    kind, text = find_kind(config), config.get("text_config")
    if isinstance(text, dict) and "text_config" in parameters:
        inner = _translate_text(text, kind)
        # mlx-lm reads some settings of the language model beside it
        stated = {key: inner[key] for key in parameters if key in inner and key not in config}
        return {**stated, **config, "text_config": inner}
    return _translate_text(config, kind, parameters)


def find_fault(config: Mapping[str, Any]) -> str:
    """Return why a promised network does not compute a configuration; empty if it may."""
    try:
        translate_config(config, ("text_config",))
    except ModelError as error:
        return error.message
    return ""


def get_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a translated configuration that is the language model's."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def find_kind(config: Mapping[str, Any]) -> NetworkKind | None:
    """Return the promised network of a configuration, or None."""
    return PROMISED.get(str(config.get("model_type")))


def divide_heads(text: Mapping[str, Any]) -> int | None:
    """Return the channels of a head of a usual network."""
    width, heads = text.get("hidden_size"), text.get("num_attention_heads")
    return width // heads if type(width) is int and type(heads) is int and heads > 0 else None


def find_window(config: Mapping[str, Any]) -> int | None:
    """Return the tokens up to which a promised network without sliding windows is right, or None.

    config: a translated one.
    """
    text, kind = get_text_config(config), find_kind(config)
    window, types = text.get(_WINDOW), text.get(_TYPES)
    if kind is None or kind.has_window or type(window) is not int or window < 1:
        return None
    if not text.get("use_sliding_window", True) or (types and SLIDING not in types):
        return None
    return window


def _translate_text(
    config: Mapping[str, Any], kind: NetworkKind | None, parameters: Collection[str] = ()
) -> dict[str, Any]:
    result = dict(config)
    _check_fixed(result, FIXED)
    if kind is not None:
        check_types(result)
        # These two have a value then; other settings are null: no window, no low rank
        if result.get("head_dim", 0) is None:
            del result["head_dim"]
        if result.get("num_key_value_heads", 0) is None:
            result["num_key_value_heads"] = result.get("num_attention_heads")
        result = {**kind.defaults, **result}
        _check_fixed(result, kind.fixed)
        if null := next((key for key in kind.numbers if result.get(key, 0) is None), None):
            raise ModelError(f"config.json: {null} = null is not supported: the network needs it")
        for name, other in kind.names.items():
            if name in result:
                result.setdefault(other, result[name])
        if (head := divide_heads(result)) is not None and "head_dim" in parameters:
            result.setdefault("head_dim", head)
    if _PATTERN in parameters or _PATTERN in result:
        result |= _translate_pattern(result)
    return result | _translate_rope(result, kind)


def _check_fixed(config: Mapping[str, Any], fixed: Mapping[str, tuple[object, ...]]) -> None:
    for key, values in fixed.items():
        if config.get(key) is not None and config[key] not in values:
            expected = " or ".join(json.dumps(value) for value in values) or "null"
            raise ModelError(
                f"config.json: {key} = {config[key]!r:.80} is not supported: the network "
                f"computes {expected} only"
            )


def _translate_pattern(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return both forms of a period of layers, of which the last has full attention."""
    types, period = config.get(_TYPES), config.get(_PATTERN)
    layers = config.get("num_hidden_layers")
    if types is None and type(period) is int and type(layers) is int and period > 0 < layers:
        return {
            _TYPES: [FULL if index % period == period - 1 else SLIDING for index in range(layers)]
        }
    if not isinstance(types, list):
        return {}
    period = types.index(FULL) + 1 if FULL in types else len(types) + 1
    if types != [FULL if index % period == period - 1 else SLIDING for index in range(len(types))]:
        raise ModelError("config.json: layer_types are not supported: they do not repeat")
    return {_PATTERN: period}


def _translate_rope(config: Mapping[str, Any], kind: NetworkKind | None) -> dict[str, Any]:
    """Return all forms of the settings of rotary positions.

    A promised network gets them as ``rope_parameters`` and base; its positions are replaced later.
    """
    is_stated = any(config.get(key) is not None for key in _ROPE)
    if (not is_stated and kind is None) or isinstance(config.get("rope_theta"), list):
        return {}
    settings = list_rope_settings(config, kind.theta if kind else 10000.0)
    check_bases(settings)
    if kind is not None:
        settings = {layer: _complete(values, kind) for layer, values in settings.items()}
    main = settings.get(FULL) or settings.get(ALL) or next(iter(settings.values()))
    word = main.get("rope_type", main.get("type", "default"))
    scaling = {**main, "type": word, "rope_type": word}
    forms: dict[str, Any] = {
        "rope_theta": main["rope_theta"],
        "rotary_emb_base": main["rope_theta"],
        "rope_scaling": scaling if word != "default" else config.get("rope_scaling"),
        "rope_parameters": scaling if ALL in settings else settings,
    }
    if kind is not None:
        forms["rope_scaling"] = {"factor": 1.0, **scaling} if kind.has_scaling else None
    # Beside settings of layers it would count for all of them
    if (share := settings.get(ALL, {}).get("partial_rotary_factor")) is not None:
        forms |= {"partial_rotary_factor": share, "rotary_pct": share}
    if (local := settings.get(SLIDING)) is not None:
        forms["rope_local_base_freq"] = local["rope_theta"]
    return forms


def _complete(settings: Mapping[str, Any], kind: NetworkKind) -> dict[str, Any]:
    """Return settings with the rotated part of a head. Raises ModelError if it is not read."""
    share = settings.get("partial_rotary_factor", kind.share)
    if kind.share is None and share not in (None, 1):
        raise ModelError(
            f"config.json: partial_rotary_factor = {share!r:.80} is not supported: the network "
            "rotates whole heads"
        )
    return dict(settings) if share is None else {**settings, "partial_rotary_factor": share}
