"""The verbs of the command line: names of other tools, suggestions, help and completion."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage import __version__
from clowder_aimage.__main__ import main as start
from clowder_aimage.cli import verbs
from clowder_aimage.cli.main import ALIASES, GROUPS, VERBS
from tests.process import PROGRAM, Aimage, run
from tests.real_registry import RealRegistry


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("puls", "did you mean 'aimage pull'?"),
        ("pusj", "did you mean 'aimage push'?"),
        ("lsit", "did you mean 'aimage ls'?"),
        ("imagse", "did you mean 'aimage ls'?"),
        ("psh", "did you mean 'aimage push'?"),
        ("srve", "did you mean 'aimage serve'?"),
        ("imagine", "'aimage run' generates a picture"),
        ("models", "'aimage --help' lists the verbs"),
        ("build", "'aimage create' packs a model directory"),
        ("whoami", "'aimage login HOST' checks the stored credentials of a registry"),
        ("frobnicate", "'aimage --help' lists the verbs"),
    ],
)
def test_an_unknown_verb_is_refused_with_a_suggestion(
    aimage: Callable[..., Aimage], word: str, hint: str
) -> None:
    done = aimage()(word, "x", code=2)
    assert done.err == f"aimage: unknown verb '{word}'\n  {hint}\n"
    assert done.out == ""


def test_the_package_can_be_run(aimage: Callable[..., Aimage]) -> None:
    done = run([sys.executable, "-m", "clowder_aimage", "frobnicate"], text=True)
    assert (done.returncode, done.stderr) == (2, aimage()("frobnicate", code=2).err)


_INTERRUPTED = """
import signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name != {module!r}:
            return None
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            from clowder_aimage.errors import UsageError
            raise {error} from None

sys.meta_path.insert(0, Interrupting())
sys.argv = ["aimage", "ls"]
from clowder_aimage.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "error", ["SyntaxError('cannot load a module')", "UsageError('an extra is missing')"]
)
def test_an_interrupt_that_an_import_reports_as_another_error_is_an_interrupt(error: str) -> None:
    module = "clowder_aimage.cli.verbs.ls"
    done = run([sys.executable, "-c", _INTERRUPTED.format(module=module, error=error)], text=True)
    assert done.stderr.lstrip() == "aimage: interrupted\n"
    assert done.returncode == 130


