"""The metrics of a server for Prometheus, as a role: in its application or at another address."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from aiohttp import web

from clowder_aimage.engine.metric import CONTENT_TYPE
from clowder_aimage.http.operation import HEALTH, Answer, Operation
from clowder_aimage.http.route import OPEN, Role, Route, serve

METRICS = Operation(
    "GET",
    "/metrics",
    OPEN,
    HEALTH,
    "metrics",
    "Get the metrics for Prometheus.",
    (Answer("Prometheus' text format.", media=("text/plain",)),),
)


class MetricsRole(Role):
    """The route ``/metrics``. The body is that of ``text()``."""

    def __init__(self, text: Callable[[], bytes], scope: str = OPEN) -> None:
        self._text, self._scope = text, scope

    def build_routes(self) -> list[Route]:
        return [serve(replace(METRICS, scope=self._scope), self._send_metrics)]

    async def _send_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._text(), headers={"Content-Type": CONTENT_TYPE})
