"""A pull-through cache: missing content is fetched from the upstream and stored.

A tag is resolved at the upstream each time; if that does not respond, the stored manifest is
served. Content with a digest is fetched once. Methods run in the event loop, blocking calls in
threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.distribution.blob_fetch import CachedFetch
from clowder_aimage.distribution.catalog import Catalog
from clowder_aimage.distribution.error import DistributionError, build_manifest_error
from clowder_aimage.distribution.pending_manifest import PendingManifests
from clowder_aimage.distribution.served_blobs import MEDIA_TYPE, ServedBlobs
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.errors import (
    AImageError,
    NoSpaceError,
    NotFoundError,
    PolicyError,
    StoreError,
    UnauthorizedError,
)
from clowder_aimage.http.background import run_in_daemon_thread
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Reference

if TYPE_CHECKING:
    from clowder_aimage.distribution.upstream import UpstreamRegistry
    from clowder_aimage.registry import Repository

# Blobs fetched at a time
CONCURRENCY = 16
# Running or queued fetches
MAX_FETCHES = 256
# Other requests to the upstream, each with a thread
MAX_REQUESTS = 128
# Seconds in which fetches save received bytes
CLOSE_TIMEOUT = 2.0

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class PullThroughCache:
    """A layout as a cache of ``upstream``; ``catalog`` has the names below the upstream's."""

    def __init__(
        self, layout: ImageLayout, catalog: Catalog, blobs: ServedBlobs, upstream: UpstreamRegistry
    ) -> None:
        self._layout, self._catalog = layout, catalog
        self._blobs, self._upstream = blobs, upstream
        self._pending = PendingManifests(layout, catalog, blobs)
        self._resolving: dict[Reference, asyncio.Task[tuple[Descriptor, bytes]]] = {}
        self._fetches: dict[Digest, CachedFetch] = {}
        self._fetch_slots = asyncio.Semaphore(CONCURRENCY)
        self._upstream_requests = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def fetch_manifest(self, reference: Reference) -> tuple[Descriptor, bytes]:
        """Return a manifest and its bytes. Concurrent requests for it are merged.

        Raises MANIFEST_UNKNOWN; DENIED or UNKNOWN (502) if it is not stored.
        """
        task = self._resolving.get(reference)
        if task is None:
            task = asyncio.create_task(self._request(lambda: self._fetch_manifest(reference)))
            self._resolving[reference] = task
            task.add_done_callback(lambda _: self._resolving.pop(reference))
            # asyncio logs exceptions that nothing retrieves, as after all clients disconnect
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _request(self, call: Callable[[], _T]) -> _T:
        """Return ``call()``, a request to the upstream. Raises TOOMANYREQUESTS beyond MAX_REQUESTS.

        If the client disconnects, the thread continues, and is counted until it ends.
        """
        if self._upstream_requests >= MAX_REQUESTS:
            raise DistributionError("TOOMANYREQUESTS", headers={"Retry-After": "10"})
        self._upstream_requests += 1

        def decrement(_: object) -> None:
            self._upstream_requests -= 1

        request = asyncio.ensure_future(run_in_daemon_thread(call))
        request.add_done_callback(decrement)
        request.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(request)

    def _fetch_manifest(self, reference: Reference) -> tuple[Descriptor, bytes]:
        stored = self._read_stored(reference) if reference.digest else None
        if stored is not None:
            return stored
        try:
            descriptor, raw = self._upstream.fetch_manifest(reference)
        except NotFoundError:
            raise build_manifest_error(reference) from None
        except PolicyError as error:
            # An older manifest of the tag is not what the client asks for.
            raise self._convert_error(error) from None
        except AImageError as error:
            stored = self._read_stored(reference)
            if stored is None:
                raise self._convert_error(error) from error
            _log.warning("serving the stored %s: %s", self._catalog.qualify(reference), error)
            return stored
        cataloged = self._catalog.find(reference)
        if cataloged is None or cataloged.digest != descriptor.digest:
            self._layout.push(descriptor, build_bytes_body(raw))
            self._pending.add(reference, descriptor, raw)
        return descriptor, raw

    def _read_stored(self, reference: Reference) -> tuple[Descriptor, bytes] | None:
        descriptor = self._catalog.find(reference) or self._pending.find(reference)
        if descriptor is None:
            return None
        try:
            raw = self._catalog.read(descriptor)
            self._layout.use(descriptor)
            return descriptor, raw
        except AImageError as error:
            # Damaged or removed: the upstream has it
            _log.warning("cannot read %s: %s", descriptor, error)
            return None

    async def get_size(self, repository: str, digest: Digest) -> int:
        """Return the size of a blob, stored or not. Raises BLOB_UNKNOWN, DENIED, UNKNOWN (502)."""
        try:
            return await run_io(self._blobs.read_size, repository, digest)
        except DistributionError:
            return await self._fetch_size(repository, digest)

    async def fetch_blob(self, repository: str, digest: Digest) -> CachedFetch | None:
        """Return the fetch of a blob, None if it is stored. Raises as ``size``; TOOMANYREQUESTS.

        Raises DENIED, also for one that is being fetched: the policy does not accept it.
        """
        await run_io(self._blobs.admit, repository, digest)
        fetch = self._fetches.get(digest)
        if fetch is None and await run_locking(self._has, repository, digest):
            return None
        if fetch is None:
            size = self._pending.find_size(digest)
            if size is None:
                size = await self._fetch_size(repository, digest)
            # Another request may have started it while the size was awaited
            fetch = self._fetches.get(digest) or self._start(repository, digest, size)
        try:
            await fetch.wait(0)
        except AImageError as error:
            raise self._convert_blob_error(error, digest) from error
        return fetch

    def _has(self, repository: str, digest: Digest) -> bool:
        """Return True if a blob is stored, and tag the manifests that it completes."""
        is_stored = self._blobs.has(repository, digest)
        if is_stored and self._pending.find_size(digest) is not None:
            self._pending.tag_completed(digest)
        return is_stored

    def _start(self, repository: str, digest: Digest, size: int) -> CachedFetch:
        if len(self._fetches) >= MAX_FETCHES:
            raise DistributionError("TOOMANYREQUESTS", headers={"Retry-After": "10"})
        fetch = self._fetches[digest] = CachedFetch(
            self._layout, Descriptor(MEDIA_TYPE, digest, size)
        )
        task = asyncio.create_task(self._run(repository, fetch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return fetch

    async def _run(self, repository: str, fetch: CachedFetch) -> None:
        """Fetch a blob as soon as fewer than CONCURRENCY others are being fetched."""

        def run_fetch() -> None:
            try:
                with self._upstream.open_source(repository) as source:
                    fetch.run(source, self._pending.tag_completed)
            except AImageError as error:
                # No connection to the upstream
                fetch.end(error)

        try:
            async with self._fetch_slots:
                await run_in_daemon_thread(run_fetch)
        finally:
            del self._fetches[fetch.content.digest]

    async def list_tags(self, repository: str) -> list[str] | None:
        """Return the tags at the upstream, None if it does not respond. Raises NAME_UNKNOWN."""
        return await self._list(repository, lambda upstream: upstream.list_tag_names())

    async def list_referrers(self, repository: str, subject: Digest) -> list[Descriptor] | None:
        """Return the referrers of a manifest at the upstream, None if it does not respond."""
        return await self._list(repository, lambda upstream: upstream.list_referrers(subject))

    async def _list(
        self, repository: str, call: Callable[[Repository], list[_T]]
    ) -> list[_T] | None:
        try:
            return await self._request(lambda: self._upstream.call(repository, call))
        except NotFoundError:
            raise DistributionError("NAME_UNKNOWN") from None
        except DistributionError:
            raise
        except AImageError as error:
            _log.warning("listing stored content: %s", error)
            return None

    async def _fetch_size(self, repository: str, digest: Digest) -> int:
        try:
            return await self._request(
                lambda: self._upstream.call(
                    repository, lambda upstream: upstream.fetch_size(digest)
                )
            )
        except AImageError as error:
            raise self._convert_blob_error(error, digest) from error

    def _convert_blob_error(self, error: AImageError, digest: Digest) -> AImageError:
        if isinstance(error, NotFoundError):
            return DistributionError("BLOB_UNKNOWN", {"digest": str(digest)})
        return self._convert_error(error)

    def _convert_error(self, error: AImageError) -> AImageError:
        """Return the error for a client. Messages of the upstream are only logged."""
        if isinstance(error, DistributionError):
            return error
        host = self._upstream.host
        if isinstance(error, PolicyError):
            return DistributionError("DENIED", message=error.message)
        if isinstance(error, UnauthorizedError):
            return DistributionError("DENIED", message=f"{host} denied access to this cache")
        if isinstance(error, NoSpaceError | StoreError):
            return error
        return DistributionError("UNKNOWN", message=f"{host} is unavailable", status=502)

    async def close(self) -> None:
        """Stop the fetches. Received bytes of large blobs are kept."""
        for fetch in self._fetches.values():
            fetch.stopped = True
        self._upstream.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT)