def test_an_interrupt_while_the_program_is_imported_is_silent() -> None:
    module = "clowder_aimage.cli.main"
    program = _INTERRUPTED.format(module=module, error="AssertionError")
    done = run([sys.executable, "-c", program], text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_an_ignored_interrupt_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the background jobs of a shell."""
    found = []
    monkeypatch.setattr(
        "clowder_aimage.cli.main.main", lambda: found.append(signal.getsignal(signal.SIGINT))
    )
    before = signal.getsignal(signal.SIGINT)
    try:
        for disposition in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(signal.SIGINT, disposition)
            start()
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [signal.SIG_IGN, signal.SIG_DFL]


@pytest.mark.parametrize(("alias", "verb"), ALIASES.items())
def test_an_alias_runs_its_verb(aimage: Callable[..., Aimage], alias: str, verb: str) -> None:
    shown, expected = aimage()(alias, "--help"), aimage()(*verb.split(), "--help")
    assert shown.out == expected.out.replace(f"aimage {alias}", f"aimage {verb}")


def test_an_alias_reads_the_store(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    for alias in ("list", "images"):  # as JSON: the table says how long ago
        assert here(alias, "--json").value == here("ls", "--json").value
    assert here("inspect", "x").out == here("show", "x").out


def test_help_lists_every_verb_in_a_group_and_no_alias(aimage: Callable[..., Aimage]) -> None:
    shown = aimage()("--help").out
    for group, listed in GROUPS.items():
        part = shown.partition(f"{group}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in part.splitlines()] == list(listed)
    assert not any(f"\n  {alias} " in shown for alias in ALIASES)


def test_the_verb_help_shows_the_help_of_a_verb(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    assert here("help").out == here("--help").out
    assert here("help", "push").out == here("push", "--help").out
    assert here("help", "registry", "serve").out == here("registry", "serve", "--help").out
    assert "did you mean 'aimage push'?" in here("help", "pusj", code=2).err


def test_the_verb_version_prints_the_version(aimage: Callable[..., Aimage]) -> None:
    assert aimage()("version").line == __version__
    assert aimage()("version", "--json").value == {"version": __version__}


@pytest.mark.parametrize(
    ("arguments", "message", "command"),
    [
        (("pull",), "missing argument 'REF...'", "pull"),
        (("pull", "x", "--nothing"), "no such option '--nothing'", "pull"),
        (("pull", "x", "--jobs", "0"), "invalid value for '--jobs'", "pull"),
        (("df", "x"), "got unexpected extra argument", "df"),
    ],
)
def test_an_error_of_the_options_has_the_form_of_all_errors(
    aimage: Callable[..., Aimage], arguments: tuple[str, ...], message: str, command: str
) -> None:
    first, second = aimage()(*arguments, code=2).err.splitlines()
    assert first.startswith(f"aimage: {message}")
    assert second == f"  see: aimage {command} --help"


@pytest.mark.parametrize(
    ("variables", "is_coloured"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
    ids=["xterm", "NO_COLOR", "dumb"],
)
def test_an_error_has_colours_on_a_terminal_only(
    aimage: Callable[..., Aimage], variables: dict[str, str], is_coloured: bool
) -> None:
    master, slave = pty.openpty()
    environment = {**aimage().env(), "NO_COLOR": "", **variables}
    run([*PROGRAM, "frobnicate"], stderr=slave, env=environment)
    os.close(slave)
    shown = os.read(master, 4096).decode()
    os.close(master)
    assert ("\x1b[31maimage: \x1b[0m" in shown) == is_coloured
    assert "unknown verb 'frobnicate'" in shown
    assert "\x1b" not in run([*PROGRAM, "frobnicate"], env=environment).stderr.decode()


def test_an_error_with_json_is_an_event(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    (line,) = here("show", "nothing", "--json", code=3).err.splitlines()
    found = json.loads(line)
    assert (found["event"], found["code"], found["exit"]) == ("error", "NotFoundError", 3)
    assert "nothing:latest" in found["message"]
    assert "aimage pull" in found["hint"]
    (line,) = here("pull", "--json", code=2).err.splitlines()
    assert json.loads(line)["code"] == "UsageError"


@pytest.mark.parametrize("option", ["--concurrency", "--max-workers"])
def test_options_of_other_tools_are_accepted(aimage: Callable[..., Aimage], option: str) -> None:
    here = aimage()
    message = "cannot reach localhost:1"
    assert message in here("pull", "localhost:1/x", option, "2", code=1).err
    assert message in here("pull", "localhost:1/x", f"{option}=2", code=1).err
    assert "no such option" in here("ls", option, "2", code=2).err


def _completed(here: Aimage, *words: str) -> list[str]:
    """Return what bash completes for the last word of a command line."""
    variables = {
        "_AIMAGE_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(("aimage", *words)),
        "COMP_CWORD": str(len(words)),
    }
    done = run(PROGRAM, env={**os.environ, **here.env(), **variables}, text=True)
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_completion_has_verbs_options_and_names(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    assert _completed(here, "pu") == ["push", "pull"]
    assert "--jobs" in _completed(here, "pull", "--j")
    for verb in ("show", "rm", "du", "tag", "diff", "run"):
        assert "x:latest" in _completed(here, verb, "x")
    assert _completed(here, "show", "nothing") == []


def test_completion_has_the_tags_of_a_registry(
    aimage: Callable[[], Aimage], tiny: Path, registry: RealRegistry
) -> None:
    here = aimage()
    here("create", "-q", "x", tiny, "--whole-files")
    name = f"{registry.host}/completed/x"
    for tag in ("v1", "v2", "w1"):
        here("tag", "x", f"{name}:{tag}")
        here("push", "-q", f"{name}:{tag}")
        here("rm", f"{name}:{tag}")
    assert _completed(here, "pull", f"{name}:v") == [f"{name}:v1", f"{name}:v2"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_names_the_program(aimage: Callable[..., Aimage], shell: str) -> None:
    script = aimage()("completion", shell).out
    assert f"_AIMAGE_COMPLETE={shell}_complete" in script
    assert "invalid value" in aimage()("completion", "csh", code=2).err


def test_every_module_of_verbs_is_listed() -> None:
    modules = {path.stem for path in Path(verbs.__file__).parent.glob("[a-z]*.py")}
    listed = {module for module, _ in VERBS.values()}
    # The modules of a group begin with its name.
    unlisted = {name for name in modules if name.partition("_")[0] not in listed} - listed
    assert not unlisted, f"add a line to GROUPS in cli/main.py: {', '.join(unlisted)}"


def test_every_verb_has_a_module_and_a_first_line(aimage: Callable[..., Aimage]) -> None:
    for name in VERBS:
        shown = aimage()(name, "--help").out
        assert f"Usage: aimage {name}" in shown
        assert "Options:\n  -" in shown  # and no arguments
