"""``aimage run --dtype``: the type that a model computes in, whatever it is stored as."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image

from tests.process import Aimage

TINY = Path(__file__).parents[2] / "examples" / "tiny"
PROMPT = ("a red fox", "--steps", "1", "--seed", "3")


def test_run_computes_in_the_type_that_is_asked_for(aimage: Callable[[], Aimage]) -> None:
    here = aimage()
    here("create", "tiny", TINY, "--quantize", "int8")
    pictures = {}
    for name, whole in (("f32", "float32"), ("bf16", "bfloat16")):
        done = here("run", "tiny", *PROMPT, "--dtype", name, "-o", f"{name}.png", "--json")
        assert done.value["dtype"] == whole
        with PIL.Image.open(here.home / f"{name}.png") as picture:
            pictures[name] = np.asarray(picture).astype(float)
    off = np.abs(pictures["f32"] - pictures["bf16"])
    assert 0 < off.mean() < 16  # of 255: rounded otherwise, and the same picture
    assert "float16" in here("run", "tiny", *PROMPT, "--dtype", "f16", code=2).err
