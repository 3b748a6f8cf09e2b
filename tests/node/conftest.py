"""Nodes and a registry for the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.node import daemon, eviction, model_transition
from clowder_aimage.node import node as node_module
from tests.conftest import TINY
from tests.node.node_run import LiveNode, LocalNode
from tests.node.publisher import Publisher
from tests.process import Aimage
from tests.proxy import Proxy
from tests.registry_app import RegistryThread


@pytest.fixture
def live_node(tmp_path: Path) -> Iterator[LiveNode]:
    """Return a node in a child process, which is not started yet."""
    node = LiveNode(tmp_path / "node")
    yield node
    node.end()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the nodes of this process look at their files, models and metrics often."""
    monkeypatch.setattr(node_module, "TICK", 0.05)
    monkeypatch.setattr(daemon, "EVERY", 0.05)
    monkeypatch.setattr(eviction, "EVERY", 0.2)
    monkeypatch.setattr(model_transition, "LOOK", 0.2)


@pytest.fixture
def node(tmp_path: Path, quick: None) -> Iterator[LocalNode]:
    """Return a node in this process, which is not started yet."""
    node = LocalNode(tmp_path / "node")
    yield node
    node.end()


@pytest.fixture(scope="session")
def local_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryThread]:
    """Return ``registry serve`` in this process."""
    registry = RegistryThread(ImageLayout(tmp_path_factory.mktemp("registry") / "store"))
    yield registry
    registry.close()


@pytest.fixture
def local_repository(local_registry: RegistryThread, request: pytest.FixtureRequest) -> str:
    """Return a repository name, with host, that no other test uses."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower()).strip("-")
    return f"{local_registry.host}/tests/{'-'.join(filter(None, name.split('-')))}"


@pytest.fixture
def proxy(local_registry: RegistryThread) -> Iterator[Proxy]:
    """Return a proxy in front of the registry of this process."""
    with Proxy(local_registry.host).running() as running:
        yield running


@pytest.fixture
def publisher(tmp_path: Path, local_repository: str, proxy: Proxy) -> Publisher:
    """Return a publisher of small models in the registry of this process, behind a proxy."""
    return Publisher(tmp_path, local_repository, proxy)


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Aimage:
    """Return a command line with a store to publish models from."""
    home = tmp_path_factory.mktemp("author")
    aimage = Aimage(home, home / "store")
    aimage("create", "-q", "--whole-files", "tiny", TINY)
    return aimage
