"""Checks of requests change nothing; the state changes where it is said to, and values are frozen.

The control networks of ``tests/controlnet_file.py`` fit the small Z-Image of ``examples/tiny``.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.adapter.adapter import Adapter
from clowder_aimage.adapter.loaded_adapter import LoadedAdapter
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import UsageError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.flow.state import UsedControl
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image, PictureInput, StoredControlNet
from tests.conftest import TINY
from tests.controlnet_file import tensors, write_file
from tests.model.model_blobs import import_directory
from tests.model.random_flux2 import write_flux2

FILE = f"sha256:{'0' * 64}"
SMALL = GenerateRequest.of("a fox", width=32, height=48, steps=2)
Open = Callable[[Path], FlowPipeline]
PIXELS = np.zeros((48, 32, 3), np.uint8)
# Requests with the picture of each; the last ones are refused
CHECKS: dict[str, tuple[dict[str, Any], PictureInput | None]] = {
    "a text": ({}, None),
    "guidance": ({"guidance": 1.0, "negative": "an owl"}, None),
    "an image": ({"image": FILE}, PictureInput(PIXELS)),
    "a mask": ({"image": FILE, "mask": FILE}, PictureInput(PIXELS, PIXELS[..., 0] + 255)),
    "references": ({"references": (FILE,)}, PictureInput(references=(PIXELS,))),
    "control": ({"control": FILE}, PictureInput(control=PIXELS)),
    "a named control": ({"control": FILE, "controlnet": "net"}, PictureInput(control=PIXELS)),
    "a wrong side": ({"width": 33}, None),
    "no cell": ({"image": FILE, "mask": FILE}, PictureInput(PIXELS, PIXELS[..., 0])),
    "no steps": ({"steps": 0}, None),
}


def open_zimage(root: Path) -> FlowPipeline:
    return load_pipeline(*import_directory(TINY, root / "blobs"), dtype="float32")


def open_controlled(root: Path) -> FlowPipeline:
    """Return the model with a control network of its own."""
    shutil.copytree(TINY, root / "files")
    write_file(root / "files" / "controlnet" / "net.safetensors", tensors())
    return load_pipeline(*import_directory(root / "files", root / "blobs"), dtype="float32")


def open_flux2(root: Path) -> FlowPipeline:
    write_flux2(root / "files")
    return load_pipeline(*import_directory(root / "files", root / "blobs"), dtype="float32")


def store_control(root: Path) -> StoredControlNet:
    write_file(root / "net" / "net.safetensors", tensors())
    store, aimage = import_directory(root / "net", root / "net_blobs")
    layers = tuple(
        dataclasses.replace(one, name=one.name.rpartition("/")[2]) for one in aimage.layers
    )
    return StoredControlNet(store, AImage(b"{}", layers), "net")


def used(pipeline: FlowPipeline) -> UsedControl | None:
    return pipeline.state.control


def snapshot(pipeline: FlowPipeline) -> Any:
    """Return everything that a check could change."""
    state, networks = pipeline.state, pipeline.networks
    adapted = networks.text_encoder, networks.transformer
    modules = [*networks.budget.modules, *([state.control.module] if state.control else [])]
    return (
        pipeline.family,
        (state.adapters, state.control, dict(state.captions)),
        (networks.budget.modules, networks.budget.memory, networks.budget.limit),
        [(module, module.is_loaded, networks.budget.get_policy(module)) for module in modules],
        [vars(module.adaptation).copy() for module in adapted if module.adaptation],
    )


def picture(
    pipeline: FlowPipeline, request: GenerateRequest, given: PictureInput | None = None
) -> bytes:
    *_, image = pipeline.generate(request, given)
    assert isinstance(image, Image)
    return image.pixels.tobytes()


def check_all(pipeline: FlowPipeline) -> list[str]:
    """Return the answers of the pipeline to all checks; each leaves everything as it was."""
    answers = []
    for changes, given in CHECKS.values():
        before = snapshot(pipeline)
        try:
            pipeline.check(SMALL.change(**changes), given)
            answers.append("")
        except UsageError as error:
            answers.append(error.message)
        assert snapshot(pipeline) == before
    return answers


@pytest.fixture(params=[open_zimage, open_controlled, open_flux2])
def pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> FlowPipeline:
    opened: Open = request.param
    return opened(tmp_path)


def test_checks_change_nothing_and_are_repeatable(pipeline: FlowPipeline) -> None:
    answers = check_all(pipeline)
    assert check_all(pipeline) == answers
    assert answers[0] == "" and all(answers[-3:])
    pipeline.use_adapters([(LoadedAdapter("one", Adapter("one", {})), 0.5)])
    assert check_all(pipeline) == answers
    assert pipeline.state.adapters
    list(pipeline.generate(SMALL))
    assert pipeline.state.captions
    assert check_all(pipeline) == answers


def test_checks_do_not_choose_the_control_network(tmp_path: Path) -> None:
    """Neither that of the model nor the one in use gives way to a request that is only checked."""
    pipeline = open_controlled(tmp_path)
    answers = check_all(pipeline)
    assert answers[5] == "" and used(pipeline) is None
    stored = store_control(tmp_path / "other")
    pipeline.use_control(stored)
    control = used(pipeline)
    assert control is not None and control.stored is stored
    assert check_all(pipeline) == answers
    pipeline.use_control(stored)
    assert used(pipeline) is control


def test_a_control_network_that_is_named_has_to_be_used_first(tmp_path: Path) -> None:
    pipeline = open_zimage(tmp_path)
    changes, given = CHECKS["a named control"]
    request = SMALL.change(**changes)
    pipeline.check(request, given)
    with pytest.raises(UsageError, match="the ControlNet net is not loaded"):
        pipeline.generate(request, given)
    pipeline.use_control(store_control(tmp_path))
    assert list(pipeline.generate(request, given))


def test_the_network_of_the_model_and_a_named_one_take_turns(tmp_path: Path) -> None:
    pipeline, given = open_controlled(tmp_path), PictureInput(control=PIXELS)
    own = SMALL.change(control=FILE)
    first = picture(pipeline, own, given)
    pipeline.use_control(store_control(tmp_path / "other"))
    named = own.change(controlnet="net")
    assert picture(pipeline, named, given) == first == picture(pipeline, own, given)
    assert picture(pipeline, SMALL) != first


def test_a_family_without_control_networks_uses_none(tmp_path: Path) -> None:
    pipeline = open_flux2(tmp_path)
    before = snapshot(pipeline)
    with pytest.raises(UsageError, match="the ControlNet net cannot be used: the family"):
        pipeline.use_control(store_control(tmp_path))
    assert snapshot(pipeline) == before


def test_a_family_is_a_frozen_value(pipeline: FlowPipeline) -> None:
    family: Any = pipeline.family
    assert hash(family) == hash(dataclasses.replace(family))
    with pytest.raises(dataclasses.FrozenInstanceError):
        family.vae = None
