"""The computation of a picture, and the difference of another one."""

from __future__ import annotations

from typing import Any

import pytest

from clowder_aimage.errors import UsageError
from clowder_aimage.model.library_choice import MLX, TORCH, TorchTuning
from clowder_aimage.model.rounding import Rounding

MADE: dict[str, Any] = {"backend": "torch 2.13.0 cuda (H100)", "dtype": "bfloat16"}
MADE |= {"forward": "compiled", "batch": 1}


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({}, 0),
        ({"batch": 4}, 1),
        ({"forward": "eager"}, 9),
        ({"backend": "torch 2.13.0 cpu"}, 9),
        ({"dtype": "float32"}, 9),
        ({"forward": "eager", "batch": 4}, 9),
    ],
)
def test_the_bound_follows_from_what_differs(change: dict[str, Any], bound: int) -> None:
    made, again = Rounding.read(MADE), Rounding.read(MADE | change)
    assert made.compute_bound(again) == again.compute_bound(made) == bound


def test_in_float32_the_bound_is_one() -> None:
    made = Rounding.read(MADE | {"dtype": "float32"})
    assert made.compute_bound(Rounding.read({"backend": "cpu", "dtype": "float32"})) == 1


def test_what_a_picture_does_not_state_is_eager_and_alone() -> None:
    """Also of a stranger's picture: its values have any type."""
    assert str(Rounding.read({"backend": "gpu", "dtype": "bfloat16"})) == "gpu, bfloat16"
    assert Rounding.read({"batch": "many"}).batch == Rounding.read({"batch": True}).batch == 1
    assert str(Rounding.read({})) == "an unknown library"
    assert str(Rounding.read(MADE | {"batch": 4})) == (
        "torch 2.13.0 cuda (H100), compiled, bfloat16, 4 at once"
    )


def test_what_is_reproducible_is_not_compiled() -> None:
    TorchTuning(reproducible=True).check(MLX)
    TorchTuning(reproducible=True, device="cpu").check(TORCH)
    with pytest.raises(UsageError, match="round differently"):
        TorchTuning(reproducible=True, compile=True).check(TORCH)
