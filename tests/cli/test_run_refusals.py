"""Requests that need no weights to be refused are refused before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clowder_aimage.model.picture import encode_picture
from tests.lora_file import write_lora
from tests.process import Aimage

# Options, the exit code and a part of the message.
REFUSED: dict[str, tuple[tuple[str, ...], int, str]] = {
    "size": (("--size", "100x100"), 2, "size must have a width that is a multiple of"),
    "steps": (("--steps", "0"), 2, "steps must be"),
    "negative": (("--negative", "blue"), 2, "negative requires guidance"),
    "picture": (("--image", "missing.png"), 3, "missing.png"),
    "mask": (("--image", "a.png", "--mask", "b.png"), 2, "the mask has 32 x 32 pixels"),
    "control": (("--control", "a.png"), 2, "no ControlNet of its own"),
    "two pictures": (("--image", "a.png", "--image", "b.png"), 2, "must be one picture"),
    "missing adapter": (("--lora", "./none.safetensors"), 3, "none.safetensors"),
    "adapter of another model": (("--lora", "./other.safetensors"), 5, "other.safetensors"),
    "type": (("--dtype", "float16"), 2, "float16 is not supported"),
}


@pytest.fixture
def here(stocked: Callable[[], Aimage]) -> Aimage:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    here = stocked()
    for name, side in (("a.png", 64), ("b.png", 32)):
        (here.home / name).write_bytes(
            encode_picture(np.full((side, side, 3), 200, np.uint8), {}, "png")
        )
    write_lora(here.home / "other.safetensors", width=40)
    return here


@pytest.mark.parametrize("situation", REFUSED)
def test_a_request_is_refused_before_a_load(situation: str, here: Aimage) -> None:
    options, code, message = REFUSED[situation]
    done = here("run", "x", "a circle", "--local", *options, "-o", "out.png", code=code)
    assert message in done.err
    assert "loading" not in done.err
    assert not (here.home / "out.png").exists()


def test_an_accepted_request_says_what_is_loaded(here: Aimage) -> None:
    options = ("--size", "16x16", "--steps", "1", "--no-show", "-o", "out.png")
    assert "loading" in here("run", "x", "a circle", "--local", *options).err
    assert Path(here.home / "out.png").is_file()
