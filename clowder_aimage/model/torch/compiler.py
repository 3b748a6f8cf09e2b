"""The compiled form of blocks: ready at once, or compiled beside the first steps.

One function calls the blocks of all kinds, so that equal blocks share their compiled code. A
variant of their inputs (several pictures, adapters, a mask) is compiled once: lengths and ranks are
variables of the code, and tensors, also those of adapters, are its inputs.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import _dynamo as dynamo

from clowder_aimage.errors import UsageError
from clowder_aimage.model.library_choice import NEVER, NOW

# Calls a block with its arguments: as it is, or compiled
Run = Callable[..., Any]
# Variants of the code of one function; more are not compiled
_VARIANTS = 64
# PyTorch's settings of it, by version
_LIMITS = "recompile_limit", "cache_size_limit"
_log = logging.getLogger(__name__)


def call_block(block: torch.nn.Module, *arguments: Any) -> Any:
    """Call a block as it is."""
    return block(*arguments)


def _call_compiled(block: torch.nn.Module, *arguments: Any) -> Any:
    # Compiled code belongs to a function, and that of ``call_block`` is never compiled
    return block(*arguments)


def _compile() -> Run:
    """Return the function that calls compiled blocks in this thread."""
    # A thread has settings of its own; to set one, even to its value, takes time
    for name in _LIMITS:
        if getattr(dynamo.config, name, _VARIANTS) != _VARIANTS:
            setattr(dynamo.config, name, _VARIANTS)
    return _build_compiled()


@functools.cache
def _build_compiled() -> Run:
    compiled: Run = torch.compile(_call_compiled)
    return compiled


def mark_variable(tensor: torch.Tensor, *axes: int) -> None:
    """Make sizes variables of the code that is compiled for a tensor, instead of constants."""
    dynamo.maybe_mark_dynamic(tensor, axes)


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
        raise UsageError(
            f"PyTorch cannot compile on this machine ({_describe(error)})",
            hint="install a C++ compiler, such as the package g++, and for a GPU Triton; "
            "or do not compile",
        ) from error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"


def start_thread(function: Callable[[], None]) -> None:
    """Run a function in a thread that does not keep the process alive."""
    threading.Thread(target=function, name="compile", daemon=True).start()


class CompiledForm:
    """The compiled form of the blocks of a network, by the variants of their inputs.

    mode: NEVER, BACKGROUND or NOW. start: begin to run a function beside this thread.
    """

    def __init__(
        self, mode: str, start: Callable[[Callable[[], None]], None] = start_thread
    ) -> None:
        self.mode, self._start = mode, start
        self._ready: set[Hashable] = set()
        self._begun: set[Hashable] = set()
        self._is_closed = False

    def close(self) -> None:
        """Expect that a thread fails: the tensors of the blocks are about to be released."""
        self._is_closed = True

    def is_ready(self, variant: Hashable) -> bool:
        """Return True if a variant is compiled."""
        return variant in self._ready

    def select(self, variant: Hashable, warm: Callable[[Run], None]) -> Run:
        """Return the function that calls blocks, for a variant of their inputs.

        ``warm`` calls each kind of block once with a function. In the mode BACKGROUND blocks are
        called as they are until that has ended in a thread; NOW waits for it.
        """
        if self.mode == NEVER or self.is_ready(variant):
            return call_block if self.mode == NEVER else _compile()
        if self.mode == NOW:
            self._compile(variant, warm)
            return _compile()
        if variant not in self._begun:
            self._begun.add(variant)
            threads = torch.get_num_threads()
            self._start(lambda: self._warm(variant, warm, threads))
        return _compile() if self.is_ready(variant) else call_block

    def _warm(self, variant: Hashable, warm: Callable[[Run], None], threads: int) -> None:
        # Compiled code is for this number of threads, and a new thread has its own
        torch.set_num_threads(threads)
        try:
            self._compile(variant, warm)
        except Exception as error:
            # Compilers raise errors of many libraries; the blocks can be called as they are
            level = logging.DEBUG if self._is_closed else logging.WARNING
            _log.log(level, "blocks stay uncompiled", extra={"error": _describe(error)})

    def _compile(self, variant: Hashable, warm: Callable[[Run], None]) -> None:
        # Code that is compiled in another mode is other code
        with torch.inference_mode():
            warm(_compile())
        self._ready.add(variant)
