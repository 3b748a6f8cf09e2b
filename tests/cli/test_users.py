"""Lines as users of docker, oras, crane, ollama and the Hugging Face tools type them.

A scene is a terminal session in an own home. After ``$`` is the line that is typed, with
``# exit code N`` if it fails. Below it are lines of stdout, in order, and after ``!`` lines of
stderr; ``...`` stands for any text, and lines may be left out. ``localhost:5000`` is a registry,
``localhost:5001`` one with accounts, ``localhost:6443`` one with TLS and the certificate authority
``ca.pem``, ``localhost:6444`` refuses plain HTTP as servers in Go do, ``localhost:6500`` is the
AirPlay receiver of macOS, ``localhost:11434`` is ollama, and nothing listens at ``localhost:1``.

A failed line prints ``aimage: SENTENCE`` to stderr and nothing to stdout, unless the scene shows a
line of stdout. It changes and adds no file but blobs, which are kept for the next attempt.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.cli.scenes import EMPTY, GENERATE, PRIVATE, STOCKED
from tests.process import PROGRAM, Aimage, Done, run
from tests.program import find_program
from tests.real_registry import PASSWORD
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving
from tests.scripted_worker import ScriptedWorker, says
from tests.store import copy_store

ROOT = Path(__file__).parents[2]
SHELL = re.compile(r"[|<>&;$~*]")
PROGRAMS = re.compile(r"localhost:500[01]|\b(jq|skopeo) ")
CODE = re.compile(r"\s+# exit code (\d+)$")
ERROR = re.compile(r'^(aimage: \S|Usage: |{"event": "error")', re.MULTILINE)
FUNCTION = f'aimage() {{ {shlex.join(PROGRAM)} "$@"; }}\n'
# A module that hides the packages of the extras
BARE = """
import importlib.util, sys
hidden, find = {"aiohttp", "mlx", "numpy", "PIL", "structlog"}, importlib.util.find_spec
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
importlib.util.find_spec = lambda name, *rest: None if name in hidden else find(name, *rest)
"""


@dataclass(frozen=True)
class Typed:
    """A line, its exit code, and what it prints."""

    text: str
    code: int
    out: tuple[str, ...]
    err: tuple[str, ...]


def parsed(scene: str) -> Iterator[Typed]:
    """Return the lines that a scene types."""
    for part in re.split(r"^\s*\$ ", scene, flags=re.MULTILINE)[1:]:
        text, *printed = part.strip().splitlines()
        found = CODE.search(text)
        lines = [line.strip() for line in printed if line.strip()]
        yield Typed(
            CODE.sub("", text),
            int(found[1]) if found else 0,
            tuple(line for line in lines if line[0] != "!"),
            tuple(line[1:].strip() for line in lines if line[0] == "!"),
        )


def missing(expected: tuple[str, ...], printed: str) -> str | None:
    """Return the first expected line that ``printed`` lacks after the lines before it."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    for wanted in expected:
        pattern = ".*".join(map(re.escape, " ".join(wanted.split()).split("...")))
        if not any(re.fullmatch(pattern, line) for line in lines):
            return wanted
    return None


def contents(here: Aimage) -> dict[str, bytes | None]:
    """Return the files of the home, and of the store its names and the blobs' paths."""
    found: dict[str, bytes | None] = {}
    for path in here.home.rglob("*"):
        name = str(path.relative_to(here.home))
        if path.is_file() and not re.search(r"^state/|/\.aimage/|/__pycache__/", name):
            found[name] = None if "/blobs/" in name else path.read_bytes()
    return found


def type_line(here: Aimage, typed: Typed) -> Done:
    """Type a line: in this process, or in a shell if it needs one."""
    words = shlex.split(typed.text)
    before = dict(here.environment)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        here.environment[name] = value
    try:
        if words[0] == "aimage" and not SHELL.search(typed.text):
            return here(*words[1:], code=typed.code)
    finally:
        here.environment = before
    ended = run(["bash", "-c", FUNCTION + typed.text], env=here.env(), cwd=here.home)
    return Done(ended.returncode, ended.stdout.decode("latin-1"), ended.stderr.decode())


