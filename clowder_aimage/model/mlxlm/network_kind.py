"""The networks that are promised: tests compare their texts with those of transformers.

For each ``model_type`` the table has what mlx-lm does not read, or reads otherwise. The tests fail
if a configuration of transformers has a setting that is neither read, nor listed here, nor without
an effect on texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# What every network computes; transformers reads it for each of them
FIXED: Mapping[str, tuple[object, ...]] = {"is_causal": (True,)}
_SILU = {"hidden_act": ("silu", "swish")}
_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


@dataclass(frozen=True, slots=True)
class NetworkKind:
    """Describe how mlx-lm computes a ``model_type`` with the settings of transformers.

    fixed: settings that it does not read, with the values that it computes. defaults: those of
    transformers, where it has other ones or none. numbers: settings that may not be null. names:
    its names of settings. theta: the base of rotary positions without a setting. share: the
    rotated part of a head without a setting; None if a head is always rotated whole. has_window:
    it computes sliding windows. has_scaling: it needs ``rope_scaling`` beyond rotary positions.
    """

    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: _SILU)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    theta: float = 10000.0
    share: float | None = None
    has_window: bool = False
    has_scaling: bool = False


_UNTIED = {"tie_word_embeddings": False}
_QWEN = {**_UNTIED, "use_sliding_window": False, "max_window_layers": 28}
_EXPERTS = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],), "norm_topk_prob": (False,)}

_GEMMA3 = NetworkKind(
    {
        "hidden_activation": _TANH,
        "tie_word_embeddings": (True,),
        "attention_bias": (False,),
        "final_logit_softcapping": (),
        "attn_logit_softcapping": (),
        "use_bidirectional_attention": (False,),
    },
    {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
    },
    theta=1e6,
    has_window=True,
)

PROMISED: Mapping[str, NetworkKind] = {
    "llama": NetworkKind(defaults=_UNTIED, has_window=True),
    "mistral": NetworkKind(defaults={**_UNTIED, "sliding_window": 4096}),
    "mixtral": NetworkKind(theta=1e6),
    "qwen2": NetworkKind(defaults=_QWEN),
    "qwen2_moe": NetworkKind(_SILU | _EXPERTS | {"qkv_bias": (True,)}, _QWEN),
    "qwen3": NetworkKind(_SILU | {"attention_bias": (False,)}, {**_QWEN, "head_dim": 128}),
    "qwen3_moe": NetworkKind(
        _SILU | {"attention_bias": (False,)},
        {**_QWEN, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False},
        {"num_local_experts": "num_experts"},
    ),
    "gemma2": NetworkKind(
        {
            "hidden_activation": _TANH,
            "tie_word_embeddings": (True,),
            "attention_bias": (False,),
            "use_bidirectional_attention": (False,),
        },
        {"query_pre_attn_scalar": 256, "sliding_window": 4096, "head_dim": 256},
        numbers=("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "phi": NetworkKind(
        {
            "hidden_act": _TANH,
            "qk_layernorm": (False,),
            "tie_word_embeddings": (False,),
        },
        {"hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 8192},
        share=0.5,
    ),
    "phi3": NetworkKind(defaults={"max_position_embeddings": 4096}, share=1.0),
    "olmo2": NetworkKind(defaults=_UNTIED),
    "olmo3": NetworkKind(defaults={"sliding_window": 4096}, theta=500000.0, has_window=True),
    "olmoe": NetworkKind(_SILU | {"clip_qkv": ()}, _UNTIED),
    "granite": NetworkKind(
        defaults={
            **_UNTIED,
            "logits_scaling": 1.0,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_bias": False,
            "mlp_bias": False,
        }
    ),
    "cohere": NetworkKind(_SILU | {"tie_word_embeddings": (True,)}, theta=500000.0),
    "cohere2": NetworkKind(
        _SILU | {"tie_word_embeddings": (True,)},
        {"hidden_size": 8192, "num_hidden_layers": 40, "intermediate_size": 22528}
        | {"num_attention_heads": 64, "num_key_value_heads": 64, "sliding_window_pattern": 4},
        has_window=True,
    ),
    "glm": NetworkKind(defaults={**_UNTIED, "attention_bias": True, "head_dim": 128}, share=0.5),
    "glm4": NetworkKind(
        _SILU | {"tie_word_embeddings": (False,)},
        {"attention_bias": True, "head_dim": 128, "max_position_embeddings": 131072},
        share=0.5,
    ),
    "smollm3": NetworkKind(
        defaults={"tie_word_embeddings": True, "use_sliding_window": False}, theta=2e6
    ),
    "nemotron": NetworkKind({"hidden_act": ("relu2",)}, {"hidden_act": "relu2"}, share=0.5),
    "stablelm": NetworkKind(
        _SILU | {"tie_word_embeddings": (False,)}, {"use_qkv_bias": False}, share=0.25
    ),
    "helium": NetworkKind(
        defaults={**_UNTIED, "attention_bias": False, "mlp_bias": False, "head_dim": 128},
        theta=100000.0,
    ),
    "seed_oss": NetworkKind(defaults={**_UNTIED, "attention_bias": True, "head_dim": 128}),
    "ernie4_5": NetworkKind(
        defaults={"tie_word_embeddings": True, "use_bias": False, "head_dim": 128}, theta=500000.0
    ),
    "gpt_oss": NetworkKind(
        _SILU
        | {"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,), "attention_bias": (True,)}
        | {"tie_word_embeddings": (False,)},
        theta=150000.0,
        has_window=True,
    ),
    "deepseek_v2": NetworkKind(
        _SILU | {"mlp_bias": (False,), "norm_topk_prob": (False,), "tie_word_embeddings": (False,)},
        {"n_shared_experts": 2, "n_routed_experts": 64, "topk_method": "greedy"},
        has_scaling=True,
    ),
    "deepseek_v3": NetworkKind(
        _SILU | {"tie_word_embeddings": (False,), "rope_interleave": (True,)},
        {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5}
        | {"first_k_dense_replace": 3, "n_shared_experts": 1, "n_routed_experts": 256},
        has_scaling=True,
    ),
    "gpt2": NetworkKind(
        {
            "activation_function": _TANH,
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        },
        names={"n_positions": "n_ctx"},
    ),
}
