"""The choice of the library that computes image models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from clowder_aimage.errors import UsageError
from clowder_aimage.model import library_choice
from clowder_aimage.model.library_choice import (
    MLX,
    TORCH,
    TorchTuning,
    choose_dtype_name,
    choose_library,
    describe_unused_gpu,
    parse_backend,
)
from clowder_aimage.model.loader import load_pipeline
from tests.adapter.vectors import TINY
from tests.model.model_blobs import import_directory

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """Return a function that sets what is installed, and what sees the GPU, if there is one."""

    def of(*installed: str, gpu: tuple[str, ...] | None = None, platform: str = "linux") -> None:
        library_choice._select_library.cache_clear()
        library_choice._attempt.fault = None
        driver = tmp_path / "nvidia0"
        driver.unlink(missing_ok=True)
        if gpu is not None:
            driver.touch()
        names = {name: name in installed for name in (MLX, TORCH)}
        monkeypatch.setattr(library_choice, "_is_installed", names.__getitem__)
        monkeypatch.setattr(library_choice, "_GPUS", (str(driver),))
        monkeypatch.setattr(sys, "platform", platform)
        for name, module in library_choice._MODULES.items():
            found = SimpleNamespace(is_on_gpu=lambda name=name: name in (gpu or ()))
            monkeypatch.setitem(sys.modules, module, found)

    yield of
    library_choice._select_library.cache_clear()
    library_choice._attempt.fault = None


@pytest.mark.parametrize(
    ("installed", "gpu", "platform", "expected"),
    [
        ((MLX,), None, "linux", MLX),
        ((TORCH,), None, "linux", TORCH),
        ((TORCH,), (TORCH,), "linux", TORCH),
        ((MLX, TORCH), None, "linux", MLX),
        ((MLX, TORCH), (TORCH,), "linux", TORCH),
        ((MLX, TORCH), (MLX, TORCH), "linux", TORCH),
        ((MLX, TORCH), (MLX,), "linux", MLX),
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


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the versions that the packages state; they are the oldest."""
    stated = {"torch": "2.6.0+cu126", "diffusers": "0.42.0.dev0", "transformers": "5.0rc1"}
    monkeypatch.setattr(metadata, "version", stated.__getitem__)
    return stated


@pytest.mark.parametrize("backend", [TORCH, None])
def test_a_version_that_is_too_old_is_named_before_it_is_imported(
    machine: Machine,
    versions: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    backend: str | None,
) -> None:
    """Older libraries lack names that are imported."""
    machine(TORCH)
    model = import_directory(TINY, tmp_path)
    monkeypatch.setitem(sys.modules, "clowder_aimage.model.torch.component", None)
    with pytest.raises(ImportError, match=r"torch\.component"):
        load_pipeline(*model, backend=backend)
    versions["diffusers"] = "0.41.2"
    with pytest.raises(
        UsageError, match=r"diffusers 0\.41\.2 is too old: 0\.42 or newer is required"
    ) as refused:
        load_pipeline(*model, backend=backend)
    assert refused.value.remedy == "install_extra" and refused.value.facts == {"extra": TORCH}


def test_mlx_computes_where_pytorch_cannot_be_used(
    machine: Machine, versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(MLX, TORCH, gpu=(TORCH,))
    assert choose_library() == TORCH
    versions["transformers"] = "4.57.1"
    machine(MLX, TORCH, gpu=(TORCH,))
    assert choose_library() == choose_library("auto", TorchTuning()) == MLX
    said = str(describe_unused_gpu("MLX", "not said"))
    assert "MLX computes on the CPU, although this machine has a GPU" in said
    assert "transformers 4.57.1 is too old: 5.0 or newer is required" in said
    assert said.endswith("update the extra [torch]")
    with pytest.raises(UsageError, match="too old"):
        choose_library(TORCH)
    versions["transformers"] = "5.0.0"
    machine(MLX, TORCH, gpu=(TORCH,))
    monkeypatch.setitem(sys.modules, library_choice._MODULES[TORCH], None)
    assert choose_library() == MLX
    assert "PyTorch cannot be used (import of" in str(describe_unused_gpu("MLX", "not said"))
    machine(MLX, TORCH, gpu=(MLX,))
    monkeypatch.setitem(sys.modules, library_choice._MODULES[TORCH], None)
    assert choose_library() == MLX and str(describe_unused_gpu("MLX", "said")).endswith(": said")


def test_a_picture_is_made_again_by_its_library(machine: Machine) -> None:
    machine(MLX, TORCH)
    assert parse_backend("torch 2.13.0 cpu") == TORCH
    assert parse_backend("cpu (openblas)") == parse_backend("gpu") == MLX
    assert parse_backend("") == "auto"
    machine(MLX)
    assert parse_backend("torch 2.13.0 cuda") == "auto"


def test_options_of_pytorch_are_refused_by_mlx() -> None:
    TorchTuning().check(MLX)
    TorchTuning(compile="now", attention="flash", device="cuda:1").check(TORCH)
    chosen = (
        TorchTuning(compile="never"),
        TorchTuning(attention="flash"),
        TorchTuning(device="cpu"),
        TorchTuning(compute="fp8"),
    )
    for options in chosen:
        with pytest.raises(
            UsageError, match="mlx was selected, but a device, compilation"
        ) as refused:
            options.check(MLX)
        assert refused.value.remedy == "use_torch"


def test_types() -> None:
    assert (
        choose_dtype_name(None, is_gpu=True)
        == choose_dtype_name("bf16", is_gpu=False)
        == "bfloat16"
    )
    assert (
        choose_dtype_name(None, is_gpu=False)
        == choose_dtype_name("float32", is_gpu=True)
        == "float32"
    )
    with pytest.raises(UsageError, match="maximum of 65504"):
        choose_dtype_name("half", is_gpu=True)
