"""Pull through: what is not in the layout comes from the upstream, and stays.

A tag is asked of the upstream each time; what is stored is served when it does not answer. What a
digest names is fetched once. Blocking work runs in threads; the methods are those of the event
loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from clowder_aimage.content.store import bytes_body
from clowder_aimage.distribution.blob_fetch import CachedFetch
from clowder_aimage.distribution.catalog import Catalog
from clowder_aimage.distribution.distribution_error import DistributionError, manifest_unknown
from clowder_aimage.distribution.pending_manifest import PendingManifests
from clowder_aimage.distribution.served_blobs import MEDIA_TYPE, ServedBlobs
from clowder_aimage.distribution.served_lease import ServedLeases
from clowder_aimage.errors import (
    AImageError,
    NoSpaceError,
    NotFoundError,
    StoreError,
    UnauthorizedError,
)
from clowder_aimage.http.background import aside
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Reference

if TYPE_CHECKING:
    from clowder_aimage.distribution.upstream import UpstreamRegistry

AT_ONCE = 16  # blobs that are fetched at the same time
MOST = 256  # that may be asked for at the same time
CLOSE = 2.0  # seconds that fetches get to keep what they have

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class PullThroughCache:
    """The layout before ``upstream``. ``catalog`` knows the names below the upstream's."""

    def __init__(
        self,
        layout: ImageLayout,
        catalog: Catalog,
        shelf: ServedBlobs,
        kept: ServedLeases,
        upstream: UpstreamRegistry,
    ) -> None:
        self._layout = layout
        self._catalog = catalog
        self._shelf = shelf
        self._upstream = upstream
        self._waiting = PendingManifests(layout, catalog, kept)
        self._asking: dict[Reference, asyncio.Task[tuple[Descriptor, bytes]]] = {}
        self._fetches: dict[Digest, CachedFetch] = {}
        self._places = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    # -- manifests

    async def manifest(self, reference: Reference) -> tuple[Descriptor, bytes]:
        """A manifest and its bytes; all who ask at the same time ask once.

        Raises:
            ApiError: MANIFEST_UNKNOWN; DENIED or UNKNOWN (502), the upstream does not give it and
                it is not stored.
        """
        task = self._asking.get(reference)
        if task is None:
            task = asyncio.create_task(aside(lambda: self._manifest(reference)))
            self._asking[reference] = task
            task.add_done_callback(lambda done: self._answered(reference, done))
        return await asyncio.shield(task)

    def _answered(self, reference: Reference, task: asyncio.Task[tuple[Descriptor, bytes]]) -> None:
        del self._asking[reference]
        if not task.cancelled():
            task.exception()  # told, even where all who asked have left

    def _manifest(self, reference: Reference) -> tuple[Descriptor, bytes]:
        stored = self._stored(reference) if reference.digest else None
        if stored is not None:
            return stored
        try:
            descriptor, raw = self._upstream.manifest(reference)
        except NotFoundError:
            raise manifest_unknown(reference) from None
        except AImageError as error:
            stored = self._stored(reference)
            if stored is None:
                raise self._refusal(error) from error
            _log.warning("serving the stored %s: %s", self._catalog.stored(reference), error)
            return stored
        named = self._catalog.find(reference)
        if named is None or named.digest != descriptor.digest:
            self._layout.push(descriptor, bytes_body(raw))
            self._waiting.add(reference, descriptor, raw)
        return descriptor, raw

    def _stored(self, reference: Reference) -> tuple[Descriptor, bytes] | None:
        descriptor = self._catalog.find(reference) or self._waiting.find(reference)
        if descriptor is None:
            return None
        try:
            raw = self._catalog.read(descriptor)
            self._layout.use(descriptor)
            return descriptor, raw
        except AImageError as error:  # damaged, or gone: the upstream has it
            _log.warning("cannot read %s: %s", descriptor, error)
            return None

    # -- blobs

    async def size(self, repository: str, digest: Digest) -> int:
        """How many bytes a blob has, here or there.

        Raises:
            ApiError: BLOB_UNKNOWN; DENIED or UNKNOWN (502), the upstream does not say.
        """
        try:
            return await asyncio.to_thread(self._shelf.size, digest)
        except DistributionError:
            return await self._ask(lambda: self._upstream.size(repository, digest), digest)

    async def blob(self, repository: str, digest: Digest) -> CachedFetch | None:
        """The fetch of a blob that is not here; None where it is.

        Raises:
            ApiError: as ``size``; TOOMANYREQUESTS.
        """
        fetch = self._fetches.get(digest)
        if fetch is None and await asyncio.to_thread(self._has, digest):
            return None
        if fetch is None:
            size = self._waiting.size(digest)
            if size is None:
                size = await self._ask(lambda: self._upstream.size(repository, digest), digest)
            fetch = self._fetches.get(digest) or self._start(repository, digest, size)
        try:
            await fetch.begun()
        except AImageError as error:
            raise self._blob_error(error, digest) from error
        return fetch

    def _has(self, digest: Digest) -> bool:
        """Whether a blob is here; one that another process brought may complete a manifest."""
        here = self._shelf.has(digest)
        if here and self._waiting.size(digest) is not None:
            self._waiting.arrived(digest)
        return here

    def _start(self, repository: str, digest: Digest, size: int) -> CachedFetch:
        if len(self._fetches) >= MOST:
            raise DistributionError("TOOMANYREQUESTS", headers={"Retry-After": "10"})
        fetch = self._fetches[digest] = CachedFetch(
            self._layout, Descriptor(MEDIA_TYPE, digest, size)
        )
        task = asyncio.create_task(self._run(repository, fetch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return fetch

    async def _run(self, repository: str, fetch: CachedFetch) -> None:
        """Fetch it, when there is a place."""

        def work() -> None:
            try:
                with self._upstream.blob(repository, fetch.content) as source:
                    fetch.run(source, self._waiting.arrived)
            except AImageError as error:  # no connection could even be begun
                fetch.fail(error)

        try:
            async with self._places:
                await aside(work)
        finally:
            del self._fetches[fetch.content.digest]

    # -- lists

    async def tags(self, repository: str) -> list[str] | None:
        """The tags that the upstream has; None where those that are stored must do.

        Raises:
            ApiError: NAME_UNKNOWN, it has no such repository.
        """
        return await self._list(lambda: self._upstream.tags(repository))

    async def referrers(self, repository: str, subject: Digest) -> list[Descriptor] | None:
        """What the upstream says refers to a manifest; None where what is stored must do."""
        return await self._list(lambda: self._upstream.referrers(repository, subject))

    async def _list(self, call: Callable[[], list[_T]]) -> list[_T] | None:
        try:
            return await aside(call)
        except NotFoundError:
            raise DistributionError("NAME_UNKNOWN") from None
        except AImageError as error:
            _log.warning("listing what is stored: %s", error)
            return None

    # -- errors

    async def _ask(self, call: Callable[[], _T], digest: Digest) -> _T:
        try:
            return await aside(call)
        except AImageError as error:
            raise self._blob_error(error, digest) from error

    def _blob_error(self, error: AImageError, digest: Digest) -> AImageError:
        if isinstance(error, NotFoundError):
            return DistributionError("BLOB_UNKNOWN", {"digest": str(digest)})
        return self._refusal(error)

    def _refusal(self, error: AImageError) -> AImageError:
        """What a client is told: not what the upstream said to us, which is for the log."""
        host = self._upstream.host
        if isinstance(error, UnauthorizedError):
            return DistributionError("DENIED", message=f"{host} does not give it to this cache")
        if isinstance(error, NoSpaceError | StoreError):
            return error
        return DistributionError("UNKNOWN", message=f"{host} cannot be asked", status=502)

    async def close(self) -> None:
        """End the fetches; what has come of them is kept where it is worth it."""
        for fetch in self._fetches.values():
            fetch.stopped = True
        self._upstream.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE)
