"""The routes of the distribution API over one layout (distribution-spec, "Endpoints")."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from aiohttp import web

from clowder_aimage.distribution.blob_routes import BlobRoutes
from clowder_aimage.distribution.cache import PullThroughCache
from clowder_aimage.distribution.catalog import Catalog
from clowder_aimage.distribution.catalog_routes import CatalogRoutes
from clowder_aimage.distribution.error import DistributionError
from clowder_aimage.distribution.manifest_routes import ManifestRoutes
from clowder_aimage.distribution.metric import RegistryMetrics
from clowder_aimage.distribution.push_routes import PushRoutes
from clowder_aimage.distribution.served_blobs import ServedBlobs, ServedLeases
from clowder_aimage.distribution.shared_upload import SharedUploads
from clowder_aimage.distribution.upload_session import EXPIRY, UploadSessions
from clowder_aimage.engine.endpoint import Endpoint
from clowder_aimage.engine.executor import run_locking
from clowder_aimage.errors import AImageError, StoreBusyError, UsageError
from clowder_aimage.http.access import check_site
from clowder_aimage.http.api_error import OCI
from clowder_aimage.http.background import run_in_background
from clowder_aimage.http.index_writer import writing_index
from clowder_aimage.http.listening_socket import listen, listen_tcp_only
from clowder_aimage.http.metrics_role import MetricsRole
from clowder_aimage.http.process_group import Member, ProcessGroup
from clowder_aimage.http.route import ADMIN, NODE, READ, WRITE, Exchange, Handler, Role, Route
from clowder_aimage.http.server import serve as serve_roles
from clowder_aimage.layout import ImageLayout

if TYPE_CHECKING:
    from clowder_aimage.distribution.upstream import UpstreamRegistry

# Seconds in which running requests may end
GRACE = 5.0
# Bytes of a request's body that may wait for the disk
READ_BUFFER = 256 * 1024
# Any name matches, and the routes parse it strictly, so that an invalid one gets its own error
_NAME = "/v2/{name:.+}"
_UPLOAD = _NAME + "/blobs/uploads/{upload}"


class RegistryRole(Role):
    """The layout as a registry; with an ``upstream``, as a cache of it.

    It is one of ``several`` processes that continue the uploads of each other.
    """

    def __init__(
        self,
        layout: ImageLayout,
        *,
        readonly: bool = False,
        upload_quota: int = 0,
        upstream: UpstreamRegistry | None = None,
        several: bool = False,
    ) -> None:
        self._layout = layout
        self._refusal = "this registry is read-only" if readonly else ""
        if upstream is not None:
            self._refusal = f"this registry is a cache of {upstream.name}: push to {upstream.host}"
        uploads = SharedUploads if several else UploadSessions
        self._uploads = uploads(layout, time.monotonic, EXPIRY, upload_quota)
        self.metrics = RegistryMetrics(self._uploads.__len__, several=several)
        self._leases = ServedLeases(layout, time.monotonic)
        catalog = Catalog(layout, upstream.name if upstream else "")
        self._records = catalog.records
        blobs = ServedBlobs(layout, catalog, self._leases, shares_all=upstream is not None)
        self._cache = PullThroughCache(layout, catalog, blobs, upstream) if upstream else None
        self._catalog = CatalogRoutes(catalog, self._cache)
        self._blobs, self._push = BlobRoutes(blobs, self._cache), PushRoutes(blobs, self._uploads)
        self._manifests = ManifestRoutes(layout, catalog, blobs, self._cache)

    def build_routes(self) -> list[Route]:
        """Return all endpoints. The first match wins, so uploads precede blobs."""
        names, push, blob, manifest = self._catalog, self._push, self._blobs, self._manifests
        routes = [
            Route("GET", "/v2/", names.get_version, READ),
            Route("GET", "/v2/_catalog", names.list_repositories, READ),
            Route("GET", _NAME + "/tags/list", names.list_tags, READ),
            Route("POST", _NAME + "/blobs/uploads/", push.begin, WRITE, None),
            Route("GET", _UPLOAD, push.get_status, WRITE, has_head=False),
            Route("PATCH", _UPLOAD, push.append, WRITE, None),
            Route("PUT", _UPLOAD, push.finish, WRITE, None),
            Route("DELETE", _UPLOAD, push.cancel, WRITE),
            Route("GET", _NAME + "/blobs/{digest}", blob.get, READ),
            Route("DELETE", _NAME + "/blobs/{digest}", blob.delete, ADMIN),
            Route("GET", _NAME + "/manifests/{reference}", manifest.get, READ),
            Route("PUT", _NAME + "/manifests/{reference}", manifest.put, WRITE, None),
            Route("DELETE", _NAME + "/manifests/{reference}", manifest.delete, ADMIN),
            Route("GET", _NAME + "/referrers/{digest}", names.list_referrers, READ),
            *MetricsRole(self.metrics.format_text, READ).build_routes(),
        ]
        if self._cache is not None:
            routes = [replace(route, handler=_refuse_cross_site(route.handler)) for route in routes]
        if not self._refusal:
            return routes
        return [
            route if route.method == "GET" else replace(route, handler=self._refuse)
            for route in routes
        ]

    def count(self, exchange: Exchange) -> None:
        self.metrics.count(exchange)

    async def _refuse(self, _: web.Request) -> web.StreamResponse:
        headers = {"Allow": "GET, HEAD"}
        raise DistributionError("UNSUPPORTED", message=self._refusal, headers=headers)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Expire idle uploads and old leases while running, and end all of them on exit."""
        # A store that cannot be written is served without records
        with contextlib.suppress(AImageError):
            await run_locking(self._records.begin)
        try:
            async with writing_index(self._layout), run_in_background(self._expire()):
                yield
        finally:
            if self._cache is not None:
                await self._cache.close()
            await self._uploads.close()
            self._leases.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self._uploads.expiry / 10)
            await self._uploads.expire()
            # The old leases are released at the next try
            with contextlib.suppress(StoreBusyError):
                await run_locking(self._leases.rotate)


