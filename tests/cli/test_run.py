"""The prompt, the output, the worker and the prompt loop of ``run``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from clowder_aimage.engine import endpoint
from tests.cli.test_remote_verbs import DIGEST, TINY, at, done, drawing, png
from tests.process import PROGRAM, Aimage, run, spawn
from tests.scripted_worker import Asked, Says, ScriptedWorker, says

__all__ = ["at"]
SMALL = ("--steps", 1, "--seed", 1)


class Unset(Aimage):
    """A command line without AIMAGE_HOST."""

    def env(self) -> dict[str, str]:
        return {name: value for name, value in super().env().items() if name != "AIMAGE_HOST"}


@pytest.mark.parametrize(
    ("words", "stdin"),
    [
        (("two", "red", "circles"), ""),
        (("two red circles",), "unused"),
        ((), "two red circles\n"),
        (("-",), "two red circles\n"),
    ],
)
def test_the_prompt_is_joined_or_read(
    at: Callable[[ScriptedWorker], Aimage], words: tuple[str, ...], stdin: str
) -> None:
    with ScriptedWorker(drawing).running() as worker:
        at(worker)("run", "x", *words, stdin=stdin)
    assert worker.asked[0].value["prompt"] == "two red circles"


@pytest.mark.parametrize(
    ("words", "stdin", "text"),
    [
        (("",), "", "the prompt is empty"),
        ((" ", ""), "", "the prompt is empty"),
        ((), "\n", "the prompt is empty"),
        (("-",), "a" * (1 << 20) + "a", "exceeds"),
    ],
)
def test_a_prompt_that_is_empty_or_too_long_is_refused(
    at: Callable[[ScriptedWorker], Aimage], words: tuple[str, ...], stdin: str, text: str
) -> None:
    with ScriptedWorker(drawing).running() as worker:
        here = at(worker)
        assert text in here("run", "x", *words, stdin=stdin, code=2).err
    assert not worker.asked
    assert not list(here.home.glob("*.png"))


def test_a_prompt_that_is_no_text_is_refused(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    ended = run([*PROGRAM, "run", "x", "-"], input=b"\xff", env=here.env(), cwd=here.home)
    assert ended.returncode == 2
    assert b"not valid UTF-8" in ended.stderr


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "tokenizer.json",
            {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
            "the tokenizer failed: PanicException",
        ),
        (
            "tokenizer_config.json",
            {"chat_template": "{{ raise_exception(messages[0].content) }}"},
            "the chat template refuses the messages",
        ),
    ],
)
def test_a_hostile_tokenizer_is_an_error(
    aimage: Callable[..., Aimage],
    tiny: Path,
    tmp_path: Path,
    name: str,
    data: dict[str, object],
    message: str,
) -> None:
    shutil.copytree(tiny, tmp_path / "model")
    folder = tmp_path / "model" / "tokenizer"
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | data))
    if name == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    here = aimage()
    here("create", "x", tmp_path / "model")
    failed = here("run", "x", "a fox", *SMALL, "--size", "32x32", code=1)
    assert failed.err.splitlines()[-1] == f"aimage: {message}"


def test_memory_is_limited(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    fox = ("run", "x", "a fox", *SMALL, "--size", "32x32", "-o", "fox.png", "--local")
    refused = here(*fox, "--memory", "1MiB", code=2).err
    assert re.search("1 MiB of memory are insufficient .*: [0-9]+ MiB are required", refused)
    assert "invalid value for '--memory'" in here(*fox, "--memory", "much", code=2).err
    assert not (here.home / "fox.png").exists()
    made = here(*fox, "--memory", "64GiB", "-v").err
    plan = "memory: each network is released after its last use, about [0-9]+ MiB of 65536 MiB"
    assert re.search(plan, made)


def test_without_a_fast_blas_a_warning_says_what_to_install(
    stocked: Callable[[], Aimage], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = stocked()
    fox = ("run", "x", "a fox", *SMALL, "--size", "32x32", "-o", "fox.png", "--local")
    assert "warning" not in here(*fox).err
    monkeypatch.setattr("clowder_aimage.model.backend.BLAS", None)
    warned = here(*fox).err
    assert "rendering on cpu (no fast BLAS)\n" in warned
    assert "takes many times longer than with OpenBLAS; to install it:\n" in warned
    assert "[mlx]" in warned


def test_size_is_width_and_height(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(drawing).running() as worker:
        at(worker)("run", "x", "a fox", "--size", "32x48")
    assert worker.asked[0].value["size"] == "32x48"


def test_the_time_is_printed(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(drawing).running() as worker:
        last = at(worker)("run", "x", "a", "fox", "-n", 2).err.splitlines()[-1]
        assert re.fullmatch(r"2 pictures in \d+\.\d s", last)
        assert " in " not in at(worker)("run", "x", "a fox", "-q").err


@pytest.mark.parametrize(("suffix", "kind"), [("jpg", "JPEG"), ("JPEG", "JPEG"), ("webp", "WEBP")])
def test_the_suffix_is_the_format(stocked: Callable[[], Aimage], suffix: str, kind: str) -> None:
    here = stocked()
    assert here("run", "x", "a fox", *SMALL, "-o", f"y.{suffix}").line == f"y.{suffix}"
    with Image.open(here.home / f"y.{suffix}") as picture:
        assert picture.format == kind


def test_a_worker_is_asked_for_the_format(at: Callable[[ScriptedWorker], Aimage]) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "JPEG")

    def script(asked: Asked) -> Says:
        is_jpeg = asked.value["output_format"] == "jpeg"
        return Says([done(buffer.getvalue() if is_jpeg else png())])

    with ScriptedWorker(script).running() as worker:
        here = at(worker)
        here("run", "x", "a fox", "-o", "y.jpg")
        assert (here.home / "y.jpg").read_bytes() == buffer.getvalue()
        assert "expected a WEBP" in here("run", "x", "a fox", "-o", "y.webp", code=5).err


def test_a_directory_is_made(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(drawing).running() as worker:
        here = at(worker)
        assert here("run", "x", "a fox", "--seed", 1, "-o", "a/b/").line == "a/b/a-fox-1.png"
        assert (here.home / "a/b/a-fox-1.png").is_file()
        (here.home / "file").write_text("kept")
        here("run", "x", "a fox", "-o", "file/", code=1)
        assert (here.home / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("Two RED circles!", "two-red-circles"),
        ("../a/b  _c_", "a-b-c"),
        ("ein Füchslein, 二つの円", "ein-füchslein-二つの円"),
        ("a lighthouse at dusk, oil on canvas, by hand", "a-lighthouse-at-dusk-oil-on-canvas-by"),
        ("x" * 300, "x" * 40),
        ("!?", "picture"),
    ],
)
def test_a_picture_is_named_by_its_prompt(
    at: Callable[[ScriptedWorker], Aimage], prompt: str, name: str
) -> None:
    with ScriptedWorker(drawing).running() as worker:
        assert at(worker)("run", "x", prompt, "--seed", 1).line == f"{name}-1.png"


def test_the_bytes_are_written_to_stdout(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(drawing).running() as worker:
        here = at(worker)
        command = [*PROGRAM, "run", "x", "a fox", "--seed", "5", "-o", "-"]
        ended = run(command, env=here.env(), cwd=here.home)
        assert ended.stdout == png(seed=5, prompt="Füchse")
        for more in (("-n", 2), ("--json",), ("--open",)):
            assert here("run", "x", "a fox", "-o", "-", *more, code=2).out == ""
        master, slave = pty.openpty()
        ended = run(command, stdout=slave, env=here.env(), cwd=here.home)
        os.close(slave)
        os.close(master)
    assert ended.returncode == 2
    assert b"refusing to write a picture to a terminal" in ended.stderr
    assert len(worker.asked) == 1
    assert not list(here.home.glob("*.png"))


# -- the worker


@pytest.fixture
def default(
    aimage: Callable[..., Aimage], monkeypatch: pytest.MonkeyPatch
) -> Callable[[ScriptedWorker], Aimage]:
    """Return ``default(worker)``: a command line whose default worker this is."""

    def make(worker: ScriptedWorker) -> Aimage:
        monkeypatch.setattr(endpoint, "DEFAULT_HOST", worker.host)
        here = aimage()
        return Unset(here.home, here.store)

    return make


def listing(asked: Asked) -> Says:
    return says({"models": [TINY]}) if asked.method == "GET" else drawing(asked)


def test_the_default_worker_generates_what_it_has(
    default: Callable[[ScriptedWorker], Aimage],
) -> None:
    with ScriptedWorker(listing).running() as worker:
        here = default(worker)
        said = here("run", "tiny", "a fox", "--seed", 1)
        assert f"rendering on the worker at http://{worker.host}; --local" in said.err
        here("run", f"tiny@sha256:{DIGEST}", "a fox", "--seed", 1)
        posts = sum(asked.method == "POST" for asked in worker.asked)
        for arguments in (
            ("tiny", "a fox", "--local"),
            ("tiny", "a fox", "--dtype", "f32"),
            ("other", "a fox"),
        ):
            here("run", *arguments, code=3)
        named = Aimage(here.home, here.store, {"AIMAGE_HOST": worker.host})
        named("run", "tiny", "a fox", "--local", code=3)
    assert posts == sum(asked.method == "POST" for asked in worker.asked) == 2


@pytest.mark.parametrize("server", ["nginx", "aimagery", ""])
def test_another_server_at_the_default_address_is_not_used(
    default: Callable[[ScriptedWorker], Aimage], server: str
) -> None:
    with ScriptedWorker(listing, server=server).running() as worker:
        default(worker)("run", "tiny", "a fox", code=3)
    assert not worker.asked


@pytest.fixture
def other(
    default: Callable[[ScriptedWorker], Aimage], stocked: Callable[[], Aimage]
) -> Iterator[tuple[Aimage, ScriptedWorker]]:
    """Yield a command line with x in the store, and its default worker with another x."""

    def script(asked: Asked) -> Says:
        another = TINY | {"name": "x:latest"}
        return says({"models": [another]}) if asked.method == "GET" else drawing(asked)

    stocked()
    with ScriptedWorker(script).running() as worker:
        yield default(worker), worker


def test_an_aimage_of_the_same_name_in_the_store_is_preferred(
    other: tuple[Aimage, ScriptedWorker],
) -> None:
    here, worker = other
    said = here("run", "x", "a fox", *SMALL)
    offer = f"a worker is running at http://{worker.host}; --remote generates there"
    assert said.err.splitlines()[0] == offer
    assert "rendering on cpu" in said.err
    assert offer in here("run", "localhost:1/x", "a fox", code=1).err
    for arguments in (
        ("x", "-q"),
        ("x", "--json"),
        ("x", "--local"),
        ("y",),
        ("localhost:1/y", "-q"),
    ):
        assert "--remote" not in here.attempt("run", *arguments, "a fox", *SMALL).err
    assert {asked.method for asked in worker.asked} == {"GET"}
    here("run", "x", "a fox", "--remote")
    assert worker.asked[-1].method == "POST"


def test_the_worker_is_used_where_the_configuration_prefers_it(
    other: tuple[Aimage, ScriptedWorker],
) -> None:
    here, worker = other
    file = here.home / "config" / "aimage" / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"run": {"remote": true}}')
    for name in ("x", "localhost:1/x"):
        assert "rendering on the worker" in here("run", name, "a fox").err
    assert [one.value["model"] for one in worker.asked if one.method == "POST"] == [
        "x:latest",
        "localhost:1/x:latest",
    ]
    assert "rendering on cpu" in here("run", "x", "a fox", *SMALL, "--local").err
    here("run", "y", "a fox", code=3)  # only the worker's names are sent to it
    shown = json.loads(here("config", "show", "--json").out)["settings"]
    assert {"name": "run.remote", "value": True, "origin": str(file)} in shown
    file.write_text('{"run": {"remote": "yes"}}')
    assert "'yes' is not of type 'boolean'" in here("run", "x", "a fox", code=2).err


def test_a_worker_that_is_asked_for_must_answer(
    at: Callable[[ScriptedWorker], Aimage], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedWorker(drawing).running() as worker:
        here = at(worker)
        assert "--local" in here("run", "x", "a fox", "--remote", "--local", code=2).err
        assert (
            "omit --remote" in here("run", "x", "a fox", "--remote", "--dtype", "f32", code=2).err
        )
    assert not worker.asked
    monkeypatch.setattr(endpoint, "DEFAULT_HOST", worker.host)  # not used any more
    assert (
        "cannot connect to the worker"
        in Unset(here.home, here.store)("run", "x", "a fox", "--remote", code=1).err
    )


def test_remote_verbs_refuse_other_servers(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(listing, server="ollama").running() as worker:
        for arguments in (
            ("ps",),
            ("stop", "tiny"),
            ("ls", "--remote"),
            ("rm", "--remote", "tiny"),
            ("pull", "--remote", "localhost:1/x"),
            ("run", "tiny", "a fox"),
        ):
            said = at(worker)(*arguments, code=1)
            assert f"the server at http://{worker.host} is not an aimage worker" in said.err
            assert "ollama answers there" in said.err
            assert said.out == ""
    assert {asked.path for asked in worker.asked} == {"/"}


# -- the prompt loop


def typed(here: Aimage, *lines: str) -> tuple[int, str, str]:
    """Return the exit code, the terminal's text and stderr of ``run tiny`` with lines typed."""
    master, slave = pty.openpty()
    child = spawn(
        [*PROGRAM, "run", "tiny"],
        stdin=slave,
        stdout=slave,
        stderr=subprocess.PIPE,
        env=here.env() | {"TERM": "dumb"},
        cwd=here.home,
    )
    os.close(slave)
    shown, sent = "", 0
    with contextlib.suppress(OSError):  # the end of file of a pseudo-terminal
        while data := os.read(master, 1 << 16):
            shown += data.decode()
            if shown.count(">>> ") > sent and sent < len(lines):
                os.write(master, lines[sent].encode())
                sent += 1
    _, err = child.communicate(timeout=60)
    os.close(master)
    return child.returncode, shown, err.decode()


