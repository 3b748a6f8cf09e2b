"""Servers for the tests of this directory."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distribution.served import Server, start


@pytest.fixture(scope="module")
def serve_layout() -> Iterator[Callable[..., Server]]:
    """Return a function that starts servers, which end with the module."""
    servers: list[Server] = []

    def serve(root: Path, *flags: str, address: str = "127.0.0.1:0") -> Server:
        servers.append(start(root, *flags, address=address))
        return servers[-1]

    yield serve
    for server in servers:
        _end(server)


def _end(server: Server) -> None:
    server.http.close()
    if server.process.poll() is None:
        server.stop(signal.SIGKILL)
    for stream in (server.process.stdout, server.log):
        if stream is not None:
            stream.close()


@pytest.fixture(scope="module")
def impatient(
    serve_layout: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Server:
    """Return a server with short timeouts, shared by the tests of a module."""
    return serve_layout(tmp_path_factory.mktemp("impatient") / "store", "impatient")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server shared by all tests, each with its own repositories."""
    server = start(tmp_path_factory.mktemp("server") / "store")
    yield server
    _end(server)