def _refuse_cross_site(handler: Handler) -> Handler:
    """Return a handler that refuses requests of other sites: pages could fill the cache."""

    async def check_and_handle(request: web.Request) -> web.StreamResponse:
        check_site(request)
        return await handler(request)

    return check_and_handle


def build_read_routes(layout: ImageLayout, leases: ServedLeases, base: str = "") -> list[Route]:
    """Return the read-only routes for names below ``base``, for other nodes.

    The caller rotates (``rotate``) and closes ``leases``.
    """
    catalog = Catalog(layout, base)
    blobs = ServedBlobs(layout, catalog, leases, shares_all=True)
    names, manifests = CatalogRoutes(catalog, None), ManifestRoutes(layout, catalog, blobs, None)
    return [
        Route("GET", "/v2/", names.get_version, NODE),
        Route("GET", _NAME + "/tags/list", names.list_tags, NODE),
        Route("GET", _NAME + "/blobs/{digest}", BlobRoutes(blobs, None).get, NODE),
        Route("GET", _NAME + "/manifests/{reference}", manifests.get, NODE),
    ]


def serve(
    layout: ImageLayout,
    address: str,
    *,
    readonly: bool = False,
    allow_remote: bool = False,
    tokens: Mapping[str, str] | None = None,
    upload_quota: int = 0,
    upstream: UpstreamRegistry | None = None,
    metrics_address: str | None = None,
    processes: int = 1,
    on_ready: Callable[[str], object],
) -> None:
    """Serve ``layout`` on ``address`` (host:port) until SIGINT or SIGTERM.

    Clients must send one of ``tokens`` if there are any; their scopes are read, write or admin.
    Unfinished uploads have at most ``upload_quota`` bytes together (0: any). With an ``upstream``
    the server is a cache of it.
    The metrics are also served at ``metrics_address``, without a token. With more than one of
    ``processes``, PROMETHEUS_MULTIPROC_DIR must name a directory for their metrics.
    ``on_ready`` is called with the URL once connections are accepted; port 0 selects a free port.
    Raises UsageError: the address is malformed, or public without a token; AccessError.
    """
    if not Endpoint.parse_listen(address).is_loopback and not allow_remote and not tokens:
        access = "read" if readonly or upstream is not None else "read and write"
        raise UsageError(
            f"{address} is reachable from other machines without authentication: "
            f"any client can {access} the whole store",
            hint="listen on 127.0.0.1, or require a token",
            remedy="listen_without_tokens",
        )
    with contextlib.ExitStack() as stack:
        listeners = stack.enter_context(contextlib.closing(listen(address, has_tokens=True)))
        separate = None
        if metrics_address:
            separate = stack.enter_context(contextlib.closing(listen_tcp_only(metrics_address)))

        def work(report: Callable[[], object], member: Member | None = None) -> None:
            role = RegistryRole(
                layout,
                readonly=readonly,
                upload_quota=upload_quota,
                upstream=upstream,
                several=member is not None,
            )
            metrics = separate and MetricsRole(role.metrics.format_text)
            serve_roles(
                listeners,
                role,
                separate=(separate, metrics) if separate and metrics else None,
                tokens=tokens,
                interface=OCI,
                on_ready=lambda _: report(),
                member=member,
                # A body is stored as it was sent: content codings are not decoded
                auto_decompress=False,
                # Bytes of a broken upload are still written
                handler_cancellation=False,
                read_bufsize=READ_BUFFER,
                # Applied twice: before and after requests are cancelled
                shutdown_timeout=GRACE / 2,
            )

        url = listeners.urls[0]
        if processes > 1:
            group = ProcessGroup(processes, lambda member: work(member.report_ready, member))
            group.run(lambda: on_ready(url))
        else:
            work(lambda: on_ready(url))
