"""The adapter of examples/shapes adds a ninth colour to the model, and changes nothing else."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from composing import TWIN, held_out_scenes, ninth_scenes, recoloured
from judge import look
from scene import COLOURS, NINTH, Scene, render
from score import score
from wishes import is_held_out, wish_of

from benchmarks import quality
from clowder_aimage.formats import lora
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.flow.pipeline import FlowPipeline

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"
(COLOUR,) = NINTH
ADAPTER = SHAPES / f"{COLOUR}.safetensors"
NINE = {**COLOURS, **NINTH}
ninth, usual = functools.cache(ninth_scenes), functools.cache(held_out_scenes)


# -- the scenes and the judge


def test_the_ninth_colour_is_in_every_scene() -> None:
    assert len({wish_of(scene).describe() for scene in ninth()}) == len(ninth()) == 100
    for scene in ninth():
        assert COLOUR in scene.caption
        assert TWIN not in scene.caption
        colours = {item.colour for item in scene.items}
        assert COLOUR in colours
        assert TWIN not in colours


def test_the_twins_of_the_scenes_are_not_in_training() -> None:
    """The adapter is trained on scenes whose twins, with blue, are not held out."""
    assert all(is_held_out(scene.caption.replace(COLOUR, TWIN)) for scene in ninth())


def test_a_scene_without_the_twin_stays() -> None:
    scenes = [scene for scene in usual() if TWIN not in scene.caption]
    assert len(scenes) > 200
    assert [recoloured(scene) for scene in scenes] == scenes


def test_the_judge_recognizes_drawings_with_the_ninth_colour() -> None:
    right = [score(scene, look(render(scene), NINE)).both for scene in ninth()]
    assert sum(right) >= 99


def test_who_knows_eight_colours_does_not_see_the_ninth() -> None:
    assert not any(score(scene, look(render(scene))).colour for scene in ninth()[::5])


def test_the_ninth_colour_is_not_seen_in_drawings_without_it() -> None:
    for scene in usual()[::6]:
        assert look(render(scene), NINE) == look(render(scene))


# -- the file


def test_the_file_is_small_and_says_how_to_use_it() -> None:
    assert ADAPTER.stat().st_size <= 300_000
    facts = lora.read_facts(ADAPTER)
    assert facts["triggerWords"] == [COLOUR]
    assert facts["weight"] == 1.0


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> FlowPipeline:
    store = ImageLayout(tmp_path_factory.mktemp("store"))
    return quality.load(SHAPES / "model", "float32", store)[0]


@contextmanager
def adapted(pipeline: FlowPipeline, strength: str) -> Iterator[None]:
    """Use the adapter for a while."""
    pipeline.use_adapters([quality.open_adapter(pipeline, f"{ADAPTER}{strength}")])
    try:
        yield
    finally:
        pipeline.use_adapters([])


def test_it_fits_the_model(pipeline: FlowPipeline) -> None:
    adapter, strength = quality.open_adapter(pipeline, str(ADAPTER))
    assert strength == 1.0
    assert adapter.tensors <= pipeline.shapes.keys()
    assert len(adapter.tensors) > 20


# -- the pictures


def pictures(pipeline: FlowPipeline, scenes: list[Scene]) -> list[quality.Pixels]:
    asked = [quality.request(scene, seed) for seed, scene in enumerate(scenes)]
    return [quality.picture(pipeline, one) for one in asked]


@pytest.mark.integration
def test_it_draws_the_ninth_colour_and_the_model_alone_does_not(pipeline: FlowPipeline) -> None:
    scenes = ninth()[::10]
    found = quality.judged(scenes, pictures(pipeline, scenes), NINE)
    assert found["colour"]["right"] == 0
    with adapted(pipeline, ":1.0"):
        found = quality.judged(scenes, pictures(pipeline, scenes), NINE)
    assert found["colour"]["share"] >= 0.7
    assert found["both"]["share"] >= 0.7


@pytest.mark.integration
def test_it_leaves_usual_scenes_as_they_are(pipeline: FlowPipeline) -> None:
    scenes = usual()[::30]
    alone = quality.judged(scenes, pictures(pipeline, scenes))
    with adapted(pipeline, ""):
        found = quality.judged(scenes, pictures(pipeline, scenes))
    for name in ("colour", "shape", "both"):
        assert found[name]["right"] >= alone[name]["right"] - 1


@pytest.mark.integration
def test_with_strength_0_it_does_nothing(pipeline: FlowPipeline) -> None:
    scenes = ninth()[:1]
    (alone,) = pictures(pipeline, scenes)
    with adapted(pipeline, ":0.0"):
        assert (pictures(pipeline, scenes)[0] == alone).all()
    with adapted(pipeline, ":1.0"):
        assert (pictures(pipeline, scenes)[0] != alone).any()
