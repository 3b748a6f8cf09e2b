"""No response but the page is a document for browsers, whatever a route sends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from clowder_aimage.api import description_page, page
from clowder_aimage.api.service import make_service
from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.distribution.role import RegistryRole
from clowder_aimage.engine.settings import Settings
from clowder_aimage.fleet.gateway.metric import GatewayMetrics
from clowder_aimage.fleet.gateway.role import GatewayRole
from clowder_aimage.fleet.link import FleetAccess, FleetLink
from clowder_aimage.fleet.name import GATEWAY
from clowder_aimage.http.api_error import OCI, OPENAI
from clowder_aimage.http.app import POLICY, build_app
from clowder_aimage.http.metrics_role import MetricsRole
from clowder_aimage.http.route import Role
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.daemon import Daemon
from clowder_aimage.node.settings import NodeSettings
from clowder_aimage.oci import Digest, Reference
from clowder_aimage.registry import ClientOptions

# The page, the description of the API, and the documents of the page
DOCUMENTS = {"/": page.POLICY, "/page/index.html": page.POLICY, "/docs": description_page.POLICY}


def build_worker(store: Path) -> Role:
    return WorkerRole(make_service(Settings(), ImageLayout(store), ClientOptions()))


def build_gateway(_: Path) -> Role:
    def resolve(reference: Reference) -> Digest:
        raise NotImplementedError(reference)

    link = FleetLink(FleetAccess(("nats://127.0.0.1:1",)), GATEWAY)
    return GatewayRole(link, GatewayMetrics(), resolve=resolve)


def build_registry(store: Path) -> Role:
    return RegistryRole(ImageLayout(store))


def build_node(store: Path) -> Role:
    service = make_service(NodeSettings(), ImageLayout(store), ClientOptions())
    return Daemon(service, NodeSettings(), {})


def build_metrics(_: Path) -> Role:
    return MetricsRole(lambda: b"")


@pytest.mark.parametrize(
    "build", [build_worker, build_gateway, build_registry, build_node, build_metrics]
)
def test_every_route_forbids_scripts_and_frames(
    build: Callable[[Path], Role], tmp_path: Path
) -> None:
    async def ask() -> None:
        role = build(tmp_path / "store")
        interface = OCI if build is build_registry else OPENAI
        app = build_app(role, interface=interface)
        routes = [(route.method, route.path) for route in app["routes"]]
        async with TestClient(TestServer(app)) as client:
            for method, pattern in [*routes, ("GET", "/none"), ("PUT", "/"), ("HEAD", "/docs")]:
                path = re.sub(r"\{[^{}]*(\{[^{}]*\}[^{}]*)*\}", "x", pattern)
                accept = {"Accept": "text/html"}
                async with client.request(method, path, headers=accept) as response:
                    headers = response.headers
                    assert headers["X-Content-Type-Options"] == "nosniff", path
                    is_page = response.status == 200 and method in ("GET", "HEAD")
                    policy = DOCUMENTS.get(path, POLICY) if is_page else POLICY
                    assert headers["Content-Security-Policy"] == policy, (method, path)

    asyncio.run(ask())
