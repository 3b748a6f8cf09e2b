"""The store as a read-only registry, and ranges of blobs for other nodes.

A request of a node has its id (``Aimage-Node``), the registry (``ns``), and bytes of one range of
16 MiB (``Range``). A node without the range fetches it if it keeps content of that repository,
except for ``Cache-Control: only-if-cached`` (RFC 9111). A busy node redirects (307) to a node that
received the range from it, or responds 429, with ``Retry-After`` if the range is in flight. A node
without content of that repository lets the first requester fetch it and redirects all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import re
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from clowder_aimage.distribution.blob_response import begin_response, send_body
from clowder_aimage.distribution.error import DistributionError
from clowder_aimage.distribution.repository_name import digest_of, repository_of
from clowder_aimage.distribution.role import reading_routes
from clowder_aimage.distribution.served_blobs import MEDIA_TYPE, ServedLeases
from clowder_aimage.engine.executor import run_io
from clowder_aimage.errors import AImageError, NetworkError, NotFoundError, UsageError
from clowder_aimage.http.route import NODE, Handler, Route
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.range_cache import RangeArrival, RangeFile
from clowder_aimage.node.range_reader import RangeExchange
from clowder_aimage.node.range_source import RANGE, BlobRange
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry.peer import BUSY, NODE_HEADER, NODE_ID, STORED, BlobSpan

MAX_REGISTRIES = 16  # whose routes are cached
MAX_REQUESTS = 64  # processed concurrently
TURN_TIMEOUT = 2.0  # seconds that a request waits for an upload slot
COMING_TIMEOUT = 8.0  # seconds that a request waits for a range in flight
_SEND_TIMEOUT = 300.0  # seconds for one range
_STALL_TIMEOUT = 10.0  # seconds for one block: a stalled client occupies an upload slot
MAX_HOLDERS, MAX_NAMED = 16, 4  # nodes remembered for a range, and listed in one redirect
_MAX_RANGES = 8192  # ranges whose holders are remembered
_BLOCK = 1024 * 1024
_MAX_STALL = 40.0  # seconds without a byte of a range that arrives
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")
_SIZE = re.compile(r"[0-9]{1,18}")


class ReadOnlyRegistry:
    """The read-only routes of the distribution API (distribution-spec, "Pulling").

    ``?ns=HOST`` selects the registry, as in containerd's requests to a mirror ("Registry
    Configuration", hosts.toml). Other nodes can also read ``ranges`` of blobs; ``node`` is the id
    of this node. ``leases`` protect content temporarily after its digest was sent to a client.
    """

    def __init__(self, store: ImageLayout, node: str, ranges: RangeRoutes) -> None:
        self._store, self._node, self._ranges = store, node, ranges
        self.leases = ServedLeases(store, time.monotonic)
        self._handlers = functools.lru_cache(MAX_REGISTRIES)(self._new_handlers)

    def routes(self) -> list[Route]:
        return [Route("GET", path, self._answer(path), NODE) for path in self._handlers("")]

    def _new_handlers(self, host: str) -> dict[str, Handler]:
        """Return the handlers for the names of a registry, or for local names if it is empty."""
        return {one.path: one.handler for one in reading_routes(self._store, self.leases, host)}

    def _answer(self, path: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            host = _namespace(request)
            if host and path.endswith("/blobs/{digest}"):
                digest = digest_of(request)
                reference = Reference(host, repository_of(request), None, digest)
                if (found := await self._ranges.answer(request, reference, digest)) is not None:
                    return found
            found = await self._handlers(host)[path](request)
            if path == "/v2/":
                found.headers[NODE_HEADER] = self._node
            return found

        return answer


def _namespace(request: web.Request) -> str:
    host = request.query.get("ns", "")
    try:
        is_host = not host or Reference.parse(f"{host}/x:latest").registry == host
    except UsageError:
        is_host = False
    if not is_host:
        raise DistributionError("NAME_INVALID", {"ns": host[:300]})
    return host


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """A request of the node ``asker``; with ``is_stored``, the range is not fetched for it."""

    span: BlobSpan
    asker: str
    is_stored: bool

    @classmethod
    def parse(
        cls, request: web.Request, reference: Reference, digest: Digest
    ) -> RangeRequest | None:
        """Parse a request; return None unless a node requests bytes of one range."""
        asker = request.headers.get(NODE_HEADER, "")
        found = _RANGE.fullmatch(request.headers.get("Range", ""))
        size = _SIZE.fullmatch(request.query.get("size", ""))
        if found is None or size is None or not NODE_ID.fullmatch(asker):
            return None
        start, end = int(found[1]), int(found[2]) + 1
        content = Descriptor(MEDIA_TYPE, digest, int(size[0]))
        if not start < end <= content.size or start // RANGE != (end - 1) // RANGE:
            return None
        is_stored = STORED in request.headers.get("Cache-Control", "")
        return cls(BlobSpan(reference, content, start, end), asker, is_stored)

    @property
    def part(self) -> BlobRange:
        return BlobRange.at(self.span.content, self.span.start)

    @property
    def offset(self) -> int:
        """The offset of the first byte in its range."""
        return self.span.start % RANGE


class RangeRoutes:
    """The ranges of ``exchange`` for other nodes.

    ``has_repository(reference)`` returns whether this node fetches from a repository with its own
    credentials.
    """

    def __init__(
        self, exchange: RangeExchange, has_repository: Callable[[Reference], bool]
    ) -> None:
        self._exchange, self._cache = exchange, exchange.cache
        self._peers = exchange.owners.peers
        self._has_repository = has_repository
        self._slots = asyncio.Semaphore(self._peers.limits.uploads)
        self._waiting = self._inside = 0
        self._holders: OrderedDict[BlobRange, deque[str]] = OrderedDict()

    async def answer(
        self, request: web.Request, reference: Reference, digest: Digest
    ) -> web.StreamResponse | None:
        """Respond to a node's request for a range; return None for any other request.

        Raises DistributionError: BLOB_UNKNOWN, TOOMANYREQUESTS, UNKNOWN.
        """
        wanted = RangeRequest.parse(request, reference, digest)
        if wanted is None:
            return None
        if request.method == "HEAD":
            if not await run_io(self._cache.has, wanted.part, wanted.offset):
                raise _unknown(wanted)
            return web.Response()
        has_others = bool(self._known(wanted)) or self._waiting >= MAX_REQUESTS // 2
        if self._inside >= MAX_REQUESTS or (self._slots.locked() and has_others):
            raise self._busy(wanted)
        self._inside += 1
        try:
            with await self._find(wanted) as found:
                return await self._send_in_turn(request, wanted, found)
        finally:
            self._inside -= 1

    async def _find(self, wanted: RangeRequest) -> RangeFile:
        """Return a range that is here, arrives, or is fetched now."""
        try:
            found = await self._available(wanted)
            if found is None and wanted.is_stored:
                raise _unknown(wanted)
            if found is None:
                found = await self._fetched(wanted)
        except TimeoutError:
            raise self._busy(wanted, is_coming=True) from None
        if found is None:
            raise self._busy(wanted)
        return found

    async def _send_in_turn(
        self, request: web.Request, wanted: RangeRequest, found: RangeFile
    ) -> web.StreamResponse:
        self._waiting += 1
        try:
            async with asyncio.timeout(TURN_TIMEOUT):
                await self._slots.acquire()
        except TimeoutError:
            raise self._busy(wanted) from None
        finally:
            self._waiting -= 1
        try:
            return await self._send(request, wanted, found)
        finally:
            self._slots.release()

    async def _available(self, wanted: RangeRequest) -> RangeFile | None:
        """Return a range that is here or arrives. Raises TimeoutError if its first byte is late."""
        with contextlib.suppress(AImageError):  # a failed pull does not fail the peer
            return await self._arrived(wanted, self._cache.arrival(wanted.part))
        return None

    async def _arrived(
        self, wanted: RangeRequest, arrival: RangeArrival | None
    ) -> RangeFile | None:
        """Return a range once the first byte wanted is here. Raises TimeoutError, AImageError."""
        if arrival is not None:
            try:
                async with asyncio.timeout(COMING_TIMEOUT):
                    await arrival.wait(wanted.offset)
            except TimeoutError:
                if time.monotonic() - arrival.moved > _MAX_STALL:
                    raise NetworkError(f"no data received for {wanted.part.digest}") from None
                raise
        return await run_io(self._cache.find, wanted.part)

    async def _fetched(self, wanted: RangeRequest) -> RangeFile | None:
        """Return a range that is fetched for a node. Raises TimeoutError if it is late."""
        span, holders = wanted.span, tuple(self._known(wanted))
        if not await run_io(self._has_repository, span.reference):
            raise self._left_to_first(wanted)
        arrival = self._exchange.fetch(span.reference, wanted.part, holders)
        if arrival is None:
            raise TimeoutError
        try:
            return await self._arrived(wanted, arrival)
        except NotFoundError:
            raise _unknown(wanted) from None
        except AImageError as error:
            message = "cannot fetch the blob from the registry"
            raise DistributionError("UNKNOWN", message=message, status=502) from error

    async def _send(
        self, request: web.Request, wanted: RangeRequest, found: RangeFile
    ) -> web.StreamResponse:
        span = wanted.span
        count = span.end - span.start
        answer = await begin_response(
            request, span.content.digest, span.content.size, (span.start, span.end)
        )
        self._note(wanted)  # it can send what it has received
        at, origin = found.offset + wanted.offset, found.offset
        try:
            async with asyncio.timeout(_SEND_TIMEOUT):
                await send_body(
                    request, found, at, at + count, found.arrival,
                    origin=origin, chunk_size=_BLOCK, timeout=_STALL_TIMEOUT,
                )  # fmt: skip
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return answer
        except ConnectionError:
            return answer  # the client has disconnected, or the range has failed
        self._exchange.on_traffic("sent", count)
        return answer

    def _note(self, wanted: RangeRequest) -> None:
        """Record that a node has a range or fetches it."""
        found = self._holders.setdefault(wanted.part, deque(maxlen=MAX_HOLDERS))
        if wanted.asker not in found:
            found.append(wanted.asker)
        self._holders.move_to_end(wanted.part)
        while len(self._holders) > _MAX_RANGES:
            self._holders.popitem(last=False)

    def _known(self, wanted: RangeRequest) -> list[str]:
        """Return the live nodes that have a range."""
        found = self._holders.get(wanted.part)
        if not found:
            return []
        usable = self._peers.usable()
        known = [one for one in found if one in usable and one != wanted.asker]
        return random.sample(known, min(MAX_NAMED, len(known)))

    def _left_to_first(self, wanted: RangeRequest) -> DistributionError:
        """Return a redirect to the node that fetches a range; BLOB_UNKNOWN for the first one."""
        if self._known(wanted):
            return self._busy(wanted)
        self._note(wanted)
        return _unknown(wanted)

    def _busy(self, wanted: RangeRequest, *, is_coming: bool = False) -> DistributionError:
        """Return TOOMANYREQUESTS, as a redirect if there are nodes that have the range."""
        nodes, usable = self._known(wanted), self._peers.usable()
        if nodes and nodes[0] in usable:
            location = f"{usable[nodes[0]].url}{wanted.span.path}"
            headers = {"Location": location, NODE_HEADER: ",".join(nodes)}
            return DistributionError("TOOMANYREQUESTS", status=307, headers=headers)
        headers = {"Retry-After": "1"} if is_coming else {}
        return DistributionError("TOOMANYREQUESTS", status=BUSY, headers=headers)


def _unknown(wanted: RangeRequest) -> DistributionError:
    return DistributionError("BLOB_UNKNOWN", {"digest": str(wanted.span.content.digest)})
