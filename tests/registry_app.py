"""``registry serve`` in this process: as an application, and as a server in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

from aiohttp import web

from clowder_aimage.distribution.role import RegistryRole
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


class RegistryThread:
    """The registry on a free port of 127.0.0.1; its event loop has its own thread."""

    def __init__(self, layout: ImageLayout, upstream: UpstreamRegistry | None = None) -> None:
        self._layout, self._upstream = layout, upstream
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._closed = asyncio.Event()
        self.host = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = web.AppRunner(registry_app(self._layout, upstream=self._upstream), access_log=None)

        async def serve() -> None:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.host = f"127.0.0.1:{runner.addresses[0][1]}"
            self._ready.set()
            await self._closed.wait()
            await runner.cleanup()

        self._loop.run_until_complete(serve())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join(60)
