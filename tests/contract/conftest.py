"""The stores that keep the contract. Another one is one more line in STORES."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions, Repository
from tests.memory_store import MemoryStore

# Each gives an empty store and the name of a repository that it may use, with its host if any.
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


@pytest.fixture(params=STORES)
def subject(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    """A store of each kind, closed at the end where it can be."""
    store, name = STORES[request.param](request)
    with contextlib.ExitStack() as stack:
        if hasattr(store, "__exit__"):
            stack.enter_context(store)
        yield store, name


@pytest.fixture
def target(subject: tuple[Any, str]) -> Any:
    """The store."""
    return subject[0]


@pytest.fixture
def name(subject: tuple[Any, str]) -> str:
    """The repository's name."""
    return subject[1]
