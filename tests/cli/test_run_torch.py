"""The backend PyTorch by the command line."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.adapter.vectors import TINY
from tests.process import Aimage

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.integration

PICTURE = ("--size", "32x32", "--steps", 2, "--seed", 5)


def test_a_picture_made_without_mlx_is_replayed_by_both(aimage: Callable[[], Aimage]) -> None:
    """Each process that imports PyTorch takes ten seconds."""
    here, without = aimage(), aimage()
    here("create", "tiny", TINY)
    text = "import sys; sys.modules.update(dict.fromkeys(('mlx', 'mlx.core', 'mlx.nn')))"
    (here.home / "sitecustomize.py").write_text(text)
    without.environment["PYTHONPATH"] = f"{here.home}{os.pathsep}{here.env()['PYTHONPATH']}"
    made = without.process(
        "run", "tiny", "a fox", *PICTURE, "--local", "-o", "t.png", "--json"
    ).value
    assert made["backend"].startswith("torch ")
    said = without.process("run", "tiny", "a fox", "--local", "--backend", "mlx", code=2).err
    assert "needs the extra [mlx]" in said
    assert here.process("replay", "t.png").line == "equal"
    again = here.process("replay", "t.png", "--backend", "mlx", "--tolerance", 1, "--json").value
    assert again["equal"] and again["largestDifference"] <= 1
    assert again["madeWith"] == made["backend"] != again["backend"]


def test_options_of_pytorch_are_refused_with_their_remedies(aimage: Callable[[], Aimage]) -> None:
    here = aimage()
    here("create", "tiny", TINY)
    how = ("run", "tiny", "a fox", *PICTURE, "--local", "-o", "t.png")
    said = here(*how, "--backend", "mlx", "--compile", code=2).err
    assert "mlx does not compile" in said and "select it with --backend torch" in said
    said = here.process(*how, "--backend", "torch", "--attention", "flash", code=2).err
    assert "the backend of attention flash cannot be used" in said and "flash-attn" in said
