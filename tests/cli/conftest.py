"""Stores that are created once and copied for each test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.abridged import abridge
from tests.process import Aimage
from tests.real_registry import RealRegistry
from tests.store import copy_store


@pytest.fixture(scope="session")
def pushed_store(
    tmp_path_factory: pytest.TempPathFactory, registry: RealRegistry, tiny: Path
) -> tuple[Path, str]:
    """Return a store with the files of the tiny model, and its name, which the registry has too.

    It has 13 blobs, as each is a request.
    """
    home = tmp_path_factory.mktemp("pushed")
    here, name = Aimage(home, home / "store"), f"{registry.host}/cli/tiny:v1"
    here("create", name, tiny, "--whole-files", "-q")
    here("push", name, "-q")
    return here.store, name


@pytest.fixture
def pushed(pushed_store: tuple[Path, str]) -> str:
    """Return the name of the tiny model's files in the registry."""
    return pushed_store[1]


@pytest.fixture(scope="session")
def abridged(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """Return the tiny model with one tensor of each network."""
    return abridge(tiny, tmp_path_factory.mktemp("abridged") / "tiny")


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """Return a store with the tiny model as ``x``."""
    home = tmp_path_factory.mktemp("tiny")
    here = Aimage(home, home / "store")
    here("create", "x", tiny, "-q")
    return here.store


@pytest.fixture
def stocked(aimage: Callable[[], Aimage], tiny_store: Path) -> Callable[[], Aimage]:
    """Return ``stocked()``: the command line on its own store with the tiny model as ``x``."""

    def make() -> Aimage:
        here = aimage()
        copy_store(tiny_store, here.store)
        return here

    return make
