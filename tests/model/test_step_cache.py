"""Steps that reuse the work of others, and the end of guidance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.backend import mx
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.flow.rope import Table
from clowder_aimage.model.flow.step_cache import StepCache
from clowder_aimage.model.pipeline import Image
from clowder_aimage.model.zimage.transformer import Block, Hints, Transformer

REQUEST = GenerateRequest.of("a fox", width=32, height=32, steps=6, guidance=2.0, negative="a hare")
INPUTS = (1.0, 1.04, 1.2, 1.21, 3.0, 3.001)


def first(x: mx.array) -> mx.array:
    x += 0.5 * x * x  # in place, as the blocks of a transformer do
    return x


def others(x: mx.array) -> mx.array:
    x *= 3
    return x


def expected(inputs: list[np.ndarray], threshold: float) -> tuple[list[np.ndarray], list[bool]]:
    """Return the results of the steps without the last, and which of them were computed."""
    results, computed = [], list[bool]()
    kept = None
    for x in inputs:
        residual = 0.5 * x * x
        if kept and np.abs(residual - kept[0]).mean() / np.abs(kept[0]).mean() < threshold:
            results.append(x + residual + kept[1])
        else:
            kept = residual, 2 * (x + residual)
            results.append(x + residual + kept[1])
        computed.append(kept[0] is residual)
    return results, computed


@pytest.mark.parametrize(
    ("threshold", "steps"),
    [(0.1, (0, 2, 4)), (1e-9, (0, 1, 2, 3, 4, 5)), (math.inf, (0,)), (0.05, (0, 1, 2, 4))],
)
def test_a_step_is_computed_where_the_first_residual_changes(
    threshold: float, steps: tuple[int, ...]
) -> None:
    cache, calls = StepCache(threshold), list[mx.array]()
    inputs = [np.array([0.5 * scale, -scale]) for scale in INPUTS]
    results, computed = expected(inputs, threshold)
    assert tuple(np.flatnonzero(computed)) == steps
    for x, result, is_computed in zip(inputs, results, computed, strict=True):
        before = len(calls)

        def counted(x: mx.array) -> mx.array:
            calls.append(x)
            return others(x)

        found = cache.run(mx.array(x, dtype=mx.float32), first, counted)
        np.testing.assert_allclose(np.array(found), result, rtol=1e-6)
        assert len(calls) - before == is_computed


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_residual_that_cannot_be_compared_is_not_reused(value: float) -> None:
    cache = StepCache(math.inf)
    for other in (1.0, 2.0, 3.0):  # added to the result by the other blocks, if they run
        found = cache.run(mx.full((2,), value), first, partial(mx.add, mx.array(other)))
        np.testing.assert_array_equal(np.array(found), value + other)


def blocks_of(
    pipeline: FlowPipeline, request: GenerateRequest, patch: pytest.MonkeyPatch
) -> tuple[bytes, list[int]]:
    """Return the last picture of a request, and how often each of the layers was called."""
    calls = Counter[int]()
    call = Block.__call__

    def counted(self: Block, x: mx.array, rope: Table, time: mx.array | None = None) -> mx.array:
        calls[id(self)] += 1
        return call(self, x, rope, time)

    with patch.context() as patched:
        patched.setattr(Block, "__call__", counted)
        *_, image = pipeline.generate(request)
    assert isinstance(image, Image)
    layers = pipeline.networks.transformer.get().layers
    return image.pixels.tobytes(), [calls[id(block)] for block in layers]


def test_only_the_first_block_runs_between_the_first_and_the_last_step(
    pipeline: FlowPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, calls = blocks_of(pipeline, REQUEST, monkeypatch)
    count = len(pipeline.networks.transformer.get().layers)
    assert calls == [12] * count
    same = REQUEST.change(cache_threshold=1e-9)
    assert blocks_of(pipeline, same, monkeypatch) == (exact, calls)
    all_of_it = REQUEST.change(cache_threshold=10)
    other, calls = blocks_of(pipeline, all_of_it, monkeypatch)
    assert calls == [12] + [4] * (count - 1)
    assert other != exact
    again = all_of_it.change(seed=1)
    assert blocks_of(pipeline, again, monkeypatch)[1] == calls  # nothing is left of other requests
    assert blocks_of(pipeline, all_of_it, monkeypatch)[0] == other


def test_captions_pictures_and_requests_share_no_cache(
    pipeline: FlowPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = list[tuple[int, StepCache | None]]()
    call = Transformer.__call__

    def noted(
        self: Transformer,
        latents: mx.array,
        time: float,
        caption: Caption,
        cache: StepCache | None = None,
        hints: Callable[[], Hints] = dict,
    ) -> mx.array:
        used.append((id(caption), cache))
        return call(self, latents, time, caption, cache, hints)

    monkeypatch.setattr(Transformer, "__call__", noted)
    request = REQUEST.change(steps=3, n=2, cache_threshold=0.5)
    for _ in range(2):
        list(pipeline.generate(request))
    assert [cache is None for _, cache in used] == [False] * 4 + [True] * 2 + (
        [False] * 4 + [True] * 2
    ) * 3
    pairs = {(caption, id(cache)) for caption, cache in used if cache is not None}
    assert len(pairs) == len({cache for _, cache in pairs}) == 8  # 2 captions, 2 pictures, twice
    kept = [cache._residuals for _, cache in used[:2] if cache is not None]
    used.clear()
    without = request.change(cache_threshold=0.0)
    list(pipeline.generate(without))
    assert {cache for _, cache in used} == {None}
    estimates = [pipeline.list_stages(one)[1].work for one in (request, without)]
    arrays = [array.nbytes for pair in kept if pair for array in pair]
    assert len(arrays) == 4 and sum(arrays) <= estimates[0] - estimates[1] < 2 * sum(arrays)


@pytest.mark.parametrize(
    ("end", "guided"),
    # The times of the steps are 0, 0.1 in float32, which is above 0.1, 0.25 and 0.5
    [(0.0, 1), (0.1, 1), (0.1 + 1e-8, 2), (0.25 - 1e-16, 2), (0.25, 3), (0.5, 4), (1.0, 4)],
)
def test_guidance_ends_after_its_last_step(
    pipeline: FlowPipeline, monkeypatch: pytest.MonkeyPatch, end: float, guided: int
) -> None:
    request = REQUEST.change(steps=4, guidance_end=end)
    assert blocks_of(pipeline, request, monkeypatch)[1][0] == 4 + guided
