"""The environment of the hostile tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clowder_aimage.registry import retry
from tests.hostile.hostile_server import Ours
from tests.hostile.hostile_world import SECRET, World


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> World:
    """Return a home, a store, and a directory outside of both."""
    for name in list(os.environ):
        if name.startswith(("AIMAGE_", "DOCKER_", "XDG_", "SSL_CERT")):
            monkeypatch.delenv(name)
    home, store, outside = (tmp_path / name for name in ("home", "store", "outside"))
    for directory in (home, outside):
        directory.mkdir()
    (outside / "secret").write_bytes(SECRET)
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("AIMAGE_STORE", str(store))
    monkeypatch.chdir(home)
    defaults = retry.retry_call.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "sleep", lambda _: None)
    return World(home, store, outside, capture=capfd)


@pytest.fixture
def running_registry() -> Iterator[Callable[[Path], Callable[..., tuple[int, bytes]]]]:
    """Return ``running_registry(store)``: a client of our registry over that store."""
    servers: list[Ours] = []

    def serve(store: Path) -> Callable[..., tuple[int, bytes]]:
        servers.append(Ours(store))
        return servers[-1].ask

    yield serve
    for server in servers:
        server.close()
