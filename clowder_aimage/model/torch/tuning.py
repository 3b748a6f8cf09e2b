"""Compilation and attention backends: options that only change the speed of networks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from diffusers.utils import logging

from clowder_aimage.errors import UsageError
from clowder_aimage.model.library_choice import TorchTuning

# The suffix of backends with kernels that would be downloaded
_LOADED = "_hub"


@functools.cache
def check_compiler(device: str) -> None:
    """Compile a small function: otherwise the first step of a model would show a missing compiler.

    Raises UsageError: PyTorch cannot compile here.
    """

    def increase(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    try:
        torch.compile(increase)(torch.zeros(8, device=device))
    except Exception as error:
        # Importing PyTorch raises errors of many libraries, none of them documented
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
        raise UsageError(
            f"PyTorch cannot compile on this machine ({reason})",
            hint="install a C++ compiler, such as the package g++, and for a GPU Triton; "
            "or do not compile",
        ) from error


def select_attention(module: Any, name: str) -> None:
    """Select the attention backend of a network of diffusers.

    Raises UsageError: it is unknown, its package is missing, or its kernel would be downloaded.
    """
    backends = [
        backend.value for backend in AttentionBackendName if not backend.value.endswith(_LOADED)
    ]
    if name not in backends:
        names = ", ".join(backend for backend in backends if not backend.startswith("_"))
        raise UsageError(f"unknown attention backend {name!r:.40}: use {names}")
    verbosity = logging.get_verbosity()
    # Hide diffusers' warning that the interface may change
    logging.set_verbosity_error()
    try:
        # which sets it for other networks too, until the end of the block
        with attention_backend(AttentionBackendName.NATIVE):
            module.set_attention_backend(name)
    except RuntimeError as error:
        raise UsageError(f"the attention backend {name} cannot be used: {error}") from None
    finally:
        logging.set_verbosity(verbosity)


def tune(module: Any, tuning: TorchTuning) -> None:
    """Apply options to a network that has repeated layers, before its weights are read.

    Each kind of layers is compiled once, when it runs first. Raises as ``select_attention``.
    """
    if not getattr(module, "_repeated_blocks", None):
        return
    if tuning.attention is not None:
        select_attention(module, tuning.attention)
    if tuning.compile:
        module.compile_repeated_blocks()
