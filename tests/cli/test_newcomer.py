"""Lines that newcomers type, and the answers that they need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from clowder_aimage.cli import main
from tests.importer.test_other_files import LORA
from tests.importer.test_sidecar import PNG
from tests.process import Aimage
from tests.store import copy_store

# A line of a token file with a colon, as of a user in a file of passwords.
TOKEN = "infer:abc-infer-token-0123456789"


@dataclass(frozen=True)
class Typed:
    """A command line, its exit code, and words of its output and of its messages."""

    words: str
    code: int = 0
    out: tuple[str, ...] = ()
    err: tuple[str, ...] = ()
    absent: str = "Errno"


LINES = [
    Typed("", out=("aimage run shapes two red circles", "'aimage --help' lists all verbs")),
    Typed("--help", out=("Models:", "Registries:", "Exit codes: 0 done")),
    Typed("run --help", out=("Picture options:", "Adapter options:", "Where it runs:")),
    Typed("cat x", 2, err=("unknown verb 'cat'", "'aimage manifest fetch' prints a manifest")),
    Typed("doctor --help", out=("Check this installation",)),
    Typed("pull tiny", 2, err=("tiny:latest has no registry host",)),
    Typed("run z-image-turbo x", 2, err=("z-image-turbo:latest (", "run --yes z-image-turbo x")),
    Typed("ls --format '{{name}}'", out=("long/name:v1\nx:latest\n",)),
    Typed("ls --format {{nmae}}", 2, err=("'nmae' is undefined", "the fields of the result are")),
    Typed("ls --format {{type}}", out=("BF16\nBF16\n",)),
    Typed("du --format {{manifests[0].name}}", out=("x:latest",)),
    Typed("-v ls -q", out=("long/name:v1\nx:latest\n",)),
    Typed("ls -v -q", out=("long/name:v1\nx:latest\n",)),
    Typed("-q -v --json ls", out=('"reference": "x:latest"',)),
    Typed("show x", out=("name        x:latest", "digest      sha256:")),
    Typed("-v show x", out=("name        x:latest",)),
    Typed("show long/nam:v1", 3, err=("did you mean long/name:v1?",)),
    Typed("run y a", 3, err=("'aimage ls' lists the names in the store; 'aimage pull' fetches",)),
    Typed("rm missing", 3, err=("missing:latest",)),
    Typed("delete x", 2, err=("to remove it from the store: aimage rm x",)),
    Typed("delete 127.0.0.1:1/x:v1 --yes", 1, err=("cannot reach 127.0.0.1:1",)),
    Typed("run x a --steps 0", 2, err=("steps must be a whole number from 1 to 1000, not 0",)),
    Typed(
        "run x a --size 100x100",
        2,
        err=("size must have a width that is a multiple of 16",),
        absent="loading",
    ),
    Typed("run x a --size 1000x", 2, err=('size must be "auto" or WIDTHxHEIGHT',)),
    Typed("run x a --stpes 4", 2, err=("no such option '--stpes'", "did you mean --steps?")),
    Typed("--stoer s ls", 2, err=("did you mean --store? see: aimage --help",)),
    Typed("show ./civ", 2, err=("./civ is a path", "to pack a model: aimage create NAME ./civ")),
    Typed("push /a/b", 2, err=("/a/b is a path", "aimage create NAME /a/b")),
    Typed("run ./nothing a", 3, err=("./nothing does not exist",)),
    Typed("run civ/ink.safetensors a", 1, err=("run MODEL --lora civ/ink.safetensors",)),
    Typed("run Org/Model a", 2, err=("aimage create NAME Org/Model",)),
    Typed("create civ civ", out=("sha256:",), err=("civ:latest: lora in 4 files",)),
    Typed("show --card civ", out=("# Ink\n\nA style.",)),
    Typed("show civ", out=('trigger "ink wash"', "ink.preview.png")),
    Typed("show --card x", out=("Its weights are random numbers",)),
    Typed("create junk junk", 1, err=("unsupported model format", "--whole-files")),
    Typed("create junk junk --whole-files", out=("sha256:",), absent="runs its code"),
    Typed("serve --token-file tokens", 2, err=("a space separates", "'infer TOKEN'")),
    Typed("gateway", 2, err=("no NATS server is set", "name one with --nats nats://HOST")),
    Typed("node status --addr 127.0.0.1:1", 1, err=("127.0.0.1:1",)),
    Typed("serve --port 80", 2, err=("--addr HOST:PORT sets the address and the port",)),
    Typed("registry serve --token-file tokens", 2, err=("a space separates", "'read TOKEN'")),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Aimage:
    """Return a store with a model under two names, and a file of tokens beside it."""
    home = tmp_path_factory.mktemp("newcomer")
    here = Aimage(home, home / "store")
    copy_store(tiny_store, here.store)
    here("tag", "x", "long/name:v1", "-q")
    (home / "civ").mkdir()
    (home / "civ/ink.safetensors").write_bytes(LORA)
    (home / "civ/ink.json").write_text('{"activation text": "ink wash"}')
    (home / "civ/ink.preview.png").write_bytes(PNG)
    (home / "civ/README.md").write_text("---\nlicense: mit\n---\n# Ink\n\nA style.\n")
    (home / "junk").mkdir()
    (home / "junk/weights.bin").write_bytes(bytes(range(256)) * 99)
    (home / "tokens").write_text(f"{TOKEN}\n")
    (home / "tokens").chmod(0o600)
    return here


@pytest.mark.parametrize("typed", LINES, ids=lambda typed: typed.words or "aimage")
def test_a_newcomer_is_answered(store: Aimage, typed: Typed) -> None:
    done = store(*typed.words.replace("'", "").split(), code=typed.code)
    for text, words in ((done.out, typed.out), (done.err, typed.err)):
        assert [word for word in words if word not in text] == []
    assert typed.absent not in done.err


def test_the_first_lines_fit_a_terminal(store: Aimage) -> None:
    lines = store().out.splitlines()
    assert len(lines) <= 15 and max(map(len, lines)) <= 80
    assert all(name in main.VERBS for name in main._FIRST_VERBS)


@pytest.mark.parametrize(
    ("verb", "first", "count"),
    [
        ("run", "Picture options", 9),
        ("create", "Options for the files", 4),
        ("serve", "Address and access", 11),
        ("gateway", "Address and access", 6),
        ("node", "Address and access", 5),
        ("registry serve", "Address and access", 5),
    ],
)
def test_each_option_of_a_long_help_is_in_one_section(
    store: Aimage, verb: str, first: str, count: int
) -> None:
    shown = store(*verb.split(), "--help").out
    sections = f"{first}:{shown.partition(f'{first}:')[2]}".partition("\nCommands:")[0]
    named = {
        text.partition(":\n")[0]: [line for line in text.splitlines() if line.startswith("  -")]
        for text in sections.strip().split("\n\n")
    }
    assert len(named) == count and next(iter(named)) == first
    names = [line.split()[0] for lines in named.values() for line in lines]
    assert len(names) == len(set(names))
    # A section has no more options than a terminal has lines; what belongs to none is common.
    assert max(map(len, named.values())) <= 24 and len(named["Options"]) < 12
