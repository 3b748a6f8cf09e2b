"""The request for pictures: its values, its rules, its names in interfaces."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.dialect import AImage
from clowder_aimage.errors import UsageError
from clowder_aimage.generation.keywords import PictureKeywords
from clowder_aimage.generation.request import (
    ALPHA,
    MODEL_DEFAULTS,
    GenerateRequest,
    LoraUse,
    Sampling,
    map_parameter_locations,
)
from clowder_aimage.generation.seed import MAX_SEED

PACKAGE = Path(__file__).parents[2] / "clowder_aimage"
FILE = f"sha256:{'1' * 64}"
ALL: dict[str, Any] = {
    "width": 64,
    "height": 48,
    "steps": 4,
    "seed": 7,
    "shift": 3.0,
    "cache_threshold": 0.1,
    "guidance": 2.5,
    "guidance_end": 0.5,
    "cfg_normalization": 1.0,
    "negative": "a cat",
    "image": FILE,
    "mask": ALPHA,
    "references": (FILE,),
    "strength": 0.5,
    "fine": True,
    "fit": "pad",
    "paste": True,
    "feather": 8,
    "crop": True,
    "expand": None,
    "upscale": None,
    "control": FILE,
    "controlnet": "edges",
    "control_strength": 0.5,
    "loras": (LoraUse("ink", 0.8),),
    "n": 2,
    "previews": 1,
    "original_prompt": "fox",
    "enhancer": "qwen",
}


def test_all_parameters_have_a_place_and_words() -> None:
    assert ALL.keys() <= map_parameter_locations().keys()
    for name, location in map_parameter_locations().items():
        help_text = location.parameter.words.help
        assert help_text[:1].isupper() and help_text.endswith("."), name
    assert set(MODEL_DEFAULTS) <= map_parameter_locations().keys()


def test_a_request_is_made_of_its_values() -> None:
    request = GenerateRequest.of("a fox", **ALL)
    assert request.collect_values() == GenerateRequest.of("a fox").collect_values() | ALL
    assert GenerateRequest.of(**json.loads(json.dumps(request.to_json()))) == request
    assert request.change(steps=9).sampling == dataclasses.replace(request.sampling, steps=9)
    assert request.change(steps=None).sampling.steps == Sampling().steps


def test_missing_parameters_have_the_defaults_of_the_model() -> None:
    config = {"schemaVersion": 1, "defaults": {"steps": 30, "guidance": 4, "other": 5}}
    aimage = AImage(json.dumps(config).encode(), ())
    request = GenerateRequest.draft("a fox", guidance=2.0, seed=None).apply_defaults(aimage)
    assert (request.sampling.steps, request.guidance.scale, request.sampling.seed) == (30, 2.0, 0)


@pytest.mark.parametrize(
    ("values", "strength"),
    [
        ({"image": FILE}, 0.6),
        ({"image": FILE, "mask": ALPHA}, 1.0),
        ({"image": FILE, "expand": (0, 0, 16, 0)}, 1.0),
        ({"image": FILE, "upscale": 2}, 0.2),
        ({"control": FILE}, None),
    ],
)
def test_the_strength_of_an_image_follows_from_its_use(
    values: dict[str, Any], strength: float | None
) -> None:
    assert GenerateRequest.of(**values).input.strength == strength
    assert GenerateRequest.of(control=FILE).control.strength == 0.75


IMAGE = {"image": FILE}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"negative": "a cat"}, "negative requires guidance above 0"),
        ({"seed": MAX_SEED, "n": 2}, f"seed must be at most {MAX_SEED - 1} for 2 pictures"),
        ({"mask": FILE}, "mask requires an image"),
        ({"strength": 0.5}, "strength requires an image"),
        ({"expand": (0, 0, 8, 0)}, "expand requires an image"),
        ({**IMAGE, "paste": True}, "paste requires a mask"),
        ({**IMAGE, "mask": ALPHA, "feather": 8}, "feather requires paste or crop"),
        ({**IMAGE, "mask": ALPHA, "upscale": 2}, "upscale cannot be combined with a mask"),
        ({**IMAGE, "mask": ALPHA, "expand": (0, 0, 8, 0)}, "expand cannot be combined"),
        ({**IMAGE, "upscale": 2, "expand": (0, 0, 8, 0)}, "upscale cannot be combined with expand"),
        ({**IMAGE, "steps": 2, "strength": 1e-20}, "strength 1e-20 leaves none of 2 steps"),
        ({"image": "a.png"}, "image must be the digest of a picture"),
        ({**IMAGE, "mask": "a.png"}, "mask must be the digest of a picture"),
        ({"references": ["a.png"]}, "references must be the digest of a picture"),
        ({"control": "a.png"}, "control must be the digest of a picture"),
        ({"controlnet": "edges"}, "controlnet requires a control picture"),
        ({"control_strength": 0.5}, "control_strength requires a control picture"),
        ({"enhancer": "qwen"}, "enhancer requires original_prompt"),
        ({"loras": [{"model": "ink", "strength": 101}]}, "loras: strength must be a number"),
        ({"loras": [{"strength": 1}]}, "loras must have the fields digest, model, strength"),
        ({"loras": [{"model": "ink", "x": 1}]}, "loras must have the fields"),
        ({"loras": ["ink"]}, "loras must be values"),
        ({"loras": 5}, "loras must be a list of at most 16"),
        ({"sharpness": 3}, "sharpness is not a parameter of pictures"),
    ],
)
def test_values_that_do_not_belong_together_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        GenerateRequest.of("a fox", **values)
    assert caught.value.message.startswith(message)
    assert message.startswith(caught.value.facts["parameter"])


def test_a_draft_is_checked_before_the_model_is_known() -> None:
    draft = GenerateRequest.draft("a fox", negative="a cat", guidance=None, n=2, steps=3)
    assert draft.collect_stated_values() == {"negative": "a cat", "n": 2, "steps": 3}
    assert draft.change(steps=None, seed=5).stated == frozenset({"negative", "n", "seed"})
    with pytest.raises(UsageError, match="requires guidance above 0"):
        draft.apply_defaults(AImage(b"{}", ()))
    with pytest.raises(UsageError, match="requires guidance above 0"):
        draft.change(guidance=0)
    with pytest.raises(UsageError, match="steps must be"):
        GenerateRequest.draft("a fox", steps=0)


@pytest.mark.parametrize("facts", [{}, {"prompt": None}, {"prompt": 3}, {"prompt": "a", "n": "x"}])
def test_metadata_without_a_prompt_are_refused(facts: dict[str, Any]) -> None:
    if facts.get("prompt") == "a":
        assert GenerateRequest.of_metadata(facts).output.n == 1
        return
    with pytest.raises(UsageError, match="prompt must be text"):
        GenerateRequest.of_metadata(facts)


def test_type_checkers_know_the_keyword_arguments_of_python() -> None:
    others = {"prompt", "image", "mask", "references", "control", "loras"}
    others |= {"previews", "original_prompt", "enhancer"}
    assert PictureKeywords.__annotations__.keys() == map_parameter_locations().keys() - others
    assert not PictureKeywords.__required_keys__


def test_a_request_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GenerateRequest.of("a fox").sampling.steps = 3  # type: ignore[misc]


BOUND = re.compile(r"(ge|gt|le|lt|min|max|multiple_of|(min|max)_length)$")
LOCATIONS = map_parameter_locations()
NAMES = {location.parameter.field for location in LOCATIONS.values()} | LOCATIONS.keys()
LIMITS = {
    bound
    for location in map_parameter_locations().values()
    for name, bound in location.parameter.type.bounds.items()
    if name in ("ge", "gt", "le") and bound not in (0, 1, 4, 16)
}


def literals(node: ast.AST) -> set[float]:
    values = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return {value for value in values if isinstance(value, int | float)}


def is_bound(node: ast.AST) -> bool:
    """Return whether code has a number as a bound of a parameter: of a field, or compared."""
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in NAMES:
        keywords = [each for each in ast.walk(node) if isinstance(each, ast.keyword)]
        return any(BOUND.match(each.arg or "") and literals(each.value) for each in keywords)
    if isinstance(node, ast.Compare):
        words = set(re.findall(r"\w+", ast.unparse(node)))
        return bool(literals(node) & LIMITS and words & NAMES)
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
        ("IntRange", "FloatRange")
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("steps: int = Field(8, le=500)", True),
        ("steps: int = Field(8, le=MAX_STEPS)", False),
        ("if not 0 <= guidance <= 1000: pass", True),
        ("option(type=click.FloatRange(0, 10))", True),
    ],
)
def test_bounds_in_code_are_recognized(source: str, expected: bool) -> None:
    assert any(map(is_bound, ast.walk(ast.parse(source)))) == expected


def test_no_bound_of_a_parameter_is_a_literal_elsewhere() -> None:
    """Language models have a seed and options of their own."""
    folders = ("api/picture", "fleet", "pictures", "model/flow", "engine")
    modules = [path for each in folders for path in sorted((PACKAGE / each).rglob("*.py"))]
    modules += [*(PACKAGE / "api").glob("*.py"), *(PACKAGE / "cli" / "console").glob("pic*.py")]
    modules += [PACKAGE / "cli" / "verbs" / "run.py", *(PACKAGE / "client").glob("*.py")]
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in modules
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.AnnAssign | ast.expr) and is_bound(node)
    ]
    assert not found, "\n".join(found)
