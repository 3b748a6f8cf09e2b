"""Live nodes that are neighbours fetch a model from the registry once."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.node.node_run import LiveNode
from tests.node.nodes import MIB, noise, push_model
from tests.proxy import Proxy
from tests.real_registry import RealRegistry
from tests.wait import until

pytestmark = pytest.mark.integration

NODES = 3


def free_ports(count: int) -> list[int]:
    """Return free ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def has_live_neighbours(node: Any) -> bool:
    return all(each["state"] == "live" for each in node.status()["neighbours"])


def test_neighbours_fetch_a_new_model_from_the_registry_once(
    tmp_path: Path, registry: RealRegistry, repository: str
) -> None:
    with Proxy(registry.host).running() as proxy:
        check_traffic(tmp_path, repository, proxy)


def check_traffic(home: Path, repository: str, proxy: Proxy) -> None:
    sizes = (40 * MIB, 5 * MIB, 300_000, 20_000)
    layers = [noise(size, f"fleet {number}") for number, size in enumerate(sizes)]
    ref = f"{proxy.host}/{repository.partition('/')[2]}:1"
    ports = free_ports(NODES)
    nodes = []
    try:
        for number, port in enumerate(ports):
            others = [f"127.0.0.1:{other}" for other in ports if other != port]
            known = [word for other in others for word in ("--neighbour", other)]
            node = LiveNode(home / f"node{number}", *known)
            nodes.append(node.start("--addr", f"127.0.0.1:{port}"))
        for node in nodes:
            until(partial(has_live_neighbours, node), "the neighbours to be live")
        for node in nodes:
            node.want({"ref": ref, "refresh": 1})
        for node in nodes:
            node.reaches(ref, "failed")  # the tag does not exist yet
        pushed = push_model(home, repository, *layers)
        assert str(replace(pushed, registry=proxy.host)) == ref
        found = [node.reaches(ref, "present") for node in nodes]
        assert len({each["digest"] for each in found}) == 1
        size = sum(sizes)
        assert size <= proxy.sent() <= 1.05 * size
        came = sum(each["sources"]["neighbour"] for each in found)
        assert came >= (NODES - 1.2) * size
        for node in nodes:
            node.aimage("verify")
    finally:
        for node in nodes:
            node.end()
