"""Prompts read line by line, and the commands that set options."""

from __future__ import annotations

import contextlib
import os
import pty
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from clowder_aimage.cli.console import column, terminal_picture
from clowder_aimage.cli.console.option import complete_path
from clowder_aimage.cli.console.output import clean_text
from clowder_aimage.cli.console.prompt_completion import completing, list_completions
from clowder_aimage.cli.console.prompt_loop import keep_history, read_prompts
from clowder_aimage.config.user_directory import resolve_history_file
from clowder_aimage.errors import ModelError, UsageError

OPTIONS = {
    "seeds": click.Option(["--seeds"]),
    "steps": click.Option(["--steps"], type=int),
    "seed": click.Option(["--seed"], type=int, default=7),
    "size": click.Option(["--size"]),
    "lora": click.Option(["--lora", "loras"], multiple=True),
}

Typed = Callable[..., tuple[list[str], dict[str, Any]]]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Typed]:
    """Return a function that types lines; it returns the prompts, and the values at the end."""

    def run(*lines: str | BaseException, fails: Exception | None = None) -> Any:
        values: dict[str, Any] = {"steps": None, "seed": 7, "size": (64, 32), "loras": ()}
        values["seeds"] = (1, 5, 9)
        prompts: list[str] = []
        rest = iter(lines)

        def read(_: str) -> str:
            line = next(rest, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        def make(prompt: str) -> tuple[str, ...]:
            prompts.append(prompt)
            if fails is not None:
                raise fails
            return (f"{prompt}.png",)

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(
            "clowder_aimage.cli.console.prompt_loop.keep_history", contextlib.nullcontext
        )
        with click.Context(click.Command("run")):
            read_prompts(make, values, OPTIONS)
        return prompts, values

    yield run


def test_prompts_are_made_until_the_end_of_the_input(typed: Typed) -> None:
    assert typed(" two red circles ", "", "a square")[0] == ["two red circles", "a square"]
    for end in ("/bye", "/exit", "/quit"):
        assert typed("a", end, "b")[0] == ["a"]


def test_set_changes_values_and_restores_defaults(
    typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    _, values = typed("/set steps 4", "/set --seed 9", "/show")
    assert (values["steps"], values["seed"]) == (4, 9)
    shown = capsys.readouterr().err.split()
    assert shown[shown.index("steps") + 1] == "4" and "64x32" in shown and "1,5,9" in shown
    assert typed("/set seed 9", "/set seed", "/set size")[1] == {
        "steps": None,
        "seed": 7,
        "size": None,
        "loras": (),
        "seeds": (1, 5, 9),
    }


def test_set_alone_shows_the_values_in_columns(
    typed: Typed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column, "get_width", lambda: 60)
    typed("/set lora " + "x" * 200, "/set")
    lines = capsys.readouterr().err.splitlines()[1:-1]
    assert lines[0].split() == ["seeds", "1,5,9", "steps", "default"]
    assert len(lines) == 3 and max(map(len, lines)) <= 60 and "seed 7" in lines[1]
    typed("/help")
    assert max(map(len, capsys.readouterr().err.splitlines())) <= 60


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/s", ["/set ", "/show"]),
        ("/set se", ["seeds ", "seed "]),
        ("/set fit c", ["crop"]),
        ("/set fit ", ["crop", "pad"]),
        ("/set fine f", ["false"]),
        ("/set image fo", ["fox.png", "foxes/"]),
        ("/set image foxes/", ["foxes/a.png"]),
        ("/set image missing/", []),
        ("/set lora in", ["ink:v1"]),
        ("/set nothing x", []),
        ("a prompt of f", []),
        ("", []),
    ],
)
def test_tab_completes_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: list[str]
) -> None:
    (tmp_path / "foxes").mkdir()
    for name in ("fox.png", "foxes/a.png", ".fox", "fo x.png"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    lora = click.Option(["--lora"], multiple=True, shell_complete=lambda *_: ["ink:v1"])
    options = OPTIONS | {
        "fit": click.Option(["--fit"], type=click.Choice(["crop", "pad"])),
        "fine": click.Option(["--fine"], is_flag=True),
        "image": click.Option(["--image"], multiple=True, shell_complete=complete_path),
        "lora": lora,
    }
    with click.Context(click.Command("run")):
        assert list_completions(line, options, ["/set", "/show", "/bye"]) == words


def test_readline_asks_for_completions_while_prompts_are_read() -> None:
    readline = pytest.importorskip("readline")
    before = readline.get_completer()
    with completing(OPTIONS, ["/set"]):
        complete = readline.get_completer()
        # The buffer of readline is empty here.
        assert complete is not before and complete("", 0) is None
        assert readline.get_completer_delims() == " "
    assert readline.get_completer() is before


def test_again_repeats_the_last_prompt_and_open_shows_its_pictures(
    typed: Typed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def launch(path: str) -> int:
        opened.append(path)
        return 0

    monkeypatch.setattr("click.launch", launch)
    assert typed("a", "b", "/set steps 2", "/again", "/open")[0] == ["a", "b", "b"]
    assert opened == ["b.png"] and not capsys.readouterr().err.count("aimage: ")
    monkeypatch.setattr("click.launch", lambda _: 3)
    typed("a", "/open")
    assert "no program opens a.png" in capsys.readouterr().err


def test_adapters_are_set_as_a_list(typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("/set lora ink:0.8 b", "/show")[1]["loras"] == ("ink:0.8", "b")
    assert "ink:0.8 b" in capsys.readouterr().err
    assert typed("/set lora ink", "/set lora", "/show")[1]["loras"] == ()
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set steps many", "invalid value for steps"),
        ("/set width 3", "unknown option width"),
        ("/set stepps 3", "did you mean steps?"),
        ("/sing", "unknown command /sing"),
        ("/help", "/set NAME VALUE"),
        ("/again", "there is no prompt yet"),
        ("/open", "there is no picture yet"),
        (KeyboardInterrupt(), "cancelled; /bye or Ctrl-D ends"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "the line is not valid text"),
    ],
)
def test_mistakes_do_not_end_the_loop(
    typed: Typed, capsys: pytest.CaptureFixture[str], line: str | BaseException, message: str
) -> None:
    prompts, values = typed(line, "go on")
    assert prompts == ["go on"] and values["steps"] is None
    assert message in capsys.readouterr().err


def test_errors_of_a_prompt_are_printed(typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("a", "b", fails=UsageError("too wide", hint="make it smaller"))[0] == ["a", "b"]
    assert "aimage: too wide\n  make it smaller" in capsys.readouterr().err
    typed("a", fails=ModelError("broken"))
    assert "aimage: broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "protocol"),
    [
        (b"\x1b_Gi=31;OK\x1b\\\x1b[?62;4c", terminal_picture.KITTY),
        (b"\x1b[?62;4;22c", terminal_picture.SIXEL),
        (b"\x1b[?62;22c", ""),
        (b"", ""),
    ],
)
def test_the_terminal_is_asked_for_its_protocol(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, protocol: str
) -> None:
    master, slave = pty.openpty()
    monkeypatch.setattr("os.tcgetpgrp", lambda _: os.getpgrp())

    def respond() -> None:
        os.read(master, 1024)
        os.write(master, answer)

    thread = threading.Thread(target=respond)
    thread.start()
    try:
        assert terminal_picture.ask(slave, 5.0 if answer else 0.05) == protocol
    finally:
        thread.join()
        os.close(master)
        os.close(slave)


def test_no_terminal_shows_no_pictures() -> None:
    assert terminal_picture.find_protocol({"TERM": "dumb"}) == ""
    assert terminal_picture.find_protocol({"TERM": "xterm-kitty"}) == terminal_picture.KITTY


def test_prompts_are_kept_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("clowder_aimage.config.user_directory.sys.platform", "linux")
    with keep_history():
        readline.add_history("a red circle")
    file = resolve_history_file()
    assert file is not None
    assert file.read_text() == "a red circle\n" and file.stat().st_mode & 0o777 == 0o600
    readline.clear_history()
    with keep_history():
        assert readline.get_history_item(1) == "a red circle"
    (tmp_path / "aimage").mkdir()
    (tmp_path / "aimage" / "config.json").write_text('{"run": {"history": false}}')
    file.unlink()
    with keep_history():
        readline.add_history("a secret")
    assert not file.exists()
    readline.clear_history()


def test_text_of_a_model_cannot_control_the_terminal() -> None:
    text = "a\tb\n\x1b[2J\x07\x9b \u202e家\u3000族 👩\u200d🚀\r"
    assert clean_text(text) == "a\tb\n\ufffd[2J\ufffd\ufffd \ufffd家\u3000族 👩\u200d🚀\ufffd"
