"""The routes of the distribution API over one layout (distribution-spec, "Endpoints")."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from clowder_aimage.layout import ImageLayout
from clowder_aimage.server import guard
from clowder_aimage.server.blob import BlobRoutes
from clowder_aimage.server.manifest import ManifestRoutes
from clowder_aimage.server.push import PushRoutes
from clowder_aimage.server.referrer import ReferrerRoutes
from clowder_aimage.server.tag import TagRoutes
from clowder_aimage.server.upload import EXPIRY, Uploads

# The name is anything here and parsed strictly by the routes, so that a bad one gets its own error
_NAME = "/v2/{name:.+}"
_UPLOAD = _NAME + "/blobs/uploads/{upload}"


def build_app(
    layout: ImageLayout,
    *,
    readonly: bool = False,
    hosts: frozenset[str] | None = guard.LOOPBACK_HOSTS,
) -> web.Application:
    """The application, to be run by ``serve`` or under another one's path.

    ``hosts`` are the names that a request's Host header may carry; None stands for any.
    """
    middlewares = [guard.answer_errors, guard.check_host(hosts)]
    if readonly:
        middlewares.append(guard.refuse_writes)
    app = web.Application(middlewares=middlewares)
    app.on_response_prepare.append(guard.common_headers)
    uploads = Uploads(layout, time.monotonic, EXPIRY)
    app.add_routes(_table(layout, uploads))
    app.cleanup_ctx.append(_expiry(uploads))
    return app


def _table(layout: ImageLayout, uploads: Uploads) -> list[web.RouteDef]:
    """Every endpoint. The first that matches wins: uploads stand before blobs."""
    tag, blob, referrer = TagRoutes(layout), BlobRoutes(layout), ReferrerRoutes(layout)
    push, manifest = PushRoutes(layout, uploads), ManifestRoutes(layout)
    return [
        web.get("/v2/", tag.version),
        web.get("/v2/_catalog", tag.repositories),
        web.get(_NAME + "/tags/list", tag.tags),
        web.post(_NAME + "/blobs/uploads/", push.begin),
        web.get(_UPLOAD, push.status, allow_head=False),
        web.patch(_UPLOAD, push.append),
        web.put(_UPLOAD, push.finish),
        web.delete(_UPLOAD, push.cancel),
        web.get(_NAME + "/blobs/{digest}", blob.get),
        web.delete(_NAME + "/blobs/{digest}", blob.delete),
        web.get(_NAME + "/manifests/{reference}", manifest.get),
        web.put(_NAME + "/manifests/{reference}", manifest.put),
        web.delete(_NAME + "/manifests/{reference}", manifest.delete),
        web.get(_NAME + "/referrers/{digest}", referrer.referrers),
    ]


def _expiry(uploads: Uploads) -> Callable[[web.Application], AsyncIterator[None]]:
    """Give up silent uploads while the application runs, and all of them when it ends."""

    async def context(_: web.Application) -> AsyncIterator[None]:
        async def watch() -> None:
            while True:
                await asyncio.sleep(uploads.expiry / 10)
                await uploads.expire()

        task = asyncio.create_task(watch())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await uploads.close()

    return context
