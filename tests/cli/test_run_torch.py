"""The backend PyTorch by the command line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.adapter.vectors import TINY
from tests.process import Aimage

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.integration

PICTURE = ("--size", "32x32", "--steps", 2, "--seed", 5)


def test_a_picture_states_its_backend_and_is_replayed(aimage: Callable[[], Aimage]) -> None:
    here = aimage()
    here("create", "tiny", TINY)
    how = ("run", "tiny", "a fox", *PICTURE, "--local")
    made = here.process(*how, "--backend", "torch", "-o", "t.png", "--json").value
    assert made["backend"].startswith("torch ")
    assert here.process("replay", "t.png").line == "equal"
    again = here.process("replay", "t.png", "--backend", "mlx", "--tolerance", 1, "--json").value
    assert again["equal"] and again["largestDifference"] <= 1
    assert again["madeWith"] == made["backend"] != again["backend"]
