"""Create small random Z-Image models with diffusers, saved by its ``save_pretrained``.

Norms, biases and pad tokens are random: default values (1 and 0) would hide mistakes.
Run as a program it recreates ``examples/tiny``:

    python tests/parity/make_model.py examples/tiny
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
OTHER_TEMPLATE = """{# loops, filters and globals that templates in the wild use #}
{%- set ns = namespace(turn=0) -%}
{%- for message in messages %}
    {%- if message['role'] not in ['user', 'assistant'] %}
        {{- raise_exception('unknown role') }}
    {%- endif %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
    {%- set ns.turn = ns.turn + 1 %}
    {{- '<|im_start|>[' ~ ns.turn ~ '] ' ~ (message | tojson) ~ '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '\\n' + eos_token + (' think' if enable_thinking else '') }}{% endif %}
"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


@dataclass
class Dims:
    """The dimensions of one model; the defaults are those of examples/tiny."""

    text_type: str = "qwen3"  # or qwen2, qwen3-lm (with a language head)
    text_hidden: int = 32
    text_inter: int = 64
    text_layers: int = 3
    text_heads: int = 4
    text_kv_heads: int = 2
    text_head_dim: int = 16
    text_extra: Mapping[str, Any] = field(default_factory=dict)
    heads: int = 2
    axes: tuple[int, int, int] = (8, 8, 8)
    layers: int = 2
    refiners: int = 1
    qk_norm: bool = True
    norm_eps: float = 1e-5
    latents: int = 16
    vae_channels: tuple[int, ...] = (8, 8, 16, 16)
    vae_layers: int = 1
    vae_groups: int = 4
    vae_attention: bool = True
    vae_quant: bool = False
    scaling: float = 0.3611
    vae_shift: float = 0.1159
    scheduler: Mapping[str, Any] = field(default_factory=lambda: {"shift": 3.0})
    template: str = CHAT_TEMPLATE
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "10GB"


def draw(seed: int, **fixed: Any) -> Dims:
    """Return random dimensions, except the ``fixed`` ones.

    There are at least two heads: with a width of a dozen channels, guidance amplifies rounding
    errors to the tolerance, in the reference as well.
    """
    rng = random.Random(seed)
    axes = tuple(rng.choice((4, 8, 12)) for _ in range(3))
    kv_heads = rng.choice((1, 2))
    groups = rng.choice((2, 4))
    blocks = rng.choice((3, 4))
    drawn: dict[str, Any] = {
        "text_hidden": rng.choice((24, 32, 40)),
        "text_inter": rng.choice((48, 72)),
        "text_layers": rng.choice((2, 3, 4)),
        "text_heads": kv_heads * rng.choice((1, 2, 3)),
        "text_kv_heads": kv_heads,
        "text_head_dim": rng.choice((8, 12, 16)),
        "heads": rng.choice((2, 3, 4)),
        "axes": axes,
        "layers": rng.choice((1, 2, 3)),
        "refiners": rng.choice((1, 2)),
        "latents": rng.choice((4, 8, 16)),
        "vae_channels": tuple(groups * rng.choice((2, 3, 4)) for _ in range(blocks)),
        "vae_layers": rng.choice((1, 2)),
        "vae_groups": groups,
        "vae_attention": rng.random() < 0.7,
        "vae_quant": rng.random() < 0.4,
        "scaling": round(rng.uniform(0.2, 1.5), 4),
        "vae_shift": round(rng.uniform(-0.2, 0.2), 4),
        "norm_eps": rng.choice((1e-5, 1e-6)),
        "scheduler": {"shift": rng.choice((1.0, 3.0, 6.0))},
    }
    return Dims(**{**drawn, **fixed})


def make(directory: Path, seed: int = 0, dims: Dims | None = None) -> ZImagePipeline:
    """Write a diffusers directory and return its pipeline, reloaded in float32."""
    write(directory, seed, dims or draw(seed))
    return reference(directory)


def write(directory: Path, seed: int, dims: Dims) -> None:
    """Write a diffusers directory. Networks are made on the default device."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(dims.template)
    pipeline = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**dims.scheduler),
        vae=_vae(dims),
        text_encoder=_text_encoder(dims, len(tokenizer)),
        tokenizer=tokenizer,
        transformer=_transformer(dims),
    )
    for network in (pipeline.vae, pipeline.text_encoder, pipeline.transformer):
        randomise(network)
        network.to(dims.dtype)
    pipeline.save_pretrained(directory, max_shard_size=dims.max_shard_size)


def reference(directory: Path) -> ZImagePipeline:
    """Return the diffusers pipeline of a directory, in float32."""
    pipeline = ZImagePipeline.from_pretrained(directory, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make_tokenizer(template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a few merges and Qwen's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "n"), ("r", "e"), ("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ġ", "the")]
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    for first, second in merges:
        vocabulary.setdefault(first + second, len(vocabulary))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )


def _text_encoder(dims: Dims, vocabulary: int) -> torch.nn.Module:
    options: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": dims.text_hidden,
        "intermediate_size": dims.text_inter,
        "num_hidden_layers": dims.text_layers,
        "num_attention_heads": dims.text_heads,
        "num_key_value_heads": dims.text_kv_heads,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "tie_word_embeddings": True,
        **dims.text_extra,
    }
    if dims.text_type == "qwen2":
        options["hidden_size"] = dims.text_heads * dims.text_head_dim
        return Qwen2Model(Qwen2Config(**options))
    kind = Qwen3ForCausalLM if dims.text_type == "qwen3-lm" else Qwen3Model
    return kind(Qwen3Config(head_dim=dims.text_head_dim, **options))


def _transformer(dims: Dims) -> ZImageTransformer2DModel:
    features = dims.text_hidden
    if dims.text_type == "qwen2":
        features = dims.text_heads * dims.text_head_dim
    return ZImageTransformer2DModel(
        in_channels=dims.latents,
        dim=dims.heads * sum(dims.axes),
        n_layers=dims.layers,
        n_refiner_layers=dims.refiners,
        n_heads=dims.heads,
        n_kv_heads=dims.heads,
        norm_eps=dims.norm_eps,
        qk_norm=dims.qk_norm,
        cap_feat_dim=features,
        axes_dims=list(dims.axes),
        axes_lens=[1536, 512, 512],
    )


def _vae(dims: Dims) -> AutoencoderKL:
    blocks = len(dims.vae_channels)
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * blocks,
        up_block_types=["UpDecoderBlock2D"] * blocks,
        block_out_channels=list(dims.vae_channels),
        layers_per_block=dims.vae_layers,
        latent_channels=dims.latents,
        norm_num_groups=dims.vae_groups,
        sample_size=64,
        scaling_factor=dims.scaling,
        shift_factor=dims.vae_shift,
        use_quant_conv=dims.vae_quant,
        use_post_quant_conv=dims.vae_quant,
        mid_block_add_attention=dims.vae_attention,
    )


@torch.no_grad()
def randomise(network: torch.nn.Module) -> None:
    """Set random norms (1 + 0.2 N), biases (0.1 N) and pad tokens (0.5 N).

    The inputs of some norms are small enough for their epsilon to matter.
    """
    normed = any(name.endswith("attention.norm_q.weight") for name, _ in network.named_parameters())
    for name, parameter in network.named_parameters():
        noise = torch.randn_like(parameter)
        if "pad_token" in name:
            parameter.copy_(0.5 * noise)
        elif name.endswith(".bias"):
            parameter.copy_(0.1 * noise)
        elif parameter.ndim == 1:
            parameter.copy_(1 + 0.2 * noise)
        elif parameter.ndim >= 2 and "embed_tokens" not in name:
            size = parameter[0].numel() ** -0.5
            if normed and name.endswith(("attention.to_q.weight", "attention.to_k.weight")):
                size *= 0.03
            parameter.copy_(size * noise)
        if name.startswith(("encoder.conv_in.", "decoder.conv_in.")):
            parameter.mul_(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    make(options.directory, options.seed, Dims(dtype=torch.bfloat16))


if __name__ == "__main__":
    main()
