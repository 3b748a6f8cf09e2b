"""The backend PyTorch by the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clowder_aimage.cli.verbs import replay
from clowder_aimage.cli.worker.local_model import LocalOptions
from clowder_aimage.errors import UsageError
from clowder_aimage.model.picture import encode_picture
from clowder_aimage.model.rounding import Rounding
from tests.adapter.vectors import TINY
from tests.picture_file import load_picture
from tests.process import Aimage

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.integration

PICTURE = ("--size", "32x32", "--steps", 2, "--seed", 5)


def test_a_picture_made_without_mlx_is_replayed_by_both(aimage: Callable[[], Aimage]) -> None:
    """A process that imports PyTorch takes ten seconds: this one has it."""
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
    assert here("replay", "t.png").line == "equal"
    again = here("replay", "t.png", "--backend", "mlx", "--tolerance", 1, "--json").value
    assert again["equal"] and again["largestDifference"] <= 1
    assert again["madeWith"] == made["backend"] != again["backend"]


def test_a_picture_is_made_again_as_it_was_made(
    aimage: Callable[[], Aimage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler, one that was compiled is made eagerly, and the difference is named."""
    import torch

    from clowder_aimage.model.torch.compiler import check_compiler

    here = aimage()
    here("create", "tiny", TINY)
    how = ("run", "tiny", "a fox", *PICTURE, "--local", "-o", "t.png", "--backend", "torch")
    said = here(*how, "--compile", "now", "--reproducible", code=2).err
    assert "compiled layers round differently" in said
    here(*how, "--device", "cpu", "--reproducible")
    path = here.home / "t.png"
    pixels, facts = load_picture(path)
    assert (facts["forward"], facts["batch"]) == ("eager", 1)
    facts |= {"forward": "compiled", "batch": 2}
    path.write_bytes(encode_picture((pixels ^ 1).astype(np.uint8), facts))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    check_compiler.cache_clear()
    monkeypatch.setattr(torch, "compile", fail)
    done = here("replay", "t.png", "--device", "cpu", "--json", code=5)
    assert "made with compiled layers; PyTorch cannot compile" in done.err
    assert done.value["expectedDifference"] == done.value["largestDifference"] == 1
    said = here("replay", "t.png", "--device", "cpu", code=5).out
    assert "compiled, float32, 2 at once, and again on torch" in said
    assert said.strip().endswith("which may differ by 1/255: --tolerance 1 accepts it")


@pytest.mark.parametrize(
    ("forward", "modes"),
    [("eager", ["never"]), ("compiled", ["now", "never"]), ("mixed", [None])],
)
def test_a_picture_is_made_again_in_its_form_whatever_the_default_is(
    monkeypatch: pytest.MonkeyPatch, forward: str, modes: list[str | None]
) -> None:
    """On a machine without a compiler; on a GPU blocks are compiled by default."""
    seen: list[str | None] = []

    def load(_: object, __: object, options: LocalOptions, ___: object) -> Any:
        seen.append(options.tuning.compile)
        if options.tuning.compile == "now":
            raise UsageError("no compiler")

    monkeypatch.setattr(replay, "load_model", load)
    others: Any = None
    made, options = Rounding("", forward, "", 1), LocalOptions(backend="torch")
    replay._load_as_made(made, others, others, options, others)
    assert seen == modes


def test_options_of_pytorch_are_refused_with_their_remedies(aimage: Callable[[], Aimage]) -> None:
    here = aimage()
    here("create", "tiny", TINY)
    how = ("run", "tiny", "a fox", *PICTURE, "--local", "-o", "t.png")
    said = here(*how, "--backend", "mlx", "--compile", "now", code=2).err
    assert (
        "mlx was selected, but a device, compilation" in said
        and "select it with --backend torch" in said
    )
    said = here(*how, "--backend", "torch", "--attention", "flash", code=2).err
    assert "the attention backend flash cannot be used" in said and "flash-attn" in said


def test_a_device_that_does_not_exist_is_refused_before_anything_is_pulled(
    aimage: Callable[[], Aimage],
) -> None:
    """The name of the model is not looked up: no registry is there."""
    here = aimage()
    name = "localhost:1/team/none:v1"
    how = ("run", name, "a fox", *PICTURE, "--local", "-o", "t.png", "--backend", "torch")
    said = here(*how, "--device", "cuda:99", code=2).err
    assert "PyTorch cannot compute on the device cuda:99: " in said
    assert "PyTorch sees" in said and "cpu: name one with --device" in said
    said = here(*how, "--device", "gpu", code=2).err
    assert "unknown device 'gpu': use cuda, cuda:1 and so on, mps or cpu" in said
    said = here(*how[:-1], "mlx", "--device", "cpu", code=2).err
    assert "compilation, an attention backend and fp8 are options of torch" in said
    assert "select it with --backend torch" in said


def test_a_device_is_named_and_recorded(aimage: Callable[[], Aimage]) -> None:
    here = aimage()
    here("create", "tiny", TINY)
    how = ("run", "tiny", "a fox", *PICTURE, "--local", "-o", "t.png", "--backend", "torch")
    made = here(*how, "--device", "cpu", "--json").value
    assert made["backend"].endswith(" cpu")
    assert here("replay", "t.png", "--device", "cpu").line == "equal"
    said = here("replay", "t.png", "--device", "cuda:99", code=2).err
    assert "PyTorch cannot compute on the device cuda:99" in said


def test_a_picture_in_fp8_is_replayed_in_fp8(aimage: Callable[[], Aimage]) -> None:
    """A CPU computes the product of the dequantized values."""
    here = aimage()
    done = here("create", "tiny", TINY, "--quantize", "fp8")
    assert "2 of 73 tensors are mxfp8 with one scale for each row (fp8); not" in done.err
    how = ("run", "tiny", "a fox", *PICTURE, "--local", "-o", "t.png", "--compute", "fp8")
    made = here(*how, "--backend", "torch", "--device", "cpu", "--json").value
    assert made["backend"].endswith(" cpu, fp8")
    again = here("replay", "t.png", "--device", "cpu", "--json").value
    assert again["equal"] and again["backend"] == made["backend"]
    said = here(*how, "--backend", "mlx", code=2).err
    assert "an attention backend and fp8 are options of torch" in said
    here("convert", "tiny", "coded", "--quantize", "int8", code=2)
    here("create", "coded", TINY, "--quantize", "int8")
    coded = ("run", "coded", *how[2:], "--backend", "torch", "--device", "cpu")
    said = here(*coded, code=1).err
    assert "cannot be computed in fp8: it is int8 with a scale for 64 values" in said
    assert "use the model with float or fp8 weights" in said
