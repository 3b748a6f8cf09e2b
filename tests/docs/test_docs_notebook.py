"""The notebook in docs/ runs, and is stored without outputs."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.process import Aimage
from tests.worker.conftest import LocalWorker

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
DOCUMENT = json.loads(NOTEBOOK.read_text("utf-8"))
CODE = ["".join(cell["source"]) for cell in DOCUMENT["cells"] if cell["cell_type"] == "code"]


def compile_cell(source: str) -> Iterator[tuple[CodeType, bool]]:
    """Yield the statements of a cell, and the expression at its end, whose value is shown."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    yield compile(tree, "cell", "exec", flags), False
    if isinstance(last, ast.Expr):
        yield compile(ast.Expression(last.value), "cell", "eval", flags), True


async def run_cells(names: dict[str, Any]) -> list[Any]:
    """Run the cells in one event loop, as a kernel does; return the values that are shown."""
    shown = []
    for source in CODE:
        for code, is_value in compile_cell(source):
            value = eval(code, names)  # noqa: S307 - the code of the notebook
            if inspect.isawaitable(value):
                value = await value
            shown += [value] if is_value else []
    return shown


@pytest.mark.integration
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    worker = LocalWorker(Aimage(tmp_path, tmp_path / "store"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AIMAGE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("AIMAGE_HOST", worker.url)
    monkeypatch.chdir(NOTEBOOK.parent)
    try:
        shown = asyncio.run(run_cells({"__name__": "__main__"}))
    finally:
        worker.end()
    pictures = [value._repr_png_() for value in shown if hasattr(value, "_repr_png_")]
    assert len(pictures) == 6
    assert all(data.startswith(b"\x89PNG") for data in pictures)


def test_the_notebook_has_no_outputs_and_links_to_pages() -> None:
    cells = DOCUMENT["cells"]
    assert NOTEBOOK.read_text("utf-8") == json.dumps(DOCUMENT, indent=1, ensure_ascii=False) + "\n"
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for target in re.findall(r"\]\((?!https:)([^)]+)\)", text):
        assert (NOTEBOOK.parent / target).is_file(), target
