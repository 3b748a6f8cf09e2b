"""The types of settings in config.json: transformers checks them, and the networks do not.

Source: transformers 5.24, ``models/*/configuration_*.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clowder_aimage.tensor.config_fields import ConfigFields

_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("n_embd", "n_head", "n_layer", "n_positions"),
)
_FLAGS = (
    *("tie_word_embeddings", "use_sliding_window", "norm_topk_prob", "qk_layernorm"),
    *("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias"),
)
_NUMBERS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
_BASES = ("rope_theta", "rotary_emb_base", "rope_local_base_freq")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LAYERS = "layer_types"
_MOST = 1 << 40


def check_types(config: Mapping[str, Any]) -> None:
    """Check the settings that a configuration states. Raises ModelError."""
    fields = ConfigFields("config.json", config)
    for key in _COUNTS:
        fields.get_integer(key, 1, maximum=_MOST)
    for key in _FLAGS:
        fields.get_boolean(key, False)
    for key in _NUMBERS:
        fields.get_number(key, 0.0)
    for key in _BASES:
        fields.get_positive(key, 1.0)
    for key in _TOKENS:
        value = fields.get_raw(key, 0)
        if any(type(item) is not int for item in (value if isinstance(value, list) else [value])):
            raise fields.refuse(key, "must be the number of a token, or a list of them")
    layers = fields.get_raw(_LAYERS, [])
    if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
        raise fields.refuse(_LAYERS, "must be a list of strings")


def check_bases(settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Check the bases of rotary positions by type of layer. Raises ModelError."""
    for values in settings.values():
        ConfigFields("rope_parameters of config.json", values).get_positive("rope_theta", 1.0)
