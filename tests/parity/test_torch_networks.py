"""The networks on PyTorch with the tensors of those of diffusers, on models drawn anew."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from diffusers import Flux2Transformer2DModel, ZImageTransformer2DModel

    from tests.parity.compiling import count_compilations
    from tests.parity.make_model import randomise

from clowder_aimage.model.flux2.config import TransformerConfig as Flux2Config
from clowder_aimage.model.flux2.reference_picture import ReferenceTokens, build_positions
from clowder_aimage.model.library_choice import TorchTuning
from clowder_aimage.model.torch import compiler
from clowder_aimage.model.torch.flux2.networks import Flux2Network
from clowder_aimage.model.torch.graph import PassCache
from clowder_aimage.model.torch.library import TorchLibrary
from clowder_aimage.model.torch.zimage.networks import ControlNetwork, ZImageNetwork
from clowder_aimage.model.zimage.config import TransformerConfig as ZImageConfig
from clowder_aimage.model.zimage.control_config import REFINER, ControlNetConfig
from tests.adapter.vectors import TINY
from tests.process import run as run_process

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
SEED = int(os.environ["AIMAGE_PARITY_SEED"])  # tests/conftest.py draws one


def load(
    kind: Any,
    config: Any,
    theirs: Any,
    dtype: torch.dtype,
    *,
    is_joined: bool,
    compile: str = "never",  # noqa: A002 - the name of the option
) -> Any:
    """Return our network with the tensors of diffusers'."""
    network = kind(config, TorchLibrary("cpu", dtype, TorchTuning(compile=compile)))
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


@pytest.mark.no_cover  # it would double the time of the compiler, a program in Python
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_blocks_have_the_velocities_of_others(family: str) -> None:
    """One code for each kind of block, for all lengths; also for blocks of control networks."""
    kind, make, run = FAMILIES[family]
    torch.manual_seed(SEED)
    theirs, config = make(random.Random(SEED))
    randomise(theirs)
    kinds = 1 if family == "zimage" else 2
    with count_compilations() as counter:
        eager, compiled = (
            load(kind, config, theirs, torch.float32, is_joined=True, compile=mode)
            for mode in ("never", "now")
        )
        for height, length in ((4, 5), (10, 37)):
            inputs = torch.randn(config.in_channels, height, 6), torch.randn(length, 40), 0.3
            expected, found = (run(network, *inputs) for network in (eager, compiled))
            assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
        assert counter.frame_count == kinds
        if family == "zimage":
            check_control(config, eager, compiled)
            # Blocks with the latents as input, and others
            assert counter.frame_count == kinds + 2


@pytest.mark.no_cover
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_has_the_velocities_of_its_passes(family: str) -> None:
    """Of captions of several lengths; compiled code is that of all numbers of pictures."""
    kind, make, _ = FAMILIES[family]
    torch.manual_seed(SEED)
    theirs, config = make(random.Random(SEED))
    randomise(theirs)
    more = () if family == "zimage" else (None,)
    # The transformer of FLUX.2 sees texts of one length
    lengths = ((5, 5), (5, 37, 70, 33)) if family == "zimage" else ((5, 5), (9, 9, 9))
    with count_compilations() as counter:
        eager, compiled = (
            load(kind, config, theirs, torch.float32, is_joined=True, compile=mode)
            for mode in ("never", "now")
        )
        for some in (*lengths, *lengths):
            latents = torch.randn(len(some), config.in_channels, 4, 6)
            texts = [torch.randn(length, 40) for length in some]
            times = [0.1 * (index + 2) for index in range(len(some))]
            for network in (eager, compiled):
                captions = [eager.build_caption(text) for text in texts]
                passes = list(zip(latents, times, captions, strict=True))
                alone = [eager(*each, *more) for each in passes]
                found = network.compute_batch(passes)
                for velocity, expected in zip(found, alone, strict=True):
                    bound = 2e-5 * float(expected.abs().max())
                    assert float((velocity - expected).abs().max()) <= bound
        # Of one picture, and of several with masks and without; or of two kinds of blocks
        assert counter.frame_count == (3 if family == "zimage" else 4)


def check_control(config: ZImageConfig, eager: Any, compiled: Any) -> None:
    fields = config.in_channels, (0, 2), (0,), REFINER, config
    networks, latents = [], torch.randn(config.in_channels, 8, 6)
    for mode in ("never", "now"):
        library = TorchLibrary("cpu", torch.float32, TorchTuning(compile=mode))
        network = ControlNetwork(ControlNetConfig(*fields), library)
        torch.manual_seed(SEED)
        for name, value in network.module.state_dict().items():
            path, _, key = name.rpartition(".")
            values = torch.nn.Parameter(0.1 * torch.randn(value.shape), requires_grad=False)
            setattr(network.module.get_submodule(path), key, values)
        network.finish(in_layers=False, is_copied=True)
        networks.append(network)
    features, cells = torch.randn(37, 40), torch.randn(latents.shape)
    hints = [
        network(transformer, latents, 0.3, transformer.build_caption(features), cells, 0.7)
        for network, transformer in zip(networks, (eager, compiled), strict=True)
    ]
    assert hints[0].keys() == hints[1].keys() == {0, 2}
    for layer, hint in hints[0].items():
        assert float((hints[1][layer] - hint).abs().max()) <= 1e-5 * float(hint.abs().max())


class Recorded:
    """A pass of a device that reads the same memory at each replay."""

    size = 1

    def __init__(self, function: Any, inputs: Any) -> None:
        self.function, self.inputs = function, [value.clone() for value in inputs]

    def replay(self, inputs: Any) -> Any:
        for fixed, value in zip(self.inputs, inputs, strict=True):
            fixed.copy_(value)
        return self.function(self.inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_passes_have_the_velocities_of_others(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for another time, text, direction of the sides, and share of the references."""
    # In place of compiled code, and another function than that of blocks as they are
    monkeypatch.setattr(compiler, "_compile", lambda: partial(compiler.call_block))
    kind, make, run = FAMILIES[family]
    torch.manual_seed(SEED)
    theirs, config = make(random.Random(SEED))
    randomise(theirs)
    network, exact = (
        load(kind, config, theirs, torch.float32, is_joined=True, compile=mode)
        for mode in ("now", "never")
    )
    network.blocks.passes = PassCache(Recorded, 100)
    for height, width, time in ((4, 6, 0.3), (4, 6, 0.5), (6, 4, 0.7), (4, 6, 0.9)):
        inputs = torch.randn(config.in_channels, height, width), torch.randn(37, 40), time
        assert torch.equal(run(network, *inputs), run(exact, *inputs))
    assert network.blocks.passes.size == 1
    if family == "flux2":
        for rows in (2, 4, 2, 4, 2, 4):
            # The tokens of picture and reference are as many
            latents, other = torch.randn(config.in_channels, rows, 6), (6 - rows, 6)
            tokens = torch.randn(other[0] * other[1], config.in_channels)
            pictures = ReferenceTokens(tokens, build_positions(10, *other))
            velocities = [
                one(latents, 0.4, one.build_caption(torch.ones(37, 40)), pictures)
                for one in (network, exact)
            ]
            assert torch.equal(*velocities)


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
    command = [sys.executable, "-c", program]
    done = run_process(command, text=True, env=environment, check=True)
    assert done.stdout == "(32, 32, 3)\n"
