"""The library that computes image models: MLX or PyTorch.

Importing this module imports neither.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clowder_aimage.errors import UsageError, build_extra_error
from clowder_aimage.tensor.quantization import FP8

AUTO, MLX, TORCH = "auto", "mlx", "torch"
BACKENDS = (AUTO, MLX, TORCH)
# When PyTorch compiles: not at all, beside the first steps, or before the model is ready
COMPILE = NEVER, BACKGROUND, NOW = "never", "background", "now"
# The description of MLX on a CPU without a fast BLAS
SLOW = "cpu (no fast BLAS)"
OLDEST = {"torch": (2, 6), "diffusers": (0, 42), "transformers": (5, 0)}
_OTHERS = {MLX: ("jinja2", "numpy", "PIL", "tokenizers"), TORCH: ("diffusers", "transformers")}
_MODULES = {MLX: "clowder_aimage.model.backend", TORCH: "clowder_aimage.model.torch.library"}
_DEVICES = "clowder_aimage.model.torch.device"
# Of GPUs of NVIDIA: nvidia0, nvidia1
_DEVICE_FILES = Path("/dev")
# Files of the drivers of NVIDIA and AMD
_GPUS = ("/dev/nvidia0", "/dev/kfd")
# Common names of weight types
_SHORT = {"f32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class TorchTuning:
    """Options of PyTorch alone.

    compile: when networks are compiled, one of COMPILE; None for ``background`` on CUDA, else
    ``never``, which is that of ``reproducible``. attention: diffusers' name of an attention
    backend, such as flash or sage; None for that of PyTorch. device: PyTorch's name of a device,
    such as cuda:1; None for the first GPU that works, else the CPU. compute: FP8 for products of
    8-bit floats in the layers of transformers; None for those of the compute type. compiled: the
    directory for compiled code and measurements, for the next processes; None for that of PyTorch.
    batch: the most forward passes at once; None for as many as the device gains by, which is
    measured. reproducible: compute in one form, each picture alone, and with the same result each
    time; also with MLX.
    """

    compile: str | None = None
    attention: str | None = None
    device: str | None = None
    compute: str | None = None
    reproducible: bool = False
    batch: int | None = None
    compiled: str | None = field(default=None, compare=False)

    @property
    def may_compile(self) -> bool:
        """True unless it is certain that nothing is compiled."""
        if self.reproducible or self.compile == NEVER:
            return False
        return self.compile is not None or _find_driver() is not None

    @property
    def may_measure(self) -> bool:
        """True unless it is certain that batches are not measured."""
        return self.batch is None and not self.reproducible and _find_driver() is not None

    def check(self, library: str) -> None:
        """Reject options that ``library`` does not have. Raises UsageError."""
        if self.compile not in (None, NEVER) and self.reproducible:
            raise UsageError(
                "compiled layers round differently before and after their compilation",
                hint="compile, or compute reproducibly; not both",
            )
        if self.reproducible and (self.batch or 1) > 1:
            raise UsageError(
                "a picture of a batch rounds differently",
                hint="compute several at once, or reproducibly; not both",
            )
        # Without batches is what other libraries do
        own = replace(self, reproducible=False, batch=None if self.batch == 1 else self.batch)
        if own != TorchTuning() and library != TORCH:
            raise UsageError(
                f"{library} was selected, but a device, compilation, an attention backend and fp8 "
                "are options of torch, and so are batches",
                remedy="use_torch",
            )


NO_TUNING = TorchTuning()


@dataclass(slots=True)
class _TorchAttempt:
    """The attempt of AUTO to use PyTorch, with the reason of a failure."""

    fault: str | None = None


_attempt = _TorchAttempt()


def parse_library_options(
    values: Mapping[str, Any], open_compiled: Callable[[], Path | None] = lambda: None
) -> dict[str, Any]:
    """Return arguments of ``generate.load`` from a message: backend, dtype, tuning.

    ``open_compiled`` returns the directory for compiled code, if that may be needed.
    """
    tuning = TorchTuning(**values.get("tuning", {}))
    if (tuning.may_compile or tuning.may_measure) and (compiled := open_compiled()) is not None:
        tuning = replace(tuning, compiled=str(compiled))
    return {**values, "tuning": tuning}


def choose_library(name: str | None = None, tuning: TorchTuning = NO_TUNING) -> str:
    """Return MLX or TORCH for a name; None and AUTO select one.

    AUTO prefers MLX if it is installed, unless PyTorch can use a GPU of NVIDIA or AMD: with that
    it was measured to be faster.

    Raises:
        UsageError: The name is unknown, the library is not installed, too old or lacks the options
            ``tuning``, or the device that these name does not work.
    """
    library = _select_library() if name in (None, AUTO) else _check_name(str(name))
    tuning.check(library)
    if library == TORCH:
        _check_versions()
    if tuning.device is not None:
        importlib.import_module(_DEVICES).select_device(tuning.device)
    return library


def _check_name(name: str) -> str:
    if name not in _MODULES:
        raise UsageError(f"unknown backend {name!r:.40}: use {', '.join(BACKENDS)}")
    if not _is_installed(name):
        raise _build_extra_error(name)
    return name


def choose_dtype_name(name: str | None, *, is_gpu: bool) -> str:
    """Return the full name of the compute type, such as bfloat16 for bf16.

    None selects bfloat16 on a GPU and float32 on a CPU. Raises UsageError for an unknown name, and
    for float16: Z-Image overflows in it.
    """
    if name is None:
        return "bfloat16" if is_gpu else "float32"
    if name in ("float16", "fp16", "f16", "half"):
        raise UsageError(
            "float16 is not supported as a compute type: activations of these models reach 1e6, "
            "above its maximum of 65504, and pictures turn black",
            hint="use bfloat16 or float32; weights stored as float16 are supported",
        )
    chosen = _SHORT.get(name, name)
    if chosen not in _SHORT.values():
        types = " or ".join(_SHORT.values())
        raise UsageError(f"unknown compute type {name!r:.40}: use {types}")
    return chosen


def may_have_gpu() -> bool:
    """Return True if models may be computed by a GPU of this machine. No library is imported."""
    return sys.platform == "darwin" or _find_driver() is not None


@cache
def list_places(backend: str) -> tuple[str | None, ...]:
    """Return the devices of this machine for a worker: None, which the library selects, and others.

    The others are GPUs of NVIDIA, if PyTorch computes: without a name it selects the first one.
    """
    is_torch = backend == TORCH or (backend == AUTO and not _is_installed(MLX))
    count = _count_gpus() if is_torch and _is_installed(TORCH) else 1
    return (None, *(f"cuda:{index}" for index in range(1, count)))


def _count_gpus() -> int:
    """Return the number of GPUs of NVIDIA that PyTorch will see; no library is imported."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return sum(1 for _ in _DEVICE_FILES.glob("nvidia[0-9]*"))


