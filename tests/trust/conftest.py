"""A small model in a store and in a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.config import trust_policy
from clowder_aimage.content.gate import GATES
from tests.abridged import abridge
from tests.process import Aimage
from tests.store import copy_store
from tests.trust.place import Place


@pytest.fixture(scope="session")
def small_store(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """Return a store with a model as ``small``, which has one tensor of each network."""
    home = tmp_path_factory.mktemp("small")
    here = Aimage(home, home / "store")
    here("create", "small", abridge(tiny, home / "model"), "-q")
    return here.store


@pytest.fixture
def pushed(aimage: Callable[..., Aimage], small_store: Path, repository: str) -> Any:
    """Return the command line on a store with a model that its registry has, too, as ``name``."""
    here: Any = aimage()
    copy_store(small_store, here.store)
    here.name = f"{repository}:v1"
    here("tag", "small", here.name, "-q")
    here("push", here.name, "-q")
    return here


@pytest.fixture(autouse=True)
def without_machine_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Replace the policy of this machine by a file of the test, which does not exist yet."""
    path = tmp_path / "machine" / "trust.yaml"
    path.parent.mkdir()
    monkeypatch.setattr(trust_policy, "SYSTEM_FILES", [path])
    GATES.clear()
    yield path
    # Another process: the policy of this one has not disappeared.
    GATES.clear()


@pytest.fixture
def place(pushed: Any, tmp_path: Path, without_machine_policy: Path) -> Place:
    return Place(pushed, tmp_path, without_machine_policy)
