"""Other programs that tests need."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

# Whether the current test is one of make test, which needs no other program; set by conftest.py
is_fast = False


def find_program(name: str) -> str:
    """Return the path of a program: beside this Python, else on PATH. Without it, as ``lack``.

    A test of ``make test`` gets none from PATH, so that it fails on a machine that has it too.
    """
    beside = Path(sys.executable).with_name(name)
    if beside.is_file():
        return str(beside)
    path = None if is_fast else shutil.which(name)
    return path or lack(f"{name} is not installed")


def need_package(name: str) -> None:
    """Skip the test, or the module that is imported, without a package.

    Unlike ``pytest.importorskip`` it imports only parents: mlx_lm takes two seconds, and each
    process of the tests imports each module.
    """
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)


def lack(message: str) -> NoReturn:
    """Skip the test, or fail it where AIMAGE_REQUIRE_TOOLS is 1, as in CI.

    Fail a test of ``make test``: there it would never be missed.
    """
    if is_fast:
        pytest.fail(f"{message}: mark this test with integration")
    if os.environ.get("AIMAGE_REQUIRE_TOOLS") == "1":
        pytest.fail(message)
    pytest.skip(message)
