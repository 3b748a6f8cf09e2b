"""The description of everything that the worker answers (OpenAPI 3.1), as it is committed."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from clowder_aimage.api.service import Service
from clowder_aimage.http.route import OPEN, Route

FILE = Path(__file__).with_suffix(".json")


def routes(_: Service) -> list[Route]:
    """The description itself."""
    text = FILE.read_text("utf-8")

    async def describe(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type="application/json")

    return [Route("GET", "/openapi.json", describe, OPEN)]
