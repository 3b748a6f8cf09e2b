"""``run --enhance``: a language model writes the prompt of a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from clowder_aimage import generate
from clowder_aimage.cli.console.output import META
from clowder_aimage.cli.text.enhance_option import Enhancement
from clowder_aimage.cli.worker.enhancer import LocalEnhancer
from clowder_aimage.cli.worker.local_model import LocalOptions
from clowder_aimage.engine import machine
from clowder_aimage.errors import ModelError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.picture_metadata import read_metadata
from clowder_aimage.model.text.enhancement import ANY
from clowder_aimage.model.text.language_model import TextDelta, TextRequest
from clowder_aimage.oci import Reference
from tests.cli.test_remote_verbs import at, drawing
from tests.process import Aimage
from tests.scripted_worker import ScriptedWorker
from tests.text.fake_model import Answer, FakeModel
from tests.text.tiny_text import write_model

__all__ = ["at"]
SMALL = ("--steps", 1, "--size", "32x32")
Enhancing = Callable[..., tuple[Aimage, FakeModel]]


@pytest.fixture
def enhancing(
    stocked: Callable[[], Aimage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Enhancing:
    """Return a command line with the image model x and the language model talk, a fake."""

    def make(answer: Callable[[TextRequest], Answer]) -> tuple[Aimage, FakeModel]:
        fake, here = FakeModel(answer), stocked()
        fake.take_over(monkeypatch)
        here("create", "talk", write_model(tmp_path / "talk"))
        return here, fake

    return make


def longer(request: TextRequest) -> Answer:
    """Answer with a prompt that has the seed in it, and marks around it."""
    seed = request.sampling.seed
    return [TextDelta("hm", "thinking"), f'Prompt: "a fox of {seed},\n', 'in the snow"\n']


def test_each_picture_has_a_prompt_of_its_seed_and_both_prompts_are_stated(
    enhancing: Enhancing, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, fake = enhancing(longer)
    asked_before_load, load = list[int](), generate.load

    def loading(*arguments: Any, **options: Any) -> Any:
        asked_before_load.append(len(fake.asked))
        return load(*arguments, **options)

    monkeypatch.setattr(generate, "load", loading)
    named = Aimage(here.home, here.store, {"AIMAGE_ENHANCER": "talk"})
    said = named("run", "x", "fox", "--enhance", *SMALL, "--seed", 4, "-n", 2)
    assert said.out == "fox-4.png\nfox-5.png\n" and "prompt: a fox of 5, in the snow" in said.err
    assert asked_before_load == [2]
    found = [read_metadata((here.home / f"fox-{seed}.png").read_bytes()) for seed in (4, 5)]
    assert [one["prompt"] for one in found] == [f"a fox of {n}, in the snow" for n in (4, 5)]
    assert {one["original_prompt"] for one in found} == {"fox"}
    assert all(one["enhancer"].startswith("talk@sha256:") for one in found)
    here("replay", "fox-5.png")
    assert len(fake.asked) == 2


def test_an_empty_prompt_gives_any_one(enhancing: Enhancing) -> None:
    here, fake = enhancing(longer)
    done = here("run", "x", "--enhancer", "talk", *SMALL, "--seed", 4, stdin="")
    assert done.out == "a-fox-of-4-in-the-snow-4.png\n"
    assert fake.asked[0].messages[1]["content"] == ANY


@pytest.mark.integration
def test_the_language_model_and_its_instruction_are_chosen(enhancing: Enhancing) -> None:
    here, fake = enhancing(longer)
    config = here.home / "config" / "aimage" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text('{"run": {"enhancer": "talk"}}')
    (here.home / "how.txt").write_text("Be wild.\n")
    how = ("--enhance-instruction", "how.txt")
    here("run", "x", "fox", "--enhance", *how, *SMALL, "--seed", 1)
    assert fake.asked[0].messages[0]["content"] == "Be wild."
    assert "requires --enhance" in here("run", "x", "fox", *how, code=2).err
    for name, code, text in (("none", 3, "not found"), ("/", 2, "cannot read")):
        other = ("--enhance", "--enhance-instruction", name)
        assert text in here("run", "x", "fox", *other, *SMALL, code=code).err


@pytest.mark.parametrize(
    ("answer", "options", "code", "message"),
    [
        (["<think>only thoughts"], ("--enhance=talk",), 1, "returned no prompt"),
        ([ModelError("broken")], ("--enhancer", "talk"), 1, "broken"),
        (["a"], ("--enhance",), 2, "no language model is named for --enhance"),
        (["a"], ("--enhancer", "x"), 1, "create NAME --enhancer --from x:latest"),
    ],
)
def test_a_language_model_that_fails_gives_no_picture(
    enhancing: Enhancing, answer: Answer, options: tuple[str, ...], code: int, message: str
) -> None:
    here, _ = enhancing(lambda _: answer)
    assert message in here("run", "x", "fox", *options, *SMALL, code=code).err
    assert not list(here.home.glob("*.png"))


def test_the_language_model_is_let_go_when_memory_is_short(
    enhancing: Enhancing, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, fake = enhancing(longer)
    enhancer = LocalEnhancer(Reference.parse("x"), LocalOptions(is_last=False))
    loads = []
    with click.Context(click.Command("run")) as context:
        context.meta[f"{META}store"] = here.store
        for free in (0, 1 << 40, 1 << 40):
            monkeypatch.setattr(machine, "read_available_memory", lambda free=free: free)
            enhancer.write(Enhancement(Reference.parse("talk")), [GenerateRequest.draft("fox")])
            loads.append(len(fake.loads))
    assert loads == [1, 2, 2]  # the second one stays


@pytest.mark.integration
def test_a_worker_enhances_with_a_language_model_of_its_own(
    at: Callable[[ScriptedWorker], Aimage],
) -> None:
    with ScriptedWorker(drawing).running() as worker:
        here = at(worker)
        (here.home / "how.txt").write_text("Be wild.\n")
        how = ("--enhance-instruction", "how.txt")
        for options in (("--enhance",), ("--enhancer", "talk", *how), ()):
            here("run", "x", "a fox", *options, "--seed", 1)
        assert "requires --enhance" in here("run", "x", "a fox", *how, code=2).err
        missing = ("--enhance", "--enhance-instruction", "none")
        assert "not found" in here("run", "x", "a fox", *missing, code=3).err
    names = ("enhance", "enhance_instruction")
    sent = [tuple(map(asked.value.get, names)) for asked in worker.asked]
    assert sent == [(True, None), ("talk:latest", "Be wild."), (None, None)]
