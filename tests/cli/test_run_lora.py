"""``run`` and ``replay`` with adapters."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.cli.test_remote_verbs import TINY as TINY_MODEL
from tests.cli.test_remote_verbs import at, drawing
from tests.cli.test_run import default, typed
from tests.conftest import TINY
from tests.lora_file import write_lora
from tests.process import Aimage
from tests.scripted_worker import Asked, Says, ScriptedWorker, says
from tests.store import copy_store

pytest.importorskip("mlx")

__all__ = ["at", "default"]
SMALL = ("--steps", 1, "--seed", 1, "--size", "32x32", "--local")


@pytest.fixture(scope="module")
def styled(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Aimage:
    """Return the command line with the tiny model ``x`` and its adapter ``style``."""
    home = tmp_path_factory.mktemp("styled")
    made = Aimage(home, copy_store(tiny_store, home / "store"))
    file = write_lora(home / "ink.safetensors", trigger_words="ink wash")
    made("create", "style", file, "--base", "x", "-q")
    write_lora(home / "wide.safetensors", width=64)
    return made


@pytest.fixture
def here(aimage: Callable[[], Aimage], styled: Aimage) -> Aimage:
    """Return the command line with a copy of that store, and files of adapters."""
    found = aimage()
    copy_store(styled.store, found.store)
    for name in ("ink.safetensors", "wide.safetensors"):
        shutil.copy(styled.home / name, found.home)
    return found


def drawn(here: Aimage, *words: object, prompt: str = "a fox") -> bytes:
    here("run", "x", prompt, *SMALL, "-o", "made.png", *words)
    return (here.home / "made.png").read_bytes()


def facts(data: bytes) -> dict[str, Any]:
    from clowder_aimage.model.picture_metadata import read_metadata

    return read_metadata(data)


def pixels(data: bytes) -> bytes:
    return Image.open(io.BytesIO(data)).tobytes()


def test_an_adapter_changes_the_picture_as_its_strength_says(here: Aimage) -> None:
    plain = pixels(drawn(here))
    assert pixels(drawn(here, "--lora", "style:0.0")) == plain
    whole = pixels(drawn(here, "--lora", "style:latest:1"))
    assert whole != plain
    assert pixels(drawn(here, "--lora", "style")) == whole
    assert pixels(drawn(here, "--lora", "ink.safetensors")) == whole
    by_path = drawn(here, "--lora", here.home / "ink.safetensors")
    assert pixels(by_path) == whole and facts(by_path)["loras"][0]["model"] == "ink.safetensors"
    assert pixels(drawn(here, prompt="a fox <lora:style:1>")) == whole
    twice = pixels(drawn(here, "--lora", "style:0.5", "--lora", "./ink.safetensors:0.5"))
    assert len(twice) == len(whole) and twice not in (plain,)
    assert pixels(drawn(here, "--lora", "style:-1.5")) not in (plain, whole)


def test_a_directory_of_adapters_has_names(here: Aimage) -> None:
    write_lora(here.home / "loras" / "styles" / "ink.safetensors")
    made = drawn(here, "--lora-dir", "loras", "--lora", "styles/ink:1")
    assert pixels(made) == pixels(drawn(here, "--lora", "style"))
    (use,) = facts(made)["loras"]
    assert use["model"] == "styles/ink" and use["strength"] == 1.0


def test_trigger_words_are_offered_and_added(here: Aimage) -> None:
    run = ("run", "x", "a fox", *SMALL, "-o", "made.png")
    offered = here(*run, "--lora", "style").err
    assert "trigger words of the adapters: ink wash" in offered
    assert "trigger words" not in here("run", "x", "Ink Wash", *run[3:], "--lora", "style").err
    assert "trigger words" not in here(*run, "--lora", "style", "--trigger").err
    assert facts((here.home / "made.png").read_bytes())["prompt"] == "a fox, ink wash"


def test_a_picture_with_adapters_is_replayed(here: Aimage) -> None:
    made = drawn(here, "--lora", "style:0.8", "--lora", "ink.safetensors:-0.5")
    (first, second) = facts(made)["loras"]
    assert first["model"] == "style" and first["strength"] == 0.8
    assert second["model"] == "ink.safetensors" and second["digest"].startswith("sha256:")
    here("rm", "style")
    here("create", "style", here.home / "ink.safetensors", "--base", "x", "-q")
    assert here("replay", "made.png").out == "equal\n"
    (here.home / "ink.safetensors").rename(here.home / "other.safetensors")
    assert "no file ink.safetensors" in here("replay", "made.png", code=3).err
    moved = ("--lora", "style", "--lora", "other.safetensors")
    assert here("replay", "made.png", *moved).out == "equal\n"
    assert here("replay", "made.png", "--lora", "style", code=2).err.count("2 adapters")
    write_lora(here.home / "ink.safetensors", 5)
    assert "is not the adapter" in here("replay", "made.png", code=5).err


def test_adapters_change_between_prompts(here: Aimage) -> None:
    here("tag", "x", "tiny")
    expected = pixels(drawn(here, "--lora", "style:0.5"))
    plain = pixels(drawn(here))
    code, _, err = typed(
        here,
        "/set size 32x32\n",
        "/set steps 1\n",
        "/set seed 1\n",
        "one <lora:style:0.5>\n",
        "a fox <lora:style:0.5>\n",
        "/set lora none\n",
        "a fox\n",
        "/set lora wide.safetensors\n",
        "a fox\n",
        "/set lora\n",
        "a fox\n",
        "/set lora style:0.5\n",
        "a fox\n",
        "/bye\n",
    )
    assert code == 0 and "adapter none:latest not found" in err and "wide.safetensors" in err
    made = [here.home / f"a-fox-1{end}.png" for end in ("", "-2", "-3")]
    assert [pixels(path.read_bytes()) for path in made] == [expected, plain, expected]


def test_an_adapter_is_pulled(here: Aimage, repository: str) -> None:
    name = f"{repository}:v1"
    here("tag", "style", name)
    here("push", name, "-q")
    expected = pixels(drawn(here, "--lora", "style"))
    here("rm", "style", name)
    here("gc", "--grace", "0s")
    assert pixels(drawn(here, "--lora", f"{name}:1.0")) == expected
    assert name in here("ls").out
    assert here("replay", "made.png").out == "equal\n"


def test_an_adapter_is_pulled_without_its_base(
    here: Aimage, aimage: Callable[..., Aimage], repository: str
) -> None:
    base, style = f"{repository}:base", f"{repository}:style"
    for name, new in (("x", base), ("style", style)):
        here("tag", name, new)
        here("push", new, "-q")
    there = aimage("there")
    there("pull", style, "-q")
    assert base not in there("ls").out
    made = ("run", base, "a fox", *SMALL, "--lora", f"{style}:0.5", "-o", "there.png")
    there(*made)
    assert pixels((there.home / "there.png").read_bytes()) == pixels(
        drawn(here, "--lora", "style:0.5")
    )
    pulled = there("pull", base, style)
    assert len(pulled.out.split()) == 2
    there("gc", "--grace", "0s")
    there(*made)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--lora", "none"), 3, "adapter none:latest not found"),
        (("--lora", "none.safetensors"), 3, "no file none.safetensors"),
        (("--lora", "x"), 2, "x is not an adapter"),
        (("--lora", "style:200.0"), 2, "strength must be a number from -100 to 100"),
        (("--lora", ""), 2, "no name of an adapter"),
        (("--lora", "old.ckpt"), 2, "pickle"),
        (("--lora-dir", "nowhere"), 2, "does not exist"),
        (("--lora", "wide.safetensors"), 5, "wide.safetensors"),
        (("--lora", "bad.safetensors"), 5, "bad.safetensors"),
        (("--lora", "style") * 17, 2, "loras must be a list of at most 16"),
    ],
)
def test_mistakes_with_adapters_are_sentences(
    here: Aimage, words: tuple[str, ...], code: int, message: str
) -> None:
    (here.home / "bad.safetensors").write_bytes(b"x" * 40)
    failed = here("run", "x", "a fox", *SMALL, *words, code=code)
    assert message in failed.err and "Traceback" not in failed.err
    assert not list(here.home.glob("*.png"))


def test_a_prompt_of_tags_alone_is_refused(here: Aimage) -> None:
    assert "only tags" in here("run", "x", "<lora:style>", *SMALL, code=2).err


def test_a_worker_gets_the_adapters(at: Callable[[ScriptedWorker], Aimage]) -> None:
    def script(asked: Asked) -> Says:
        if asked.method == "GET":
            return says({"id": "style:v1", "adapter": {"triggerWords": ["ink wash"]}})
        return drawing(asked)

    with ScriptedWorker(script).running() as worker:
        here = at(worker)
        prompt = "a fox <lora:ink:1>"
        words = ("run", "x", prompt, "--lora", "style:v1:-0.5", "--lora", "b")
        assert "ink wash" not in here(*words, "--trigger").err
        assert "ink wash" in here(*words).err
        here("run", "x", "a fox")
    sent = [asked.value for asked in worker.asked if asked.method == "POST"]
    expected = [{"model": "style:v1", "strength": -0.5}, {"model": "b"}]
    assert sent[0]["loras"] == [*expected, {"model": "ink", "strength": 1.0}]
    assert sent[0]["prompt"] == "a fox" and sent[0]["trigger"] is True
    assert "trigger" not in sent[1] and "loras" not in sent[2]


def test_the_default_worker_is_used_if_it_has_the_adapters(
    default: Callable[[ScriptedWorker], Aimage], stocked: Callable[[], Aimage]
) -> None:
    here = stocked()
    write_lora(here.home / "ink.safetensors")
    digests = {"x:latest": here("create", "x", TINY, "-q").out.strip()}
    digests["ink:latest"] = here("create", "ink", "ink.safetensors", "-q").out.strip()
    listed = [TINY_MODEL | {"name": name, "digest": value} for name, value in digests.items()]

    def script(asked: Asked) -> Says:
        return says({"models": listed}) if asked.method == "GET" else drawing(asked)

    with ScriptedWorker(script).running() as worker:
        own = default(worker)
        words = ("run", "x", "a fox", *SMALL[:-1])

        def is_used(*more: object) -> bool:
            return "rendering on the worker" in own(*words, *more).err

        assert is_used("--lora", "ink") and is_used("--lora", "adapters/x")
        assert not is_used("--lora", "ink.safetensors")
        listed[1] |= {"digest": "sha256:" + "0" * 64}
        assert not is_used("--lora", "ink")
        del listed[1]
        assert not is_used("--lora", "ink")


def test_an_adapter_is_not_run_as_a_model(here: Aimage) -> None:
    failed = here("run", "style", "a fox", *SMALL, code=1)
    assert "aimage run MODEL --lora style" in failed.err


def test_a_file_is_not_sent_to_a_worker(
    at: Callable[[ScriptedWorker], Aimage], tmp_path: Path
) -> None:
    with ScriptedWorker(drawing).running() as worker:
        failed = at(worker)("run", "x", "a", "--remote", "--lora", "./a.safetensors", code=2)
    assert "a worker does not read" in failed.err
    assert not [asked for asked in worker.asked if asked.method == "POST"]


def tampered(here: Aimage, loras: object) -> str:
    """Return the name of a picture with the facts of ``made.png`` and other adapters."""
    from PIL import PngImagePlugin

    known = facts((here.home / "made.png").read_bytes())
    info = PngImagePlugin.PngInfo()
    info.add_itxt("aimage", json.dumps(known | {"loras": loras}))
    with Image.open(here.home / "made.png") as image:
        image.save(here.home / "odd.png", pnginfo=info)
    return "odd.png"


def test_facts_of_strangers_are_checked(here: Aimage) -> None:
    drawn(here)
    for odd in ("style", [["style"]], [{"model": 3}], [{"x": 1}], 5, [{"model": "s", "digest": 4}]):
        assert "cannot read the request" in here("replay", tampered(here, odd), code=2).err


def test_an_adapter_that_was_packed_with_a_model_is_used_by_its_name(here: Aimage) -> None:
    expected = pixels(drawn(here, "--lora", "style:0.5"))
    shutil.copytree(TINY, here.home / "model")
    packed = ("--adapter", "ink=ink.safetensors")
    here("create", "x", "model", *packed, "-q")
    made = drawn(here, "--lora", "adapters/ink:0.5")
    assert pixels(made) == expected
    assert here("replay", "made.png").out == "equal\n"
    assert "not found" in here("run", "x", "a", *SMALL, "--lora", "adapters/no", code=3).err


def test_the_registry_of_a_strangers_adapter_is_said(here: Aimage) -> None:
    drawn(here)
    use = {"model": "127.0.0.1:1/team/x:v1", "strength": 1.0, "digest": "sha256:" + "0" * 64}
    failed = here("replay", tampered(here, [use]), code=1)
    assert "names the registry 127.0.0.1:1" in failed.err and "Traceback" not in failed.err
    failed = here("replay", tampered(here, [use | {"model": "A B"}]), code=2)
    assert "invalid reference" in failed.err
    assert "digest" in here("replay", tampered(here, [use | {"digest": "x"}]), code=5).err
