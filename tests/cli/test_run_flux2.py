"""FLUX.2 [klein] by the command line: created, run, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.model.random_flux2 import write_flux2
from tests.process import Aimage


@pytest.mark.integration  # two pictures
def test_a_picture_of_flux2_is_replayed(aimage: Callable[..., Aimage], tmp_path: Path) -> None:
    write_flux2(tmp_path / "files")
    run = aimage()
    run("create", "flux", tmp_path / "files", "--quantize", "int8")
    assert "steps 4, width 64, height 64" in run("show", "flux").out
    run("run", "--local", "flux", "a fox", "--size", "32x48", "--seed", 7, "-o", "one.png")
    assert run("replay", "one.png").line == "equal"
    said = run("run", "--local", "flux", "a fox", "--image", "one.png", code=2).err
    assert "a reference picture has 32 x 48 pixels: each side must have at least 64" in said
