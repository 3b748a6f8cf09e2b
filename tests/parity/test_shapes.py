"""The training of the model of examples/shapes, compared with diffusers."""

from __future__ import annotations

import os
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import network  # of examples/shapes
    import torch

    from tests.parity.make_model import reference

from composing import (
    compose,
    held_out_scenes,
)

from benchmarks import quality
from clowder_aimage.layout import ImageLayout
from tests.process import run

_FEW = """
import data
data.CHUNK = 20
import autoencoder, train
autoencoder.VAE_BATCH, train.BATCH = 4, 8
train.main()
"""
SHAPES = Path(__file__).parents[2] / "examples" / "shapes"
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]


@torch.no_grad()
def test_a_training_batch_is_what_the_transformer_says() -> None:
    """The batched way through its layers, next to its own ``forward``, captions of two lengths."""
    torch.manual_seed(3)
    tokenizer = network.make_tokenizer()
    transformer, text_encoder = (
        network.make_transformer(),
        network.make_text_encoder(len(tokenizer)),
    )
    captions = ["red star", "a large green triangle to the left of a small blue cross on black"]
    ids, lengths = network.encode_captions(tokenizer, captions)
    assert lengths[0] < lengths[1]
    features = network.embed(text_encoder, ids, lengths)
    latents, time = torch.randn(2, 16, 12, 8), torch.rand(2)
    said = network.velocity(transformer, latents, time, features, lengths)
    texts = [one[:length] for one, length in zip(features, lengths, strict=True)]
    own = transformer(list(latents[:, :, None]), time, texts, return_dict=False)[0]
    assert (said - torch.stack(own)[:, :, 0]).abs().max() < 1e-5 * said.abs().max()


def test_every_caption_fits_a_training_batch() -> None:
    rng = random.Random(5)
    captions = [compose(rng, 64, 64).caption for _ in range(1000)]
    ids, _ = network.encode_captions(network.make_tokenizer(), captions)  # raises, if not
    assert len(ids) == 1000


def test_guidance_leads_away_from_what_learned_for_a_short_time() -> None:
    def answer(network: float, noisy: torch.Tensor, *_: object) -> torch.Tensor:
        return noisy * network

    import train

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "embed", lambda *_: None)
        aim = train.guided((3.0, 0.0), (2.0, 0.0), answer)
        said = aim(torch.ones(2), torch.ones(1), torch.ones(1), torch.ones(1))
    assert said.tolist() == [3.0 + train.GUIDANCE * (3.0 - 2.0)] * 2


@pytest.mark.slow
def test_the_program_trains_and_writes_what_diffusers_opens(tmp_path: Path) -> None:
    """Two steps of each stage, with few scenes."""
    stages = ("vae", "", "weak", "guided", "tune")
    small = ["--scenes", "1"]
    for stage in stages:
        small += [f"--{stage}-steps".replace("---", "--"), "2"]
    done = run(
        [sys.executable, "-W", "ignore", "-c", _FEW, str(tmp_path / "model"), *small],
        env=os.environ | {"PYTHONPATH": str(SHAPES)},
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    pipeline = reference(tmp_path / "model")
    made = pipeline("a red circle", width=64, height=96, num_inference_steps=2, guidance_scale=0.0)
    assert made.images[0].size == (64, 96)


def test_the_trained_model_makes_the_pictures_of_diffusers(tmp_path: Path) -> None:
    """Every 100th held-out scene; benchmarks/quality.py compares all 300."""
    model = SHAPES / "model"
    scenes = held_out_scenes()
    asked = [quality.request(scenes[seed], seed) for seed in range(0, 300, 100)]
    pipeline, _ = quality.load(model, "float32", ImageLayout(tmp_path))
    make = quality.reference(model)
    for one in asked:
        away = np.abs(quality.picture(pipeline, one).astype(int) - make(one))
        assert away.max() <= 1, one.prompt
