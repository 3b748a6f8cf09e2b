"""The enhancer of the shapes model: the language, what it writes, and the pictures of that."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from composing import compose
from judge import look
from score import score
from terse import TERSE_SCENES, caption, pair, terse, terse_scenes
from wishes import is_held_out, wish_of

from benchmarks import quality
from clowder_aimage.create import create
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.text.enhancement import ANY, build_enhancement_request, collect_prompt
from clowder_aimage.model.text.language_model import LanguageModel
from clowder_aimage.model.text.runtime import load_language_model
from clowder_aimage.oci import Reference

FOLDER = quality.SHAPES / "enhancer"
MOST = 4 << 20  # bytes in this repository


@pytest.fixture(scope="module")
def enhancer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    store, name = ImageLayout(tmp_path_factory.mktemp("store")), Reference.parse("enhancer")
    create(store, name, FOLDER)
    yield load_language_model(store, read_aimage(store, name).aimage)


def write(model: LanguageModel, wish: str, seed: int = 0) -> str:
    return collect_prompt(model.generate(build_enhancement_request(wish, seed)))


def is_meant(text: str, asked: str) -> bool:
    """Return whether a caption has a content; one in other words has none."""
    try:
        return wish_of(text).describe() == wish_of(asked).describe()
    except ValueError:
        return False


def test_no_content_of_the_judged_wishes_is_in_the_training() -> None:
    found = terse_scenes()
    assert len(found) == TERSE_SCENES and all(is_held_out(scene) for _, scene in found)
    rng = random.Random(7)
    assert not any(is_held_out(said) for _, said in (pair(rng) for _ in range(300)))


def test_captions_have_the_content_of_their_scene() -> None:
    rng = random.Random(8)
    for _ in range(300):
        scene = compose(rng, 64, 64)
        assert is_meant(caption(rng, scene), scene.caption), scene.caption
        assert terse(rng, scene).strip()


def test_the_enhancer_is_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MOST


def test_captions_are_written_from_terse_wishes(enhancer: LanguageModel) -> None:
    assert write(enhancer, "2 blue boxes, black bg", 3).startswith("two blue squares ")
    asked = terse_scenes()[::6]
    wrong = [wish for wish, scene in asked if not is_meant(write(enhancer, wish), scene.caption)]
    assert len(wrong) <= 1, wrong


def test_any_caption_is_invented_and_the_seed_decides_which(enhancer: LanguageModel) -> None:
    assert ANY.lower() == "invent a picture"  # of the training
    invented = [write(enhancer, "", seed) for seed in range(5)]
    assert invented == [write(enhancer, "", seed) for seed in range(5)]
    assert len(set(invented)) > 2 and all(is_meant(one, one) for one in invented)


@pytest.mark.integration
def test_pictures_of_terse_wishes_are_right(enhancer: LanguageModel, tmp_path: Path) -> None:
    """Judge every eighth of the 100 wishes; nine of ten pictures must have all that it states."""
    pipeline, _ = quality.load(quality.SHAPES / "model", "float32", ImageLayout(tmp_path))
    right, plain = 0, 0
    asked = [*enumerate(terse_scenes())][::8]
    for seed, (wish, scene) in asked:
        for prompt in (write(enhancer, wish, seed), wish):
            size = {"width": scene.width, "height": scene.height}
            request = GenerateRequest.of(prompt, **size, steps=quality.STEPS, seed=seed)
            made = quality.picture(pipeline, request)
            verdict = score(scene, look(made))
            is_right = all(
                getattr(verdict, name) is not False for name in verdict.__dataclass_fields__
            )
            right += is_right and prompt != wish
            plain += is_right and prompt == wish
    assert right >= 0.9 * len(asked) - 1 and plain < 0.3 * len(asked)