def check(here: Aimage, typed: Typed) -> None:
    """Type a line and compare what it prints, its exit code and what it leaves."""
    before = contents(here) if typed.code else {}
    done = type_line(here, typed)
    shown = f"$ {typed.text}\nexit code {done.code}\n{done.out[:4000]}\n{done.err}"
    assert done.code == typed.code, shown
    for expected, printed in ((typed.out, done.out), (typed.err, done.err)):
        lacking = missing(expected, printed)
        assert lacking is None, f"{shown}\nlacks {lacking!r}"
    if typed.code:
        assert typed.out or (not done.out and ERROR.search(done.err)), shown
        after = contents(here)
        assert {name: data for name, data in after.items() if name in before} == before, shown
        assert all("/blobs/" in name for name in after.keys() - before.keys()), shown


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with the embedded models as ``tiny`` and ``shapes``."""
    home = tmp_path_factory.mktemp("users")
    here = Aimage(home, home / "store")
    here("create", "-q", "tiny", ROOT / "examples/tiny")
    here("create", "-q", "shapes", ROOT / "examples/shapes/model")
    return here.store


def _ollama() -> ScriptedWorker:
    """Return a server that answers as ollama does: its models, and success for every change."""
    model = {"name": "llama3.2:1b", "model": "llama3.2:1b", "digest": "ba" * 32, "size": 1320000000}
    return ScriptedWorker(lambda _: says({"models": [model]}), server="ollama")


def _secured(authority: trustme.CA) -> ScriptedRegistry:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    registry = ScriptedRegistry(serving(*artifact(b"{}", b"weights")))
    registry.wrap(context)
    return registry


def _plain(_: Seen) -> Answer:
    return Answer(400, {}, b"Client sent an HTTP request to an HTTPS server.\n")


def _airplay(_: Seen) -> Answer:
    return Answer(403, {"Server": "AirTunes/845.5.1"})


@pytest.fixture
def play(
    aimage: Callable[[], Aimage], request: pytest.FixtureRequest
) -> Iterator[Callable[..., None]]:
    """Return ``play(scene)``, which types the lines of a scene."""
    with contextlib.ExitStack() as stack:
        here, authority = aimage(), trustme.CA()
        servers: dict[str, Callable[[], Any]] = {
            "localhost:5000": lambda: request.getfixturevalue("registry"),
            "localhost:5001": lambda: request.getfixturevalue("private_registry"),
            "localhost:6443": lambda: stack.enter_context(_secured(authority).running()),
            "localhost:6444": lambda: stack.enter_context(ScriptedRegistry(_plain).running()),
            "localhost:6500": lambda: stack.enter_context(ScriptedRegistry(_airplay).running()),
            "localhost:11434": lambda: stack.enter_context(_ollama().running()),
        }

        def make(scene: str, store: Path | None = None) -> None:
            for tool in ("jq", "skopeo"):
                if f"{tool} " in scene:
                    find_program(tool)
            (here.home / "examples").symlink_to(ROOT / "examples")
            (here.home / "password.txt").write_text(f"{PASSWORD}\n")
            (here.home / "bare").mkdir()
            (here.home / "bare/sitecustomize.py").write_text(BARE)
            authority.cert_pem.write_to_path(str(here.home / "ca.pem"))
            if store is not None:
                copy_store(store, here.store)
            for name, start in servers.items():
                if name in scene:
                    scene = scene.replace(name, start().host)
            for typed in parsed(scene):
                check(here, typed)

        yield make


def cases(scenes: dict[str, str]) -> list[Any]:
    """Return the names of scenes; those that need another program are integration tests."""
    return [
        pytest.param(name, marks=[pytest.mark.integration] if PROGRAMS.search(scene) else [])
        for name, scene in scenes.items()
    ]


@pytest.mark.parametrize("name", cases(EMPTY))
def test_a_new_user_with_an_empty_store(name: str, play: Callable[..., None]) -> None:
    play(EMPTY[name])


@pytest.mark.parametrize("name", cases(STOCKED))
def test_a_user_with_models(name: str, play: Callable[..., None], stock: Path) -> None:
    play(STOCKED[name], stock)


@pytest.mark.parametrize("name", cases(PRIVATE))
def test_a_user_of_a_private_registry(name: str, play: Callable[..., None], stock: Path) -> None:
    play(PRIVATE[name], stock)


@pytest.mark.parametrize("name", GENERATE)
@pytest.mark.integration
def test_a_user_who_generates_pictures(name: str, play: Callable[..., None], stock: Path) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    play(GENERATE[name], stock)


def test_the_comparison_can_fail(aimage: Callable[[], Aimage]) -> None:
    here = aimage()
    for typed in parsed(
        "$ aimage version\n0.1...\n$ aimage pull # exit code 2\n! aimage: missing ..."
    ):
        check(here, typed)
    for scene in (
        "$ aimage version\n0.2...",
        "$ aimage version # exit code 1",
        "$ aimage pull # exit code 2\n! aimage: something else",
        "$ echo made > file; aimage pull # exit code 2",
    ):
        with pytest.raises(AssertionError):
            check(here, next(parsed(scene)))
