"""Every dialect and kind of adapter beside the weights: the latents of weights changed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.adapter.loaded_adapter import LoadedAdapter
from clowder_aimage.adapter.reader import read_adapter
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.backend import mx
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.loader import load_pipeline
from tests.adapter.vectors import AdapterVector, vectors
from tests.model.denoise import denoise
from tests.model.model_blobs import FolderStore

Model = tuple[FolderStore, AImage]
REQUEST = GenerateRequest.of("a red fox", width=32, height=32, steps=2, seed=42)


@pytest.fixture(scope="module")
def changed(tiny: Model) -> FlowPipeline:
    """Return a pipeline whose weights are overwritten."""
    return load_pipeline(*tiny, dtype="float32")


def latents(pipeline: FlowPipeline) -> np.ndarray:
    pipeline.state.captions.clear()
    noise = pipeline.denoiser.draw_noise(REQUEST, REQUEST.sampling.seed)
    guide = pipeline.build_conditioning(REQUEST)
    *_, final = denoise(pipeline, noise, pipeline.schedule(REQUEST), guide)
    return np.array(final)


def with_weights(pipeline: FlowPipeline, vector: AdapterVector, strength: float) -> np.ndarray:
    """Return the latents with the changed weights, written into the networks by hand."""
    before: list[tuple[Any, str, Any]] = []
    weights = {
        name: np.asarray(pipeline.networks.weights[component].read_numpy(own), np.float32)
        for name in vector.effects
        if name in pipeline.shapes
        for component, _, own in [name.partition("/")]
    }
    for name, values in vector.changed(weights, strength).items():
        component, _, own = name.partition("/")
        network: Any = getattr(pipeline.networks, component).get()
        *path, last = network.sanitize(own).split(".")
        for step in path:
            network = network[int(step)] if isinstance(network, list) else network[step]
        before.append((network, last, network.get(last)))
        setattr(network, last, mx.array(values))
    try:
        return latents(pipeline)
    finally:
        for network, last, values in before:
            if values is None:
                delattr(network, last)
            else:
                setattr(network, last, values)


@pytest.fixture(scope="module")
def plain(changed: FlowPipeline) -> np.ndarray:
    """Return the latents without adapters."""
    return latents(changed)


# Rows of names have the same effects: that these are read is tested in tests/adapter
VECTORS = {id(vector.effects): vector for vector in vectors()}


@pytest.mark.parametrize("vector", VECTORS.values(), ids=str)
def test_the_latents_of_changed_weights(
    pipeline: FlowPipeline,
    changed: FlowPipeline,
    plain: np.ndarray,
    vector: AdapterVector,
    tmp_path: Path,
) -> None:
    adapter = read_adapter(vector.write(tmp_path), pipeline.shapes, label="it", base="tiny")
    pipeline.use_adapters([(LoadedAdapter("it", adapter), -0.7)])
    try:
        found, expected = latents(pipeline), with_weights(changed, vector, -0.7)
    finally:
        pipeline.use_adapters([])
    assert np.abs(found - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())
    assert np.abs(found - plain).max() > 1e-4
    assert (latents(pipeline) == plain).all()
