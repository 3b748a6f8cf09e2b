"""Runtimes of language models whose libraries cannot be loaded."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from clowder_aimage.errors import UsageError
from clowder_aimage.model.text.runtime import load_language_model

AIMAGE: Any = SimpleNamespace(properties={"format": "gguf"})


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (
            ModuleNotFoundError("No module named 'xllamacpp'", name="xllamacpp"),
            r"llama\.cpp needs the extra \[llama\]",
            "extra [llama]",
        ),
        (
            ImportError("libgomp.so.1: cannot open shared object file"),
            "llama.cpp cannot be used: libgomp.so.1: cannot open shared object file",
            "libgomp1",
        ),
    ],
)
def test_a_library_that_cannot_be_loaded_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, message: str, hint: str
) -> None:
    def refuse(_: str) -> Any:
        raise error

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(UsageError, match=message) as raised:
        load_language_model(SimpleNamespace(), AIMAGE)
    assert hint in str(vars(raised.value))
