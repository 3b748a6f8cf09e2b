"""Comparison of our pipeline with diffusers', by module: maxima of absolute differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import ZImagePipeline as Reference

from clowder_aimage.model.pipeline import GenerateRequest
from tests.model.model_oracle import TIME, Outputs, inputs


@torch.no_grad()
def theirs(pipeline: Reference, request: GenerateRequest) -> Outputs:
    """Return the outputs of diffusers."""
    vae, transformer = pipeline.vae, pipeline.transformer
    latents = inputs(request, transformer.in_channels, pipeline.vae_scale_factor)
    embeds, _ = pipeline.encode_prompt(request.prompt, do_classifier_free_guidance=False)
    velocity = transformer(
        [torch.from_numpy(latents)[:, None]], torch.tensor([TIME]), embeds, return_dict=False
    )[0][0]
    scaled = torch.from_numpy(latents)[None] / vae.config.scaling_factor + vae.config.shift_factor
    decoded = vae.decode(scaled, return_dict=False)[0][0].permute(1, 2, 0)
    final = run(pipeline, request, "latent")
    return {
        "text": embeds[0].numpy(),
        "velocity": velocity[:, 0].numpy(),
        "decoded": decoded.numpy(),
        "sigmas": pipeline.scheduler.sigmas.numpy(),
        "latents": final.numpy(),
        "picture": run(pipeline, request, "pil"),
    }


def run(pipeline: Any, request: GenerateRequest, output: str, **more: Any) -> Any:
    """Run diffusers' pipeline once, with ``more`` parameters."""
    image = pipeline(
        request.prompt,
        height=request.height,
        width=request.width,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance,
        cfg_truncation=request.guidance_end,
        negative_prompt=request.negative,
        generator=torch.Generator().manual_seed(request.seed),
        output_type=output,
        **more,
    ).images[0]
    return image if output == "latent" else np.asarray(image)
