"""Comparison of our pipeline with diffusers', by module: maxima of absolute differences."""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ZImagePipeline as Reference

from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.flow.denoiser import Drawing
from clowder_aimage.model.pipeline import Image, PictureInput, Preview, Step
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
    final, picture = run(pipeline, request)
    return {
        "text": embeds[0].numpy(),
        "velocity": velocity[:, 0].numpy(),
        "decoded": decoded.numpy(),
        "sigmas": pipeline.scheduler.sigmas.numpy(),
        "latents": final,
        "picture": picture,
    }


def run(pipeline: Any, request: GenerateRequest, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """Run diffusers' pipeline once, with ``more`` parameters: the last latents, and the picture."""
    seen: list[torch.Tensor] = []

    def note(_: Any, __: int, ___: Any, values: dict[str, Any]) -> dict[str, Any]:
        seen.append(values["latents"])
        return values

    guided: dict[str, Any] = {"cfg_truncation": request.guidance.end}
    guided |= {"cfg_normalization": request.guidance.normalization or False}
    known = inspect.signature(pipeline.__call__).parameters
    image = pipeline(
        prompt=request.prompt,
        height=request.sampling.height,
        width=request.sampling.width,
        num_inference_steps=request.sampling.steps,
        guidance_scale=request.guidance.scale,
        negative_prompt=request.guidance.negative,
        generator=torch.Generator().manual_seed(request.sampling.seed),
        callback_on_step_end=note,
        output_type="pil",
        **{name: value for name, value in guided.items() if name in known},
        **more,
    ).images[0]
    return seen[-1][0].numpy(), np.asarray(image)


def made(
    pipeline: Any, request: GenerateRequest, given: PictureInput | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Run our pipeline once: the latents after each step, and the pictures with their previews."""
    states: list[np.ndarray] = []
    take_step = Drawing.take_step

    def note(drawing: Drawing) -> None:
        take_step(drawing)
        states.append(pipeline.library.to_floats(drawing.latents))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drawing, "take_step", note)
        events = [*pipeline.generate(request, given)]
    pictures = [one.pixels for one in events if isinstance(one, Image | Preview)]
    assert sum(isinstance(one, Step) for one in events) == len(states)
    return states, pictures


def check(
    ours: Any, theirs: Any, request: GenerateRequest, given: PictureInput | None, **more: Any
) -> np.ndarray:
    """Compare the last latents and the picture; return ours."""
    latents, picture = run(theirs, request, **more)
    states, (found,) = made(ours, request, given)
    message = f"AIMAGE_PARITY_SEED={os.environ['AIMAGE_PARITY_SEED']}: {request}"
    bound = 1e-4 * max(1.0, float(np.abs(latents).max()))
    assert np.abs(states[-1] - latents).max() <= bound, message
    assert np.abs(found.astype(int) - picture).max() <= 1, message
    return found