def test_prompts_are_read_on_a_terminal(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(drawing).running() as worker:
        here = at(worker)
        code, shown, err = typed(
            here,
            "a fox\n",
            "/set seed 7\n",
            "/set width 512\n",
            "/set width many\n",
            "/set depth 3\n",
            "/set negative a red box\n",
            "/set guidance 0\n",
            "refused\n",
            "/set guidance 2\n",
            "/set cache-threshold 0.1\n",
            "/show\n",
            "a dog\n",
            "/set size 32x48\n",
            "/set width\n",
            "/set n 2\n",
            "two cats\n",
            "/nonsense\n",
            "/help\n",
            "/bye\n",
        )
    assert code == 0
    prompts = [asked.value["prompt"] for asked in worker.asked]
    assert prompts == ["a fox", "a dog", "two cats", "two cats"]
    second, third = worker.asked[1].value, worker.asked[2].value
    assert (second["seed"], second["width"], second["negative_prompt"]) == (7, 512, "a red box")
    assert (third["size"], third["cache_threshold"]) == ("32x48", 0.1)
    assert {"a-dog-7.png", "two-cats-7.png", "two-cats-8.png"} <= {
        p.name for p in here.home.iterdir()
    }
    assert "two-cats-8.png" in shown
    for text in (
        "width must be a multiple of 16",
        "unknown option depth",
        "negative requires guidance above 0",
        "unknown command /nonsense",
        "/set NAME VALUE",
    ):
        assert text in err
    assert re.search(r"\bwidth +512\b", err)


def test_an_error_and_the_end_of_the_input_keep_the_loop_in_order(
    at: Callable[[ScriptedWorker], Aimage],
) -> None:
    def script(asked: Asked) -> Says:
        return (
            says({"error": {"message": "odd"}}, 400)
            if "odd" in asked.value["prompt"]
            else (drawing(asked))
        )

    with ScriptedWorker(script).running() as worker:
        code, _, err = typed(at(worker), "odd\n", "a fox\n", "\x04")
    assert code == 0
    assert "aimage: odd" in err
    assert "1 picture in" in err
