"""Tables fit the terminal: digests are shortened, and the widest cells lose their middle."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from os import terminal_size
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.attach import AttachedArtifact
from clowder_aimage.cli.console import column
from clowder_aimage.cli.console.output import format_fields, format_table
from clowder_aimage.cli.verbs import fleet, node, referrers
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest
from tests.cli.test_node_status import NODE, model
from tests.content.artifact import put_artifact
from tests.process import Aimage
from tests.store import copy_store

HEX = "0123456789abcdef" * 4
DIGEST = f"sha256:{HEX}"
LONG_DIGEST = f"host.example.com/team/tiny@{DIGEST}"
LONG = "registry.example.com/" + "/".join(["repository"] * 21) + ":v1"
WIDE = "模型" * 60
WIDTHS = (60, 80, 100, 120)


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let stdout be a terminal of some width."""
    monkeypatch.setattr(column, "get_width", lambda: request.param)
    return int(request.param)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Aimage:
    """Return a store with long names, and an artifact whose annotation has wide characters."""
    home = tmp_path_factory.mktemp("hostile")
    here = Aimage(home, home / ("store-" + "s" * 60))
    copy_store(tiny_store, here.store)
    here("tag", "x", LONG, "-q")
    put_artifact(ImageLayout(here.store), "wide:latest", b"other", annotations={"title": WIDE})
    return here


@pytest.mark.parametrize(
    "words",
    [
        ("ls",),
        ("du",),
        ("df",),
        ("show", LONG),
        ("show", "--layers", "x"),
        ("diff", LONG, "wide"),
        ("diff", "--all", "wide", "x"),
        ("config", "show"),
    ],
    ids=["ls", "du", "df", "show", "show --layers", "diff", "diff --all", "config show"],
)
def test_verbs_fit_the_terminal(hostile: Aimage, width: int, words: tuple[str, ...]) -> None:
    done = hostile.attempt(*words)
    lines = done.out.splitlines()
    assert lines and max(map(column.measure, lines)) <= width, done.out


def test_tables_of_services_fit_the_terminal(width: int) -> None:
    now = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
    pulled = model(f"{LONG}@{DIGEST}") | {"reason": f"cannot reach {LONG}: {WIDE}"}
    lines = node.format_status(NODE | {"models": [pulled], "id": WIDE}, now)
    worker: dict[str, Any] = {"id": LONG, "running": 1, "slots": 2, "rate": 3.5, "done": 123456}
    worker |= {"models": {LONG: DIGEST}, "loaded": [DIGEST, "sha256:" + "f" * 64]}
    status: dict[str, Any] = {
        "fleet": "aimage",
        "jobs": 3,
        "waiting": 2,
        "given_up": 0,
        "stored": 1,
        "room": 2,
    }
    status |= {"workers": [worker | {"is_draining": True}], "left_out": []}
    status["queue"] = [{"priority": "interactive", "digest": DIGEST, "jobs": 3}]
    lines += fleet.format_status(status)
    descriptor = Descriptor("application/x", Digest.parse(DIGEST), 3, {"title": WIDE})
    attached = AttachedArtifact(1, Digest.parse(DIGEST), descriptor)
    lines += referrers._format_table([attached])
    assert max(map(column.measure, lines)) <= width, "\n".join(lines)


def test_columns_are_left_out_before_names_are_short(width: int) -> None:
    rows = [
        ("NAME", "FAMILY", "TYPE", "SIZE", "CREATED", "DIGEST"),
        (LONG_DIGEST, "z-image", "bfloat16", "9.35 MB (partial)", "11 months ago", HEX[:12]),
        ("b" * 200 + ":v1", "z-image", "BF16", "35 kB", "now", HEX[:12]),
    ]
    head, first, second = format_table(rows, ("FAMILY", "CREATED", "TYPE"))
    assert "9.35 MB (partial)" in first and first.endswith(HEX[:12])
    assert ("FAMILY" in head) == (width >= 100) and ("TYPE" in head) == (width > 60)
    assert "…" in second and ":v1" in second and second.startswith("bbbbb")
    if width == 120:
        assert first.startswith(f"host.example.com/team/tiny@sha256:{HEX[:12]}  ")


def test_wide_characters_take_two_columns(width: int) -> None:
    head, first, second = format_table([("NAME", "SIZE"), (WIDE, "1 B"), ("e\u0301", "2 B")])
    place = head.index("SIZE")
    for line, cell in ((first, "1 B"), (second, "2 B")):
        assert column.measure(line.removesuffix(cell)) == place <= width - 4


def test_fields_are_wrapped_between_words(width: int) -> None:
    text = "none here: the extra is missing; install it with a command of many words " * 2
    lines = format_fields([("digest", DIGEST), ("capabilities", text), ("name", LONG)])
    assert max(map(len, lines)) <= width
    assert lines[0].split()[1] in (DIGEST, HEX[:12])
    assert " ".join(" ".join(lines[1:-1]).split()) == f"capabilities {' '.join(text.split())}"


def test_a_pipe_has_everything() -> None:
    assert column.get_width() is None
    lines = format_table([("NAME", "DIGEST"), (LONG, DIGEST), (WIDE, "")], ("DIGEST",))
    assert f"{LONG}  {DIGEST}" in lines and WIDE in lines
    assert format_fields([("digest", DIGEST * 9)]) == [f"digest      {DIGEST * 9}"]


@pytest.mark.parametrize(("columns", "width"), [(20, 60), (60, 60), (99, 99), (400, 400)])
def test_the_width_is_that_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, width: int
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: terminal_size((columns, 24)))
    assert column.get_width() == width


@pytest.mark.parametrize(
    ("text", "width", "cut"),
    [
        ("shapes:v1", 9, "shapes:v1"),
        ("registry.example.com/team/shapes:v1", 20, "registry.…/shapes:v1"),
        ("模型模型模型", 8, "模…模型"),
        ("模型", 1, "…"),
    ],
)
def test_the_middle_is_cut(text: str, width: int, cut: str) -> None:
    assert column.cut_middle(text, width) == cut
    assert column.measure(cut) <= width


def test_items_are_filled_into_columns() -> None:
    assert column.fill(["steps 8", "seed random", "size default"], 30) == [
        "steps 8       seed random",
        "size default",
    ]
    assert column.fill([], 60) == []
