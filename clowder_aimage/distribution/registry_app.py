"""The routes of the distribution API over one layout (distribution-spec, "Endpoints")."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from clowder_aimage.distribution import request_guard
from clowder_aimage.distribution.blob_routes import BlobRoutes
from clowder_aimage.distribution.cache import PullThroughCache
from clowder_aimage.distribution.catalog import Catalog
from clowder_aimage.distribution.manifest_routes import ManifestRoutes
from clowder_aimage.distribution.push_routes import PushRoutes
from clowder_aimage.distribution.referrer_routes import ReferrerRoutes
from clowder_aimage.distribution.served_blobs import ServedBlobs
from clowder_aimage.distribution.served_lease import ServedLeases
from clowder_aimage.distribution.tag_routes import TagRoutes
from clowder_aimage.distribution.upload_session import EXPIRY, UploadSessions
from clowder_aimage.layout import ImageLayout

if TYPE_CHECKING:
    from clowder_aimage.distribution.upstream import UpstreamRegistry

# The name is anything here and parsed strictly by the routes, so that a bad one gets its own error
_NAME = "/v2/{name:.+}"
_UPLOAD = _NAME + "/blobs/uploads/{upload}"


def build_app(
    layout: ImageLayout,
    *,
    readonly: bool = False,
    hosts: frozenset[str] | None = request_guard.LOOPBACK_HOSTS,
    token: str | None = None,
    upstream: UpstreamRegistry | None = None,
) -> web.Application:
    """The application, to be run by ``serve`` or under another one's path.

    ``hosts`` are the names that a request's Host header may carry; None stands for any. ``token``
    is what clients must know, None for nothing. With an ``upstream`` it is a cache of that.
    """
    middlewares = [request_guard.answer_errors, request_guard.check_host(hosts)]
    if token is not None:
        middlewares.append(request_guard.check_token(token))
    if upstream is not None:
        message = f"this is a cache of {upstream.name}: push there"
        middlewares.append(request_guard.refuse_writes(message))
    elif readonly:
        middlewares.append(request_guard.refuse_writes("this registry is read-only"))
    app = web.Application(middlewares=middlewares)
    app.on_response_prepare.append(request_guard.common_headers)
    uploads = UploadSessions(layout, time.monotonic, EXPIRY)
    catalog = Catalog(layout, upstream.name if upstream else "")
    kept = ServedLeases(layout, time.monotonic)
    shelf = ServedBlobs(layout, catalog, kept)
    cache = PullThroughCache(layout, catalog, shelf, kept, upstream) if upstream else None
    manifests = ManifestRoutes(layout, catalog, shelf, cache)
    tags, referrers = TagRoutes(catalog, cache), ReferrerRoutes(catalog, cache)
    app.add_routes(
        _table(tags, BlobRoutes(shelf, cache), PushRoutes(shelf, uploads), manifests, referrers)
    )
    app.cleanup_ctx.append(_expiry(uploads, kept))
    if cache is not None:
        app.on_cleanup.append(lambda _: cache.close())
    return app


def reading(layout: ImageLayout, kept: ServedLeases, base: str = "") -> list[web.RouteDef]:
    """The routes that only read, for an application of another kind: they need no middleware but
    ``guard.answer_errors``. ``kept`` is the caller's to turn and to close; with a ``base`` only
    names below it are served."""
    catalog = Catalog(layout, base)
    shelf = ServedBlobs(layout, catalog, kept)
    return [
        web.get("/v2/", TagRoutes(catalog, None).version),
        web.get(_NAME + "/tags/list", TagRoutes(catalog, None).tags),
        web.get(_NAME + "/blobs/{digest}", BlobRoutes(shelf, None).get),
        web.get(_NAME + "/manifests/{reference}", ManifestRoutes(layout, catalog, shelf, None).get),
    ]


def _table(
    tag: TagRoutes,
    blob: BlobRoutes,
    push: PushRoutes,
    manifest: ManifestRoutes,
    referrer: ReferrerRoutes,
) -> list[web.RouteDef]:
    """Every endpoint. The first that matches wins: uploads stand before blobs."""
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


def _expiry(
    uploads: UploadSessions, kept: ServedLeases
) -> Callable[[web.Application], AsyncIterator[None]]:
    """Give up silent uploads and old leases while the application runs, all when it ends."""

    async def context(_: web.Application) -> AsyncIterator[None]:
        async def watch() -> None:
            while True:
                await asyncio.sleep(uploads.expiry / 10)
                await uploads.expire()
                await asyncio.to_thread(kept.turn)

        task = asyncio.create_task(watch())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await uploads.close()
        kept.close()

    return context
