"""The devices of PyTorch on this machine: their check and their choice."""

from __future__ import annotations

import functools
import os
import re
import warnings

import torch

from clowder_aimage.errors import UsageError
from clowder_aimage.model.library_choice import describe_unused_gpu

CUDA, MPS, CPU = "cuda", "mps", "cpu"
_TF32 = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
_NAME = re.compile(r"cpu|mps|cuda(:\d{1,3})?", re.ASCII)


@functools.cache
def find_failure(device: str) -> str | None:
    """Return the reason that PyTorch cannot compute on a device, or None if it can.

    A sum is computed there: a driver may be too old, and PyTorch may lack code for a GPU.
    """
    if device == MPS and not torch.backends.mps.is_available():
        return "it needs Apple silicon with macOS 14 or later"
    try:
        with warnings.catch_warnings():
            # A warning repeats the error
            warnings.simplefilter("ignore")
            torch.ones(1, device=device).add_(1).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return str(error).strip().partition("\n")[0].partition(". ")[0][:200]
    return None


def list_devices() -> list[str]:
    """Return the names of all devices that can be used."""
    count = torch.cuda.device_count() if find_failure(CUDA) is None else 0
    gpus = [f"{CUDA}:{index}" for index in range(count)]
    return [*gpus, *([MPS] if find_failure(MPS) is None else []), CPU]


def select_device(name: str | None = None) -> str:
    """Return the device of a name; for None the first of cuda (also ROCm), mps, and cpu.

    Raises UsageError: PyTorch cannot compute there.
    """
    if name is None:
        return next((device for device in (CUDA, MPS) if find_failure(device) is None), CPU)
    if _NAME.fullmatch(name) is None:
        reason: str | None = f"use {CUDA}, {CUDA}:1 and so on, {MPS} or {CPU}"
        message = f"unknown device {name!r:.40}: {reason}"
    elif (reason := find_failure(name)) is not None:
        message = f"PyTorch cannot compute on the device {name}: {reason}"
    if reason is None:
        return name
    usable = ", ".join(list_devices())
    hint = f"the devices that PyTorch sees: {usable}"
    raise UsageError(message, hint=hint, remedy="other_device", devices=usable)


def compute_exactly(device: str, *, is_reproducible: bool = False) -> None:
    """Compute float32 in float32 on a GPU of NVIDIA, and ``is_reproducible`` as the last time.

    PyTorch allows convolutions in TF32, which has the precision of 10 bits. Its variable
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 asks for TF32, and leaves its settings as they are.
    """
    if device.partition(":")[0] != CUDA:
        return
    if is_reproducible:
        torch.backends.cudnn.deterministic = True
    if os.environ.get(_TF32) == "1":
        return
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def describe_unused_device(name: str | None) -> str | None:
    """Return a warning if the CPU is used because a GPU of this machine cannot be."""
    if name is not None or select_device() != CPU:
        return None
    if torch.backends.mps.is_built() and not torch.backends.mps.is_available():
        return f"PyTorch computes on the CPU instead of the GPU: {find_failure(MPS)}"
    return describe_unused_gpu("PyTorch", str(find_failure(CUDA)))
