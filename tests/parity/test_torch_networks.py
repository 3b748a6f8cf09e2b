"""The networks on PyTorch with the tensors of those of diffusers, on models drawn anew."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from diffusers import Flux2Transformer2DModel, ZImageTransformer2DModel

    from tests.parity.make_model import randomise

from clowder_aimage.model.flux2.config import TransformerConfig as Flux2Config
from clowder_aimage.model.torch.flux2.networks import Flux2Network
from clowder_aimage.model.torch.library import TorchLibrary
from clowder_aimage.model.torch.zimage.networks import ZImageNetwork
from clowder_aimage.model.zimage.config import TransformerConfig as ZImageConfig
from tests.adapter.vectors import TINY

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
SEED = int(os.environ["AIMAGE_PARITY_SEED"])  # tests/conftest.py draws one


def load(kind: Any, config: Any, theirs: Any, dtype: torch.dtype, *, is_joined: bool) -> Any:
    """Return our network with the tensors of diffusers'."""
    network = kind(config, TorchLibrary("cpu", dtype))
    state = {network.sanitize(name): value for name, value in theirs.state_dict().items()}
    for name in network.module.state_dict():
        path, _, key = name.rpartition(".")
        value = torch.nn.Parameter(state.pop(name).to(dtype), requires_grad=False)
        setattr(network.module.get_submodule(path), key, value)
    assert not state
    network.finish(in_layers=False, is_copied=is_joined)
    return network


def make_zimage(rng: random.Random) -> tuple[Any, Any]:
    fields: dict[str, Any] = {"dim": 72, "n_heads": 3, "n_kv_heads": 3, "n_layers": 3}
    fields |= {"axes_dims": [8, 12, 4], "axes_lens": [256, 64, 64], "cap_feat_dim": 40}
    fields |= {"in_channels": rng.choice((4, 8)), "n_refiner_layers": rng.choice((1, 2))}
    theirs = ZImageTransformer2DModel(**fields, qk_norm=rng.random() < 0.8)
    return theirs, ZImageConfig.parse("config.json", public_fields(theirs))


def make_flux2(rng: random.Random) -> tuple[Any, Any]:
    fields: dict[str, Any] = {"num_layers": 2, "num_single_layers": 3, "attention_head_dim": 24}
    fields |= {"num_attention_heads": 3, "joint_attention_dim": 40, "mlp_ratio": 2.0}
    fields |= {"axes_dims_rope": [8, 8, 4, 4], "in_channels": rng.choice((8, 16))}
    theirs = Flux2Transformer2DModel(**fields, guidance_embeds=False)
    return theirs, Flux2Config.parse("config.json", public_fields(theirs))


def public_fields(network: Any) -> dict[str, Any]:
    fields = {name: value for name, value in network.config.items() if name[0] != "_"}
    return {name: [*value] if isinstance(value, tuple) else value for name, value in fields.items()}


def run_zimage(network: Any, latents: Any, features: Any, time: float) -> Any:
    if isinstance(network, ZImageNetwork):
        return network(latents, time, network.build_caption(features))
    with torch.inference_mode():
        arguments = [latents[:, None]], torch.tensor([time]), [features]
        return network(*arguments, return_dict=False)[0][0][:, 0]


def run_flux2(network: Any, latents: Any, features: Any, time: float) -> Any:
    if isinstance(network, Flux2Network):
        return network(latents, time, network.build_caption(features), None)
    channels, height, width = latents.shape
    places = torch.cartesian_prod(*map(torch.arange, (1, height, width, 1)))
    words = torch.nn.functional.pad(torch.arange(len(features))[:, None], (3, 0))
    with torch.inference_mode():
        output = network(
            hidden_states=latents.reshape(channels, -1).T[None],
            encoder_hidden_states=features[None],
            timestep=torch.tensor([time]),
            img_ids=places,
            txt_ids=words,
            return_dict=False,
        )[0][0]
    return output.T.reshape(latents.shape)


FAMILIES: dict[str, tuple[Any, Callable[..., Any], Callable[..., Any]]] = {
    "zimage": (ZImageNetwork, make_zimage, run_zimage),
    "flux2": (Flux2Network, make_flux2, run_flux2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_velocities_are_those_of_diffusers(family: str) -> None:
    """In float32 within rounding; in bfloat16 no further from it than diffusers' are."""
    kind, make, run = FAMILIES[family]
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    theirs, config = make(rng)
    randomise(theirs)
    size, length = (config.in_channels, 2 * rng.randrange(2, 9), 2 * rng.randrange(2, 9)), 37
    latents, features = torch.randn(size), torch.randn(length, 40)
    exact = run(theirs, latents, features, 0.3)
    largest = float(exact.abs().max())
    for is_joined in (False, True):
        ours = load(kind, config, theirs, torch.float32, is_joined=is_joined)
        found = run(ours, latents, features, 0.3)
        assert found.shape == exact.shape
        assert float((found - exact).abs().max()) <= 2e-5 * largest, f"AIMAGE_PARITY_SEED={SEED}"
    inputs = latents.bfloat16(), features.bfloat16()
    ours = load(kind, config, theirs, torch.bfloat16, is_joined=True)
    errors = [run(one, *inputs, 0.3).float() - exact for one in (ours, theirs.bfloat16())]
    near, far = (float(error.square().mean().sqrt()) for error in errors)
    assert near <= 1.1 * far < 0.1 * largest, f"AIMAGE_PARITY_SEED={SEED}"


def test_a_picture_imports_neither_diffusers_nor_transformers_nor_mlx(tmp_path: Any) -> None:
    """They take most of the start of a process."""
    program = f"""
import sys
from pathlib import Path
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.loader import load_pipeline
from tests.model.model_blobs import import_directory
stored = import_directory(Path({str(TINY)!r}), Path({str(tmp_path)!r}))
pipeline = load_pipeline(*stored, backend="torch", dtype="float32")
*_, picture = pipeline.generate(GenerateRequest.of("a fox", width=32, height=32, steps=1))
print(picture.pixels.shape, *({{"diffusers", "transformers", "mlx"}} & sys.modules.keys()))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == "(32, 32, 3)\n"
