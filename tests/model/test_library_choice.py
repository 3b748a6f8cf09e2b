"""The choice of the library that computes image models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from clowder_aimage.errors import UsageError
from clowder_aimage.model import library_choice
from clowder_aimage.model.library_choice import (
    MLX,
    TORCH,
    TorchTuning,
    choose_library,
    made_by,
    type_name,
)

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """Return a function that sets what is installed, and what sees the GPU, if there is one."""

    def of(*installed: str, gpu: tuple[str, ...] | None = None, platform: str = "linux") -> None:
        library_choice._suited.cache_clear()
        driver = tmp_path / "nvidia0"
        driver.unlink(missing_ok=True)
        if gpu is not None:
            driver.touch()
        names = {name: name in installed for name in (MLX, TORCH)}
        monkeypatch.setattr(library_choice, "_is_installed", names.__getitem__)
        monkeypatch.setattr(library_choice, "_GPUS", (str(driver),))
        monkeypatch.setattr(sys, "platform", platform)
        for name, module in library_choice._MODULES.items():
            found = SimpleNamespace(on_gpu=lambda name=name: name in (gpu or ()))
            monkeypatch.setitem(sys.modules, module, found)

    yield of
    library_choice._suited.cache_clear()


@pytest.mark.parametrize(
    ("installed", "gpu", "platform", "expected"),
    [
        ((MLX,), None, "linux", MLX),
        ((TORCH,), None, "linux", TORCH),
        ((TORCH,), (TORCH,), "linux", TORCH),
        ((MLX, TORCH), None, "linux", MLX),
        ((MLX, TORCH), (TORCH,), "linux", TORCH),
        ((MLX, TORCH), (MLX, TORCH), "linux", MLX),
        ((MLX, TORCH), (), "linux", MLX),
        ((MLX, TORCH), None, "darwin", MLX),
        ((TORCH,), None, "darwin", TORCH),
    ],
)
def test_the_library_that_suits_a_machine(
    machine: Machine,
    installed: tuple[str, ...],
    gpu: tuple[str, ...] | None,
    platform: str,
    expected: str,
) -> None:
    machine(*installed, gpu=gpu, platform=platform)
    assert choose_library() == choose_library("auto") == expected


def test_a_library_that_is_not_installed_is_named(machine: Machine) -> None:
    machine(MLX)
    assert choose_library(MLX) == MLX
    with pytest.raises(UsageError, match=r"needs the extra \[torch\]") as refused:
        choose_library(TORCH)
    assert refused.value.facts["extra"] == TORCH
    with pytest.raises(UsageError, match="unknown backend 'jax': use auto, mlx, torch"):
        choose_library("jax")
    machine()
    with pytest.raises(UsageError, match=r"needs the extra \[mlx\]"):
        choose_library()
    machine(gpu=())  # on Linux the extra [mlx] computes on the CPU
    with pytest.raises(UsageError, match=r"needs the extra \[torch\]"):
        choose_library()


def test_a_picture_is_made_again_by_its_library(machine: Machine) -> None:
    machine(MLX, TORCH)
    assert made_by("torch 2.13.0 cpu") == TORCH
    assert made_by("cpu (openblas)") == made_by("gpu") == MLX
    assert made_by("") == "auto"
    machine(MLX)
    assert made_by("torch 2.13.0 cuda") == "auto"


def test_options_of_pytorch_are_refused_by_mlx() -> None:
    TorchTuning().check(MLX)
    TorchTuning(compile=True, attention="flash", device="cuda:1").check(TORCH)
    chosen = {"compile": True}, {"attention": "flash"}, {"device": "cpu"}
    for options in (TorchTuning(**one) for one in chosen):
        with pytest.raises(
            UsageError, match="mlx was selected, but a device, compilation"
        ) as refused:
            options.check(MLX)
        assert refused.value.remedy == "use_torch"


def test_types() -> None:
    assert type_name(None, is_gpu=True) == type_name("bf16", is_gpu=False) == "bfloat16"
    assert type_name(None, is_gpu=False) == type_name("float32", is_gpu=True) == "float32"
    with pytest.raises(UsageError, match="maximum of 65504"):
        type_name("half", is_gpu=True)