def parse_backend(description: str) -> str:
    """Return the backend that a picture states by ``describe``, or AUTO if it is not installed."""
    name = TORCH if description.startswith(f"{TORCH} ") else MLX
    return name if description and _is_installed(name) else AUTO


def parse_compute(description: str) -> str | None:
    """Return FP8 if a picture states by ``describe`` that it was computed so, else None."""
    return FP8 if description.endswith(f", {FP8}") else None


def describe_unused_gpu(library: str, why: str) -> str | None:
    """Return a warning that a library computes on the CPU of a machine with the driver of a GPU."""
    file = _find_driver()
    if file is None:
        return None
    if _attempt.fault is not None:
        why = f"PyTorch cannot be used ({_attempt.fault}); update the extra [torch]"
    return f"{library} computes on the CPU, although this machine has a GPU ({file}): {why}"


@cache
def _select_library() -> str:
    installed = [name for name in (MLX, TORCH) if _is_installed(name)]
    if not installed:
        raise _build_extra_error(MLX if _find_driver() is None else TORCH)
    if len(installed) == 1 or sys.platform == "darwin" or _find_driver() is None:
        return installed[0]
    if _has_torch_gpu():
        return TORCH
    if _is_on_gpu(MLX):
        _attempt.fault = None
    return MLX


def _is_on_gpu(name: str) -> bool:
    return bool(importlib.import_module(_MODULES[name]).is_on_gpu())


def _has_torch_gpu() -> bool:
    """Return True if PyTorch computes on a GPU; an error selects MLX."""
    try:
        _check_versions()
        return _is_on_gpu(TORCH)
    except Exception as error:
        # Importing PyTorch raises errors of many libraries, none of them documented
        _attempt.fault = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        return False


def _check_versions() -> None:
    """Reject libraries of TORCH that are too old, before an import fails. Raises UsageError."""
    for name, oldest in OLDEST.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            # A build without metadata
            continue
        if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < oldest:
            needed = ".".join(map(str, oldest))
            message = f"{name} {version} is too old: {needed} or newer is required"
            raise UsageError(message, remedy="install_extra", extra=TORCH)


def _find_driver() -> str | None:
    """Return the file of the driver of an NVIDIA or AMD GPU, if there is one."""
    return next((file for file in _GPUS if Path(file).exists()), None)


def _is_installed(name: str) -> bool:
    return all(find_spec(module) is not None for module in (name, *_OTHERS[name]))


def _build_extra_error(name: str) -> UsageError:
    return build_extra_error("running a model", name)
