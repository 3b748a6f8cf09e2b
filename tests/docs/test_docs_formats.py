"""The tables of formats name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "formats.md"


def test_every_row_names_a_test_that_exists() -> None:
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.M)
    }
    text = PAGE.read_text("utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 20
    assert sorted(named - there) == []
    rows = [line for line in text.split("\n") if re.match(r"\| (?!\W*-)", line)]
    without = [row for row in rows if "test" not in row]
    assert without == []
