"""The stores that the contract tests run against; add new ones to STORES."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions, Repository
from tests.memory_store import MemoryStore

# Each returns an empty store and a repository name in it, with the host if any.
STORES: dict[str, Callable[[pytest.FixtureRequest], tuple[Any, str]]] = {
    "memory": lambda request: (MemoryStore(), "contract/test"),
    "layout": lambda request: (
        ImageLayout(request.getfixturevalue("tmp_path") / "store"),
        "contract/test",
    ),
    "registry": lambda request: (
        Repository(Reference.parse(name := request.getfixturevalue("repository")), ClientOptions()),
        name,
    ),
}


# The registry's fixture is requested by name, so tests/conftest.py cannot see it and mark the test
@pytest.fixture(
    params=[
        pytest.param(kind, marks=[pytest.mark.integration] * (kind == "registry"))
        for kind in STORES
    ]
)
def subject(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    """Yield a store of each kind, and close it if possible."""
    store, name = STORES[request.param](request)
    with contextlib.ExitStack() as stack:
        if hasattr(store, "__exit__"):
            stack.enter_context(store)
        yield store, name


@pytest.fixture
def target(subject: tuple[Any, str]) -> Any:
    """Return the store."""
    return subject[0]


@pytest.fixture
def name(subject: tuple[Any, str]) -> str:
    """Return the repository's name."""
    return subject[1]
