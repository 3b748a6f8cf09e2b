"""Requests and outputs for comparisons of a pipeline with diffusers.

``tests/parity`` compares with diffusers itself; ``tests/model/oracle`` has recorded outputs.
"""

from __future__ import annotations

import numpy as np

from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.backend import mx
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.pipeline import Image, Step
from tests.model.denoise import denoise

Outputs = dict[str, np.ndarray]
"""text (tokens, hidden); velocity (channels, height, width), of one unguided forward pass;
decoded (height, width, 3), of fixed random latents;
sigmas (steps + 1,); latents (channels, height, width), after the last step; picture (height,
width, 3), uint8.
"""
TIME = 0.3  # of the one forward pass
TOLERANCE = 1e-4
LONG = "the other thing in a re-read book, 3 of 4; " * 3  # far over 32 tokens
CASES = {
    "square": GenerateRequest.of("a red fox", width=64, height=64, steps=8, seed=42),
    "wide": GenerateRequest.of("a red fox", width=96, height=48, steps=3, seed=7),
    "long": GenerateRequest.of(LONG + "ünï ♥ 狐", width=48, height=80, steps=2, seed=2**40 + 5),
    "guided": GenerateRequest.of(
        "two foxes", width=64, height=64, steps=4, seed=3, negative=LONG, guidance=3.5
    ),
    # 32 image tokens: no pads
    "guided by nothing": GenerateRequest.of(
        "two foxes", width=64, height=128, steps=2, seed=9, guidance=0.7
    ),
    # The times of the steps are 0, 0.1 in float32, which is above 0.1, 0.25 and 0.5
    "guided once": GenerateRequest.of(
        "an owl", width=48, height=48, steps=4, guidance=3.0, guidance_end=0.1
    ),
    "guided for three steps": GenerateRequest.of(
        "an owl", width=48, height=48, steps=4, guidance=3.0, guidance_end=0.25
    ),
}


def inputs(request: GenerateRequest, channels: int, scale: int) -> np.ndarray:
    """Return fixed random latents for a picture of the request's size."""
    random = np.random.RandomState(7)
    rows, columns = request.sampling.height // scale, request.sampling.width // scale
    return random.standard_normal((channels, rows, columns)).astype(np.float32)


def ours(pipeline: FlowPipeline, request: GenerateRequest) -> Outputs:
    """Return the outputs of our pipeline."""
    transformer, vae = pipeline.networks.transformer.get(), pipeline.networks.vae.get()
    channels, scale = transformer.config.in_channels, vae.config.scale
    latents = inputs(request, channels, scale)
    text = pipeline.prompts.encode(request.prompt)
    caption = transformer.build_caption(text)
    schedule = pipeline.schedule(request)
    noise = pipeline.denoiser.draw_noise(request, request.sampling.seed)
    *_, final = denoise(pipeline, noise, schedule, pipeline.build_conditioning(request))
    *steps, image = pipeline.generate(request)
    assert isinstance(image, Image)
    assert steps == [
        Step(index + 1, request.sampling.steps, 0) for index in range(request.sampling.steps)
    ]
    return {
        "text": np.array(text),
        "velocity": np.array(transformer(mx.array(latents), TIME, caption)),
        "decoded": np.array(vae.decode(mx.array(latents))),
        "sigmas": schedule.sigmas,
        "latents": np.array(final),
        "picture": image.pixels,
    }


def differences(one: Outputs, other: Outputs) -> dict[str, float]:
    """Return the maximum difference of every output that both have; pictures in steps of 1/255."""
    result = {}
    for name in one.keys() & other.keys():
        assert one[name].shape == other[name].shape, name
        spread = np.abs(one[name].astype(np.float64) - other[name].astype(np.float64))
        result[name] = float(spread.max())
    return result


def excess(found: dict[str, float]) -> dict[str, float]:
    """Return the differences above the tolerance (or NaN)."""
    return {
        name: value
        for name, value in found.items()
        if not value <= (1 if name == "picture" else TOLERANCE)
    }
