"""Previews from latents: the colours of the FLUX.1 VAE, and when they are used."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.flow.memory_budget import Stage
from clowder_aimage.model.flow.networks import FlowNetworks
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.pipeline import Image, Preview
from clowder_aimage.model.zimage import family as zimage
from clowder_aimage.model.zimage import latent_colour
from clowder_aimage.model.zimage.config import VaeConfig
from clowder_aimage.model.zimage.latent_colour import has_colours, to_rgb

FLUX = VaeConfig(3, 16, (128, 256, 512, 512), 2, 32, False, False, True, 0.3611, 0.1159)
REQUEST = GenerateRequest.of("a fox", width=32, height=48, steps=4, previews=2)


def grey(red: float, green: float, blue: float) -> list[int]:
    return [round((value * 0.5 + 0.5) * 255) for value in (red, green, blue)]


def test_empty_latents_have_the_colour_of_the_bias() -> None:
    shown = to_rgb(np.zeros((16, 2, 3), np.float32), 4)
    assert shown.shape == (8, 12, 3) and shown.dtype == np.uint8
    assert {tuple(pixel) for row in shown for pixel in row} == {
        tuple(grey(-0.0329, -0.0718, -0.0851))
    }


def test_each_channel_adds_its_factors() -> None:
    """Channel 13 darkens, red first; channel 9 lightens red and takes from blue."""
    latents = np.zeros((16, 1, 2), np.float32)
    latents[13, 0, 0], latents[9, 0, 1] = 2, 1
    left, right = to_rgb(latents, 1)[0].tolist()
    assert left == grey(-0.0329 - 0.2528, -0.0718 - 0.1044, -0.0851 - 0.2206)
    assert right == grey(-0.0329 + 0.1008, -0.0718 + 0.0755, -0.0851 - 0.0421)


def test_values_out_of_range_are_clipped() -> None:
    latents = np.full((16, 1, 1), 1e6, np.float32)
    assert set(to_rgb(latents, 1).ravel().tolist()) <= {0, 255}
    assert to_rgb(np.full((16, 1, 1), np.nan, np.float32), 1).shape == (1, 1, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"scaling_factor": 0.18215},
        {"shift_factor": 0.0},
        {"latent_channels": 32},
        {"block_out_channels": (64, 128, 256, 256)},
    ],
)
def test_other_autoencoders_have_no_known_colours(change: dict[str, object]) -> None:
    assert has_colours(FLUX)
    assert not has_colours(dataclasses.replace(FLUX, **change))  # type: ignore[arg-type]


def test_a_model_with_known_colours_does_not_decode_previews(
    pipeline: FlowPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels = pipeline.networks.vae.config.latent_channels
    factors = [(0.1, 0.0, -0.1)] * channels
    monkeypatch.setattr(latent_colour, "_FACTORS", factors)
    monkeypatch.setattr(zimage, "has_colours", lambda _: True)
    decoded = []
    decode = FlowNetworks.decode

    def counted(self: FlowNetworks, found: Any) -> Any:
        decoded.append(found)
        return decode(self, found)

    monkeypatch.setattr(FlowNetworks, "decode", counted)

    def vae_of(stages: tuple[Stage, ...]) -> list[bool]:
        return [pipeline.networks.vae in stage.modules for stage in stages]

    assert vae_of(pipeline.list_stages(REQUEST)) == [False, False, True]
    events = list(pipeline.generate(REQUEST))
    assert [one.pixels.shape for one in events if isinstance(one, Preview)] == [(24, 16, 3)] * 2
    assert len([one for one in events if isinstance(one, Image)]) == len(decoded) == 1
    monkeypatch.setattr(zimage, "has_colours", lambda _: False)
    assert vae_of(pipeline.list_stages(REQUEST)) == [False, True, True]
