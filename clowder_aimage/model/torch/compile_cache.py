"""Compiled code that is kept: a second start compiles nothing.

PyTorch's compiler keeps what it has compiled by the graphs and its own settings. A directory of its
own for each GPU, processor and version leaves nothing to chance.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

from clowder_aimage import __version__
from clowder_aimage.model.torch.device import CUDA

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_PROCESSORS = Path("/proc/cpuinfo")


def keep_compiled(directory: Path, device: str) -> None:
    """Let PyTorch keep compiled code below ``directory``, unless its variable names another one.

    Call it before anything is compiled.
    """
    os.environ.setdefault(_VARIABLE, str(directory / name_surroundings(device)))


def name_surroundings(device: str) -> str:
    """Return the name of what compiled code depends on: GPU, processor, PyTorch, this program."""
    kind = device.partition(":")[0]
    gpu = torch.cuda.get_device_name(torch.device(device)) if kind == CUDA else kind
    parts = gpu, _name_processor(), f"torch-{torch.__version__}", f"aimage-{__version__}"
    return "_".join(re.sub(r"[^A-Za-z0-9.+]+", "-", part).strip("-") for part in parts)


def _name_processor() -> str:
    """Return the model of the processor: code for it uses all of its instructions."""
    try:
        lines = _PROCESSORS.read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
