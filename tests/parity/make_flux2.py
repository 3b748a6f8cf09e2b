"""Create small random FLUX.2 [klein] models with diffusers, saved by its ``save_pretrained``."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.parity.make_model import make_tokenizer, randomise

LAYERS = 28  # of the text encoder: the features come from 9, 18 and 27


def make_flux2(directory: Path, seed: int, *, is_distilled: bool) -> Flux2KleinPipeline:
    """Write a diffusers directory with dimensions from the seed; return its pipeline, reloaded."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    hidden, groups = rng.choice((16, 24)), rng.choice((2, 4))
    latents, blocks = rng.choice((2, 4, 8)), rng.choice((4, 5))
    axes = [rng.choice((4, 8)) for _ in range(4)]
    heads = rng.choice((2, 3))
    text = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=rng.choice((1, 2)),
        head_dim=rng.choice((8, 12)),
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        tie_word_embeddings=True,
    )
    transformer = Flux2Transformer2DModel(
        in_channels=4 * latents,
        num_layers=rng.choice((1, 2)),
        num_single_layers=rng.choice((1, 3)),
        attention_head_dim=sum(axes),
        num_attention_heads=heads,
        joint_attention_dim=3 * hidden,
        mlp_ratio=rng.choice((2.0, 3.0)),
        axes_dims_rope=axes,
        rope_theta=rng.choice((500, 2000)),
        guidance_embeds=False,
    )
    vae = AutoencoderKLFlux2(
        down_block_types=["DownEncoderBlock2D"] * blocks,
        up_block_types=["UpDecoderBlock2D"] * blocks,
        block_out_channels=[groups * rng.choice((2, 3)) for _ in range(blocks)],
        layers_per_block=rng.choice((1, 2)),
        latent_channels=latents,
        norm_num_groups=groups,
        sample_size=64,
        use_quant_conv=rng.random() < 0.7,
        use_post_quant_conv=rng.random() < 0.7,
        mid_block_add_attention=rng.random() < 0.7,
    )
    pipeline = Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=Qwen3ForCausalLM(text),
        tokenizer=tokenizer,
        transformer=transformer,
        is_distilled=is_distilled,
    )
    for network in (vae, pipeline.text_encoder, transformer):
        randomise(network)
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 3)
    pipeline.save_pretrained(directory)
    reloaded = Flux2KleinPipeline.from_pretrained(directory, dtype=torch.float32)
    reloaded.set_progress_bar_config(disable=True)
    return reloaded
