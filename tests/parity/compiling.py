"""Compilation with PyTorch in tests: another compiler, and nothing that stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from clowder_aimage.model.torch import compiler, library


@contextmanager
def compile_with(backend: Any) -> Iterator[None]:
    """Compile with a backend of ``torch.compile`` inside the block, and forget it afterwards."""
    compile_function = torch.compile

    def compile_by_backend(function: Any) -> Any:
        return compile_function(function, backend=backend)

    def forget() -> None:
        torch._dynamo.reset()
        compiler._build_compiled.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "check_compiler", lambda _: None)
        patch.setattr(torch, "compile", compile_by_backend)
        forget()
        yield
    forget()


@contextmanager
def count_compilations() -> Iterator[CompileCounter]:
    """Count what is compiled (``frame_count``); the traced graphs run as they are."""
    counter = CompileCounter()
    with compile_with(counter):
        yield counter
