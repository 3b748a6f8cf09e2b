"""The stores that keep the contract. Another one is one more line in STORES."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import MemoryStore
from clowder_aimage.layout import ImageLayout

STORES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda directory: MemoryStore(),
    "layout": lambda directory: ImageLayout(directory / "store"),
}


@pytest.fixture(params=STORES)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """An empty store of each kind."""
    return STORES[request.param](tmp_path)


@pytest.fixture
def name() -> str:
    """A repository that the store may use; a store in a registry has its host in it."""
    return "contract/test"
