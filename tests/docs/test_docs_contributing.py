"""The table of additions in CONTRIBUTING.md names files and constants that exist."""

from __future__ import annotations

import re

import pytest

from tests.docs.document import ROOT, Document

SECTION = Document(ROOT / "CONTRIBUTING.md").section("Where things are")
ROWS = [line for line in SECTION.splitlines() if line.startswith("| a")][1:]
ROOTS = [ROOT, ROOT / "clowder_aimage"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_row_names_files_and_constants(row: str) -> None:
    paths = re.findall(r"`([\w./-]+/[\w./-]*)`", row)
    assert paths
    for path in paths:
        assert any((root / path).exists() for root in ROOTS), path
    for name, path in re.findall(r"`(_?[A-Z_]+)` in `([\w/]+\.py)`", row):
        (file,) = [root / path for root in ROOTS if (root / path).exists()]
        assert re.search(rf"^{name}\b", file.read_text(), re.MULTILINE), name
