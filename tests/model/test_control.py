"""Control networks: configurations, inputs, memory, and models that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.backend import mx
from clowder_aimage.model.flow.memory_budget import Module
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image, PictureInput, StoredControlNet
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.model.zimage.control_config import (
    LAYERS,
    PLAIN,
    REFINER,
    ControlNetConfig,
    to_input,
)
from clowder_aimage.model.zimage.family import Control
from tests.controlnet_file import V1, V20, V21, Arrays, config, tensors, write_file
from tests.model.model_blobs import FolderStore, import_directory

FILE = f"sha256:{'0' * 64}"  # the pipeline is given the picture itself
REQUEST = GenerateRequest.of("a fox", width=48, height=32, steps=2, control=FILE, controlnet="net")
GIVEN = PictureInput(control=np.random.default_rng(3).integers(0, 256, (32, 48, 3), dtype=np.uint8))


@pytest.fixture
def pipeline(tiny: tuple[FolderStore, AImage]) -> FlowPipeline:
    return load_pipeline(*tiny, dtype="float32")


def stored(root: Path, values: Arrays) -> StoredControlNet:
    """Return a control network without a configuration."""
    write_file(root / "net" / "net.safetensors", values)
    store, aimage = import_directory(root / "net", root / "net_blobs")
    layers = tuple(replace(one, name=one.name.rpartition("/")[2]) for one in aimage.layers)
    return StoredControlNet(store, AImage(b"{}", layers), "net")


def used(pipeline: FlowPipeline) -> Module:
    """Return the control network in use."""
    assert pipeline.state.control is not None
    return pipeline.state.control.module


def picture(pipeline: FlowPipeline, request: GenerateRequest = REQUEST) -> np.ndarray:
    (image,) = [one for one in pipeline.generate(request, GIVEN) if isinstance(one, Image)]
    return image.pixels.astype(int)


@pytest.mark.parametrize(("form", "refiner"), [(V1, PLAIN), (V20, LAYERS), (V21, REFINER)])
def test_names_and_shapes_give_the_configuration(
    pipeline: FlowPipeline, tmp_path: Path, form: str, refiner: str
) -> None:
    net = stored(tmp_path, tensors(form, layers=2))
    weights = ModelWeights.open(net.files, net.aimage, has_config=False)
    base = replace(pipeline.networks.transformer.config, n_layers=30)
    found = ControlNetConfig.derive(weights, base)
    assert (found.places, found.refiner, found.has_mask) == ((0, 15), refiner, form != V1)
    assert found.refiner_places == (() if form == V1 else (0,))
    stated = ControlNetConfig.parse(
        "config.json", config(form), pipeline.networks.transformer.config
    )
    assert replace(found, places=(0, 1), block=stated.block) == stated


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 64}, "dim = 64"),
        ({"all_patch_size": [4]}, "all_patch_size"),
        ({"add_control_noise_refiner": "both"}, "add_control_noise_refiner"),
        ({"control_layers_places": [1]}, "must begin with 0"),
        ({"control_layers_places": [0, 2]}, "must be increasing and below 2"),
        ({"control_layers_places": [0, 0]}, "must be increasing"),
        ({"control_layers_places": "0"}, "must be a list"),
        ({"control_refiner_layers_places": [1]}, "below 1"),
        ({"control_in_dim": None}, "missing field control_in_dim"),
        ({"other": 1}, "unknown fields other"),
    ],
)
def test_a_wrong_configuration_is_refused(
    pipeline: FlowPipeline, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message.replace("[", r"\[")):
        ControlNetConfig.parse("c", config(V21) | changes, pipeline.networks.transformer.config)


def test_inputs_are_padded_or_have_the_mask(pipeline: FlowPipeline) -> None:
    base = pipeline.networks.transformer.config
    one = np.ones((16, 4, 6), np.float32)
    other = 2 * one
    painted = np.zeros((1, 4, 6), np.float32), other
    new = ControlNetConfig.parse("c", config(V21), base)
    old = ControlNetConfig.parse("c", config(V1), base)
    found = np.array(to_input(new, one, painted))
    assert [found[0, 0, 0], found[16, 0, 0], found[17, 0, 0]] == [1, 1, 2]
    assert found.shape == (33, 4, 6)
    assert np.array(to_input(new, one, None))[16:].max() == 0
    assert np.array_equal(to_input(old, one, painted), one)


def test_the_network_is_in_memory_for_such_requests_only(
    pipeline: FlowPipeline, tmp_path: Path
) -> None:
    net = stored(tmp_path, tensors())
    plain = REQUEST.change(control=None, controlnet=None, control_strength=None)
    pipeline.preload(plain)
    pipeline.use_control(net)
    module = used(pipeline)
    before = pipeline.list_stages(plain)[1].size
    loaded = [module.is_loaded]
    assert pipeline.list_stages(REQUEST)[1].size >= before + module.size > before
    guided = picture(pipeline)
    loaded.append(module.is_loaded)
    assert module.size == sum(value.nbytes for value in tensors().values())
    pipeline.use_control(net)
    assert used(pipeline) is module and pipeline.networks.budget.modules.count(module) == 1
    pipeline.set_memory("release", None)
    assert np.array_equal(picture(pipeline), guided)
    list(pipeline.generate(plain))
    assert [*loaded, module.is_loaded] == [False, True, False]
    other = stored(tmp_path / "other", tensors(seed=1))
    pipeline.use_control(other)
    assert module not in pipeline.networks.budget.modules
    assert not np.array_equal(picture(pipeline), guided)


def test_hints_are_proportional_to_the_strength(pipeline: FlowPipeline, tmp_path: Path) -> None:
    pipeline.use_control(stored(tmp_path, tensors(V1)))
    random = np.random.default_rng(0)
    latents = mx.array(random.standard_normal((16, 4, 6)).astype(np.float32))
    module = used(pipeline)
    caption = pipeline.build_conditioning(REQUEST).positive
    args = pipeline.networks.transformer.get(), latents, 0.3, caption, latents
    one, two = (module.get()(*args, strength) for strength in (1.0, 2.0))
    assert list(one) == [0, 1]
    for place, hint in one.items():
        assert hint.shape == (1, 32 + caption.tokens.shape[1], 48)
        np.testing.assert_allclose(np.array(two[place]), 2 * np.array(hint), rtol=1e-5)


def test_a_step_that_reuses_another_makes_no_hints(
    pipeline: FlowPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.use_control(stored(tmp_path, tensors()))
    made, hints = list[float](), Control.compute_hints

    def counted(*given: Any) -> Any:
        made.append(given[3])
        return hints(*given)

    monkeypatch.setattr(Control, "compute_hints", counted)
    request = REQUEST.change(steps=4)
    exact = picture(pipeline, request)
    assert np.array_equal(picture(pipeline, request.change(cache_threshold=1e-9)), exact)
    assert len(made) == 8 and made[:4] == made[4:]
    assert not np.array_equal(picture(pipeline, request.change(cache_threshold=10)), exact)
    assert made[8:] == [made[0], made[3]]  # the first step and the last


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (tensors(dim=96), r"adaLN_modulation.0.bias has the shape \[384\], not \[192\]"),
        (tensors(layers=3), "3 control layers for 2 layers"),
        ({k: v for k, v in tensors().items() if "layers" not in k}, "0 control layers"),
        ({k: v for k, v in tensors().items() if "layers.1" not in k or "w1" not in k}, "missing"),
        (tensors() | {"extra": np.zeros(3, np.float32)}, "unexpected tensors extra"),
    ],
)
def test_networks_that_do_not_fit_are_refused(
    pipeline: FlowPipeline, tmp_path: Path, values: Arrays, message: str
) -> None:
    with pytest.raises(
        FormatError, match=f"the ControlNet net does not fit the model: .*{message}"
    ):
        pipeline.use_control(stored(tmp_path, values))


def test_a_model_without_one_needs_a_name(pipeline: FlowPipeline) -> None:
    with pytest.raises(UsageError, match="no ControlNet of its own"):
        pipeline.generate(REQUEST.change(controlnet=None), GIVEN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"control": "a.png"}, "control must be the digest of a picture"),
        ({"control": None, "control_strength": None}, "controlnet requires a control picture"),
        ({"controlnet": 5}, "controlnet must be text"),
        ({"control_strength": -0.1}, "control_strength must be a number from 0 to 10"),
        ({"control_strength": float("nan")}, "control_strength must be a number"),
        ({"fit": "bend"}, "fit must be one of"),
    ],
)
def test_wrong_requests_are_refused(changes: dict[str, Any], message: str) -> None:
    assert REQUEST.control.strength == 0.75
    with pytest.raises(UsageError, match=message):
        REQUEST.change(**changes)
