"""FLUX.2 [klein] for step.py: a random model of reduced widths, and its parts in two tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.model.random_flux2 import CONFIGS, write_flux2

SHAPE = "flux2"
WORDS, SIDE = 512, 256  # tokens of a text, pixels of a picture
TIME = 0.25  # of the step, 0 to 1
HIDDEN = 256
_WIDTHS: dict[str, dict[str, Any]] = {
    "text_encoder": {
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN * 19 // 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 4096,
    },
    "transformer": {
        "in_channels": 128,
        "num_layers": 2,
        "num_single_layers": 8,
        "attention_head_dim": 128,
        "num_attention_heads": 4,
        "joint_attention_dim": 3 * HIDDEN,
        "axes_dims_rope": [32, 32, 32, 32],
    },
    "vae": {
        "block_out_channels": [32, 64, 128, 128],
        "layers_per_block": 2,
        "latent_channels": 32,
        "norm_num_groups": 32,
    },
}
Run = Callable[[], Any]


def build(directory: Path) -> Path:
    """Write the model as a diffusers directory, unless it is there already."""
    if not (directory / "vae").exists():
        configs = {name: CONFIGS[name] | widths for name, widths in _WIDTHS.items()}
        write_flux2(directory, configs=configs)
    return directory


def inputs() -> dict[str, Any]:
    """Return random latents, text features, tokens and pixels."""
    random, side = np.random.default_rng(1), SIDE // 16
    return {
        "latents": random.standard_normal((128, side, side)).astype(np.float32),
        "features": random.standard_normal((WORDS, 3 * HIDDEN)).astype(np.float32),
        "tokens": random.integers(0, 4096, WORDS),
        "pixels": random.uniform(-1, 1, (2 * SIDE, 2 * SIDE, 3)).astype(np.float32),
    }


def aimage(directory: Path, part: str, given: dict[str, Any]) -> Run:
    """Return the part of this project's pipeline."""
    from clowder_aimage.model.backend import mx
    from clowder_aimage.model.loader import load_pipeline
    from tests.model.model_blobs import import_directory

    pipeline = load_pipeline(*import_directory(directory, directory / "blobs"), dtype="float32")

    def evaluated(value: mx.array) -> mx.array:
        mx.eval(value)
        return value

    if part == "step":
        transformer = pipeline.networks.transformer.get()
        caption = transformer.build_caption(mx.array(given["features"]))
        mx.eval(caption.tokens, *caption.rope)
        latents = mx.array(given["latents"])
        return lambda: evaluated(transformer(latents, TIME, caption))
    if part == "decode":
        vae = pipeline.networks.vae.get()
        return lambda: evaluated(vae.decode(mx.array(given["latents"])))
    if part == "picture":
        pixels, reader = mx.array(given["pixels"]), pipeline.networks.picture_encoder.get()
        return lambda: evaluated(reader.encode(pixels)[0])
    encoder = pipeline.networks.text_encoder.get()
    return lambda: evaluated(encoder(mx.array(given["tokens"]), WORDS // 8))


def diffusers(directory: Path, part: str, given: dict[str, Any]) -> Run:
    """Return the part of diffusers; the text encoder is that of transformers."""
    import torch
    from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel
    from transformers import Qwen3ForCausalLM

    torch.set_grad_enabled(False)
    latents, features, tokens, pixels = (torch.tensor(value) for value in given.values())
    path = str(directory)
    if part == "step":
        transformer = Flux2Transformer2DModel.from_pretrained(path, subfolder="transformer").eval()
        places = Flux2KleinPipeline._prepare_latent_ids(latents[None])
        words, now = Flux2KleinPipeline._prepare_text_ids(features[None]), torch.tensor([TIME])
        step = {"timestep": now, "img_ids": places, "txt_ids": words, "return_dict": False}

        def run() -> Any:
            image = Flux2KleinPipeline._pack_latents(latents[None])
            found = transformer(image, encoder_hidden_states=features[None], **step)[0][0]
            return found.T.reshape(latents.shape)

        return run
    if part in ("decode", "picture"):
        vae = AutoencoderKLFlux2.from_pretrained(path, subfolder="vae").eval()
        mean, variance = vae.bn.running_mean, vae.bn.running_var + vae.config.batch_norm_eps
        if part == "decode":
            patches = latents * variance.sqrt()[:, None, None] + mean[:, None, None]
            cells = Flux2KleinPipeline._unpatchify_latents(patches[None])
            return lambda: vae.decode(cells).sample[0].permute(1, 2, 0)
        picture = pixels.permute(2, 0, 1)[None].contiguous()
        return lambda: vae.encode(picture).latent_dist.mean[0]
    encoder = Qwen3ForCausalLM.from_pretrained(path, subfolder="text_encoder").eval()
    mask = (torch.arange(WORDS) < WORDS // 8)[None].long()

    def encode() -> Any:
        states = encoder(tokens[None], mask, output_hidden_states=True).hidden_states
        return torch.cat([states[index][0] for index in (9, 18, 27)], dim=-1)

    return encode
