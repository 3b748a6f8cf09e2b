"""Tests of llama.cpp are left out where its library cannot be loaded."""

from __future__ import annotations

try:
    import xllamacpp  # noqa: F401
except ImportError:  # on a bare Debian libgomp.so.1 is missing
    collect_ignore_glob = ["test_broken_text.py", "test_llama*.py"]
