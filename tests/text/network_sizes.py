"""Small configurations of the promised networks, as transformers 5 and 4 write them."""

from __future__ import annotations

from typing import Any

from clowder_aimage.model.rope_setting import FULL, SLIDING

_USUAL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps"), 1e-5),
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_HEAD = {"head_dim": 16}
_LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_PERIOD = {"num_hidden_layers": 7, "sliding_window": 9}
_GEMMA3 = {**_HEAD, **_PERIOD, "query_pre_attn_scalar": 20}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {**_HEAD, "num_local_experts": 4},
    "qwen2": {},
    "qwen2_moe": {**_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3": _HEAD,
    "qwen3_moe": {**_EXPERTS, **_HEAD, "moe_intermediate_size": 32},
    "gemma2": {**_HEAD, "query_pre_attn_scalar": 20},
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "phi": {},
    "phi3": {},
    "olmo2": {},
    "olmo3": _PERIOD,
    "olmoe": _EXPERTS,
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "cohere": {},
    "cohere2": _PERIOD,
    "glm": _HEAD,
    "glm4": _HEAD,
    "smollm3": {"num_hidden_layers": 5},
    "nemotron": {},
    "stablelm": {},
    "helium": _HEAD,
    "seed_oss": _HEAD,
    "ernie4_5": _HEAD,
    "gpt_oss": {
        **_HEAD,
        **_PERIOD,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v2": {**_LATENT, "n_group": 1},
    "deepseek_v3": _LATENT,
}
_GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256, "layer_norm_epsilon": 1e-5}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
BASE = 5000.0
_LOCAL = {"rope_type": "default", "rope_theta": 777.0}
# Settings of rotary positions beyond the base
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 20.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "short_factor": [1 + 0.1 * index for index in range(8)],
        "long_factor": [2.0 + index for index in range(8)],
        "original_max_position_embeddings": 64,
    },
}
SHARED = ("phi", "phi3", "glm", "glm4", "nemotron", "stablelm")
"""The networks that may rotate a part of a head."""


def list_ropes(kind: str) -> tuple[str, ...]:
    """Return the kinds of scaling that transformers allows for a network."""
    if kind == "gpt2":
        return ()
    return ("default", "longrope") if kind == "phi3" else ("default", "linear", "yarn", "llama3")


def make_five(kind: str, rope: str = "default", vocabulary: int = 400) -> dict[str, Any]:
    """Return a configuration as transformers 5 writes it."""
    common = {"model_type": kind, "vocab_size": vocabulary}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "gpt2":
        return {**common, **_GPT2, **ends}
    values: dict[str, Any] = {"rope_type": rope, "rope_theta": BASE, **ROPES[rope]}
    if kind in SHARED and kind != "phi3":
        values["partial_rotary_factor"] = 0.5
    if "sliding_window" in SIZES[kind] and kind in ("gemma3", "gemma3_text", "olmo3"):
        local = _LOCAL if kind != "olmo3" else {**_LOCAL, "rope_theta": BASE}
        values = {FULL: values, SLIDING: local}
    text = {**_USUAL, **SIZES[kind], **ends, "rope_parameters": values}
    if kind == "gemma3":
        inner = {**text, "model_type": "gemma3_text", "vocab_size": vocabulary}
        return {"model_type": kind, "text_config": inner, "vision_config": _VISION}
    return {**common, **text}


def make_four(five: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of transformers 5 in the form of transformers 4."""
    if "text_config" in five:
        return {**five, "text_config": make_four(five["text_config"])}
    four = {key: value for key, value in five.items() if key != "rope_parameters"}
    if "num_local_experts" in four and five["model_type"] == "qwen3_moe":
        four["num_experts"] = four.pop("num_local_experts")
    if five["model_type"] == "gpt2":
        four["n_ctx"] = four["n_positions"]
    if "rope_parameters" not in five:
        return four
    values = dict(five["rope_parameters"])
    if FULL in values:
        four["rope_local_base_freq"] = values[SLIDING]["rope_theta"]
        values = dict(values[FULL])
    four["rope_theta"] = values.pop("rope_theta")
    if (share := values.pop("partial_rotary_factor", None)) is not None:
        four["partial_rotary_factor"] = share
    scaled = values["rope_type"] != "default"
    return {**four, "rope_scaling": {**values, "type": values["rope_type"]} if scaled else None}
