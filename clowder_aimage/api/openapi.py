"""The OpenAPI 3.1 description of the worker's routes, as committed."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from clowder_aimage.api.service import Service
from clowder_aimage.http.route import OPEN, Route

FILE = Path(__file__).with_suffix(".json")


def routes(_: Service) -> list[Route]:
    """Return the route of the description."""
    text = FILE.read_text("utf-8")

    async def describe(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type="application/json")

    return [Route("GET", "/openapi.json", describe, OPEN)]
