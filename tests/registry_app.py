"""``registry serve`` as an application, for tests that run it in process."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web

from clowder_aimage.distribution.registry_role import RegistryRole
from clowder_aimage.distribution.upstream import UpstreamRegistry
from clowder_aimage.http.api_error import OCI
from clowder_aimage.http.app import build_app
from clowder_aimage.http.route import ADMIN
from clowder_aimage.layout import ImageLayout


def registry_app(
    layout: ImageLayout, *, token: str | None = None, upstream: UpstreamRegistry | None = None
) -> web.Application:
    """Return the registry; its tasks start and stop with the application."""
    role = RegistryRole(layout, upstream=upstream)

    async def running(_: web.Application) -> AsyncIterator[None]:
        async with role.running():
            yield

    tokens = {token: ADMIN} if token else {}
    app = build_app(role, tokens=tokens, interface=OCI)
    app.cleanup_ctx.append(running)
    return app
