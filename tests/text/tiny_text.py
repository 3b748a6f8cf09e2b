"""Tiny language models with random weights and a real tokenizer, made without a network.

Random text never ends by itself: the rows of special tokens are nearly zero. ``says`` makes a model
that gives one answer to every prompt, then ends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.text.chat_template import CHATML, LLAMA, QWEN3

VOCABULARY = 400
CONTEXT = 512
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # not special in Qwen3 either
_HEADER = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
_LLAMA = (*_HEADER, "<|eot_id|>", "<|python_tag|>")
# Special tokens, other added tokens, the template, and the tokens bos, eos and pad
KINDS: dict[str, Any] = {
    "qwen3": (_CHATML, _MARKS, QWEN3, None, "<|im_end|>", "<|endoftext|>"),
    "qwen2": (_CHATML, (), CHATML, None, "<|im_end|>", "<|endoftext|>"),
    "llama": (_LLAMA, (), LLAMA, "<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"),
}
_CLASSES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
_TEXT = """the red ball is on the table and the blue cube is under the chair
a small green circle at the top left of a large yellow square in the middle of the picture
what is the weather in the city today? the answer is a number between one and nine hundred
user system assistant name arguments parameters function string object description type
Größe, été, naïve, 東京, Привет, 🙂🎈
"""
Weights = dict[str, npt.NDArray[np.float32]]


def write_model(
    directory: Path,
    kind: str = "qwen3",
    seed: int = 0,
    *,
    says: Sequence[str] = (),
    template: str | None = None,
    generation: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write a Transformers directory and return it.

    Args:
        directory: It is created.
        kind: "qwen3" (tied embeddings, tools and thinking), "qwen2" (tied, biases, neither), or
            "llama" (tools, a token that begins each text).
        seed: Decides the weights.
        says: Different pieces, at most half the width. Each becomes a token, and the answer to
            every prompt is these tokens; the embeddings are not tied then. None may be the last
            token of the prompt, which is a line break in these templates.
        template: In place of the chat template of the kind.
        generation: Further fields of generation_config.json.
        config: Further fields of config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    special, marks, own, bos, eos, pad = KINDS[kind]
    tokenizer = make_tokenizer(
        special, (*marks, *(one for one in says if one not in (*marks, *special)))
    )
    fields = make_config(kind, tokenizer, says) | config
    save_file(make_weights(fields, tokenizer, seed, says, eos), directory / "model.safetensors")
    tokenizer.save(str(directory / "tokenizer.json"))
    ends = [tokenizer.token_to_id(token) for token in (eos, pad)]
    _write(directory / "config.json", fields)
    _write(directory / "generation_config.json", {"eos_token_id": ends} | (generation or {}))
    texts = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    known = {"chat_template": template or own, "tokenizer_class": "PreTrainedTokenizerFast"}
    _write(directory / "tokenizer_config.json", texts | known)
    return directory


def add_pooling(directory: Path, mode: str = "mean_tokens") -> Path:
    """Make a model one of sentence-transformers, which computes embeddings."""
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (kind, path) in enumerate([("Transformer", ""), ("Pooling", "1_Pooling")])
    ]
    (directory / "modules.json").write_text(json.dumps(modules), "utf-8")
    (directory / "1_Pooling").mkdir()
    _write(directory / "1_Pooling/config.json", {f"pooling_mode_{mode}": True})
    return directory


def make_tokenizer(special: Sequence[str], other: Sequence[str] = ()) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 32,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in other])
    return tokenizer


def make_config(kind: str, tokenizer: Tokenizer, says: Sequence[str]) -> dict[str, Any]:
    """Return config.json; its vocabulary is a multiple of 8 and may exceed the tokenizer's."""
    eos = tokenizer.token_to_id(KINDS[kind][4])
    count = tokenizer.get_vocab_size()
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": max(VOCABULARY, -(-count // 8) * 8),
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": kind != "llama" and not says,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": eos,
        "torch_dtype": "float32",
    }


def make_weights(
    config: dict[str, Any], tokenizer: Tokenizer, seed: int, says: Sequence[str], eos: str
) -> Weights:
    """Return the tensors by Hugging Face's names, in float32."""
    draw = np.random.default_rng(seed)
    width, heads, size = (config[key] for key in ("hidden_size", "num_attention_heads", "head_dim"))
    groups, inner = config["num_key_value_heads"] * size, config["intermediate_size"]

    def random(*shape: int) -> npt.NDArray[np.float32]:
        scale = 1 / math.sqrt(shape[-1])
        return (draw.standard_normal(shape) * scale).astype(np.float32)

    table = random(config["vocab_size"], width)
    special = list(tokenizer.get_added_tokens_decoder())
    table[special] *= 0.01
    weights = {"model.embed_tokens.weight": table, "model.norm.weight": 1 + random(width)}
    for index in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj.weight": random(heads * size, width),
            "self_attn.k_proj.weight": random(groups, width),
            "self_attn.v_proj.weight": random(groups, width),
            "self_attn.o_proj.weight": random(width, heads * size),
            "mlp.gate_proj.weight": random(inner, width),
            "mlp.up_proj.weight": random(inner, width),
            "mlp.down_proj.weight": random(width, inner),
            "input_layernorm.weight": 1 + random(width),
            "post_attention_layernorm.weight": 1 + random(width),
        }
        if config["model_type"] == "qwen3":
            layer |= {f"self_attn.{one}_norm.weight": 1 + random(size) for one in "qk"}
        if config["model_type"] == "qwen2":
            layer |= {
                f"self_attn.{one}_proj.bias": random(heads * size if one == "q" else groups)
                for one in "qkv"
            }
        weights |= {f"model.layers.{index}.{name}": value for name, value in layer.items()}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = random(config["vocab_size"], width)
        weights["lm_head.weight"][special] *= 0.01
    if says:
        ids = [tokenizer.token_to_id(piece) for piece in (*says, eos)]
        _plant(weights, [token for token in ids if token is not None])
    return weights


def _plant(weights: Weights, chain: list[int]) -> None:
    """Make each piece lead to the next, the last to the end, and all other tokens to the first."""
    pieces = chain[:-1]
    assert len(set(chain)) == len(chain)
    table, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    assert len(pieces) < table.shape[1] // 2
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value[:] = 0  # the layers add nothing
    weights["model.norm.weight"][:] = 1
    head[:] = 0
    table[:, : len(pieces) + 1] = 0
    table[:, 0] = 1
    head[pieces[0], 0] = 20
    for place, (piece, following) in enumerate(pairwise(chain)):
        table[piece] = 0
        table[piece, place + 1] = 1
        head[following, place + 1] = 20


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
