"""A worker with the backend PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process import Aimage
from tests.worker.conftest import LocalWorker

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.integration

PICTURE = ("--size", "32x32", "--steps", 2, "--seed", 5)
QUIET = {"PYTHONWARNINGS": "default"}  # of libraries


def test_a_device_that_does_not_exist_is_an_error_and_the_worker_lives_on(
    worker: LocalWorker, aimage: Callable[[], Aimage]
) -> None:
    other = worker.launch("--backend", "torch", "--device", "cuda:99", **QUIET)
    here = aimage()
    here.environment["AIMAGE_HOST"] = other.url
    said = here("run", "tiny", "a fox", *PICTURE, "-o", "x.png", code=1).err
    assert "this worker cannot run models: PyTorch cannot compute on the device cuda:99" in said
    assert "the devices that PyTorch sees: " in said
    assert here("ps", "--json").value == []


_FAULT = """
import importlib.abc, importlib.machinery, os, sys

class Fault(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "clowder_aimage.model.torch.zimage.transformer":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            import torch
            forward = module.Transformer.forward

            def failing(*given, **named):
                if os.path.exists(FLAG):
                    torch.empty(1 << 60)
                return forward(*given, **named)

            module.Transformer.forward = failing

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Fault())
"""


def test_the_backend_of_a_model_is_that_of_its_name_and_survives_insufficient_memory(
    worker: LocalWorker, aimage: Callable[[], Aimage], tmp_path: Path
) -> None:
    """The error of PyTorch itself; the model is unloaded, and loaded for the next request."""
    here, flag = aimage(), tmp_path / "fails"
    (tmp_path / "sitecustomize.py").write_text(f"FLAG = {str(flag)!r}\n{_FAULT}")
    path = f"{tmp_path}{os.pathsep}{here.env()['PYTHONPATH']}"
    settings = {"AIMAGE_SERVE_BACKENDS": "tiny=torch", "PYTHONPATH": path, **QUIET}
    other = worker.launch("--backend", "mlx", **settings)
    here.environment["AIMAGE_HOST"] = other.url
    arguments = ("run", "tiny", "a fox", *PICTURE, "--json")
    made = here(*arguments, "-o", "1.png").value
    assert made["backend"].startswith("torch ")
    (row,) = here("ps", "--json").value
    assert row["reference"] == "tiny:latest"
    flag.touch()
    error = here(*arguments, "-o", "2.png", code=1).err
    assert "the memory is insufficient for this picture: use a smaller size" in error
    assert here("ps", "--json").value == []
    flag.unlink()
    here(*arguments, "-o", "3.png")
    assert (here.home / "3.png").read_bytes() == (here.home / "1.png").read_bytes()
