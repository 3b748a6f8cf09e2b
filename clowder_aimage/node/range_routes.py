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

from clowder_aimage.content.gate import find_gate
from clowder_aimage.distribution.blob_response import begin_response, send_body
from clowder_aimage.distribution.catalog import Catalog
from clowder_aimage.distribution.error import DistributionError
from clowder_aimage.distribution.repository_name import read_digest, read_repository
from clowder_aimage.distribution.role import build_read_routes
from clowder_aimage.distribution.served_blobs import MEDIA_TYPE, ServedLeases
from clowder_aimage.engine.executor import run_io
from clowder_aimage.errors import AImageError, NetworkError, NotFoundError, UsageError
from clowder_aimage.http.route import NODE, Handler, Route
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.range_cache import RangeArrival, RangeFile
from clowder_aimage.node.range_reader import RangeExchange
from clowder_aimage.node.range_source import RANGE, BlobRange
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry.peer import BUSY, NODE_HEADER, NODE_ID, STORED, PeerRange

# Whose routes are cached.
MAX_REGISTRIES = 16
MAX_REQUESTS = 64  # processed concurrently
# Seconds that a request waits for an upload slot.
TURN_TIMEOUT = 2.0
# Seconds that a request waits for a range in flight.
COMING_TIMEOUT = 8.0
# Seconds for one range.
_SEND_TIMEOUT = 300.0
# Seconds for one block: a stalled client occupies an upload slot.
_STALL_TIMEOUT = 10.0
# Nodes remembered for a range, and listed in one redirect.
MAX_HOLDERS, MAX_NAMED = 16, 4
# Ranges whose holders are remembered.
_MAX_RANGES = 8192
_BLOCK = 1024 * 1024
# Seconds without a byte of a range that arrives.
_MAX_STALL = 40.0
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
        self._catalogs = functools.lru_cache(MAX_REGISTRIES)(functools.partial(Catalog, store))

    def build_routes(self) -> list[Route]:
        return [Route("GET", path, self._answer(path), NODE) for path in self._handlers("")]

    def _new_handlers(self, host: str) -> dict[str, Handler]:
        """Return the handlers for the names of a registry, or for local names if it is empty."""
        return {
            route.path: route.handler for route in build_read_routes(self._store, self.leases, host)
        }

    def _answer(self, path: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            host = _parse_namespace(request)
            if host and path.endswith("/blobs/{digest}"):
                digest = read_digest(request)
                reference = Reference(host, read_repository(request), None, digest)
                await run_io(self._check_policy, reference, digest)
                if (response := await self._ranges.answer(request, reference, digest)) is not None:
                    return response
            response = await self._handlers(host)[path](request)
            if path == "/v2/":
                response.headers[NODE_HEADER] = self._node
            return response

        return answer

    def _check_policy(self, reference: Reference, digest: Digest) -> None:
        """Raise DENIED for a blob, stored or not, of no manifest that the policy has accepted."""
        gate = find_gate()
        if gate is None or gate.has_admitted(digest):
            return
        self._catalogs(reference.registry or "").admit(reference.repository, digest)
        if not gate.has_admitted(digest):
            raise DistributionError("DENIED", {"digest": str(digest)})


def _parse_namespace(request: web.Request) -> str:
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
    """A request of the node ``requester``; with ``is_stored``, the range is not fetched for it."""

    peer_range: PeerRange
    requester: str
    is_stored: bool

    @classmethod
    def parse(
        cls, request: web.Request, reference: Reference, digest: Digest
    ) -> RangeRequest | None:
        """Parse a request; return None unless a node requests bytes of one range."""
        requester = request.headers.get(NODE_HEADER, "")
        match = _RANGE.fullmatch(request.headers.get("Range", ""))
        size = _SIZE.fullmatch(request.query.get("size", ""))
        if match is None or size is None or not NODE_ID.fullmatch(requester):
            return None
        start, end = int(match[1]), int(match[2]) + 1
        content = Descriptor(MEDIA_TYPE, digest, int(size[0]))
        if not start < end <= content.size or start // RANGE != (end - 1) // RANGE:
            return None
        is_stored = STORED in request.headers.get("Cache-Control", "")
        return cls(PeerRange(reference, content, start, end), requester, is_stored)

    @property
    def blob_range(self) -> BlobRange:
        return BlobRange.at(self.peer_range.content, self.peer_range.start)

    @property
    def offset(self) -> int:
        """The offset of the first byte in its range."""
        return self.peer_range.start % RANGE


class RangeRoutes:
    """The ranges of ``exchange`` for other nodes.

    ``has_repository(reference)`` returns True if this node fetches from a repository with its own
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
        range_request = RangeRequest.parse(request, reference, digest)
        if range_request is None:
            return None
        if request.method == "HEAD":
            if not await run_io(self._cache.has, range_request.blob_range, range_request.offset):
                raise _build_unknown_error(range_request)
            return web.Response()
        has_others = bool(self._sample_holders(range_request)) or self._waiting >= MAX_REQUESTS // 2
        if self._inside >= MAX_REQUESTS or (self._slots.locked() and has_others):
            raise self._build_busy_error(range_request)
        self._inside += 1
        try:
            with await self._find(range_request) as file:
                return await self._send_in_turn(request, range_request, file)
        finally:
            self._inside -= 1

    async def _find(self, range_request: RangeRequest) -> RangeFile:
        """Return a range that is local, arrives, or begins to be fetched."""
        try:
            file = await self._find_local(range_request)
            if file is None and range_request.is_stored:
                raise _build_unknown_error(range_request)
            if file is None:
                file = await self._fetch(range_request)
        except TimeoutError:
            raise self._build_busy_error(range_request, is_coming=True) from None
        if file is None:
            raise self._build_busy_error(range_request)
        return file

    async def _send_in_turn(
        self, request: web.Request, range_request: RangeRequest, file: RangeFile
    ) -> web.StreamResponse:
        self._waiting += 1
        try:
            async with asyncio.timeout(TURN_TIMEOUT):
                await self._slots.acquire()
        except TimeoutError:
            raise self._build_busy_error(range_request) from None
        finally:
            self._waiting -= 1
        try:
            return await self._send(request, range_request, file)
        finally:
            self._slots.release()

    async def _find_local(self, range_request: RangeRequest) -> RangeFile | None:
        """Return a local or arriving range. Raises TimeoutError if its first byte is late."""
        # A failed pull does not fail the peer.
        with contextlib.suppress(AImageError):
            return await self._await_arrival(
                range_request, self._cache.find_arrival(range_request.blob_range)
            )
        return None

    async def _await_arrival(
        self, range_request: RangeRequest, arrival: RangeArrival | None
    ) -> RangeFile | None:
        """Return a range once its first requested byte is here.

        Raises TimeoutError, AImageError.
        """
        if arrival is not None:
            try:
                async with asyncio.timeout(COMING_TIMEOUT):
                    await arrival.wait(range_request.offset)
            except TimeoutError:
                if time.monotonic() - arrival.moved > _MAX_STALL:
                    raise NetworkError(
                        f"no data received for {range_request.blob_range.digest}"
                    ) from None
                raise
        return await run_io(self._cache.find, range_request.blob_range)

    async def _fetch(self, range_request: RangeRequest) -> RangeFile | None:
        """Return a range that is fetched for a node. Raises TimeoutError if it is late."""
        peer_range, holders = range_request.peer_range, tuple(self._sample_holders(range_request))
        if not await run_io(self._has_repository, peer_range.reference):
            raise self._refuse_fetch(range_request)
        arrival = self._exchange.fetch(peer_range.reference, range_request.blob_range, holders)
        if arrival is None:
            raise TimeoutError
        try:
            return await self._await_arrival(range_request, arrival)
        except NotFoundError:
            raise _build_unknown_error(range_request) from None
        except AImageError as error:
            message = "cannot fetch the blob from the registry"
            raise DistributionError("UNKNOWN", message=message, status=502) from error

    async def _send(
        self, request: web.Request, range_request: RangeRequest, file: RangeFile
    ) -> web.StreamResponse:
        peer_range = range_request.peer_range
        count = peer_range.end - peer_range.start
        response = await begin_response(
            request,
            peer_range.content.digest,
            peer_range.content.size,
            (peer_range.start, peer_range.end),
        )
        # It can send what it has received.
        self._note(range_request)
        offset, origin = file.offset + range_request.offset, file.offset
        try:
            async with asyncio.timeout(_SEND_TIMEOUT):
                await send_body(
                    request, file, offset, offset + count, file.arrival,
                    origin=origin, chunk_size=_BLOCK, timeout=_STALL_TIMEOUT,
                )  # fmt: skip
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return response
        except ConnectionError:
            # The client has disconnected, or the range has failed.
            return response
        self._exchange.on_traffic("sent", count)
        return response

    def _note(self, range_request: RangeRequest) -> None:
        """Record that a node has a range or fetches it."""
        holders = self._holders.setdefault(range_request.blob_range, deque(maxlen=MAX_HOLDERS))
        if range_request.requester not in holders:
            holders.append(range_request.requester)
        self._holders.move_to_end(range_request.blob_range)
        while len(self._holders) > _MAX_RANGES:
            self._holders.popitem(last=False)

    def _sample_holders(self, range_request: RangeRequest) -> list[str]:
        """Return the live nodes that have a range."""
        holders = self._holders.get(range_request.blob_range)
        if not holders:
            return []
        usable = self._peers.select_usable()
        live = [node for node in holders if node in usable and node != range_request.requester]
        return random.sample(live, min(MAX_NAMED, len(live)))

    def _refuse_fetch(self, range_request: RangeRequest) -> DistributionError:
        """Return a redirect to the node that fetches a range; BLOB_UNKNOWN for the first one."""
        if self._sample_holders(range_request):
            return self._build_busy_error(range_request)
        self._note(range_request)
        return _build_unknown_error(range_request)

    def _build_busy_error(
        self, range_request: RangeRequest, *, is_coming: bool = False
    ) -> DistributionError:
        """Return TOOMANYREQUESTS, as a redirect if there are nodes that have the range."""
        nodes, usable = self._sample_holders(range_request), self._peers.select_usable()
        if nodes and nodes[0] in usable:
            location = f"{usable[nodes[0]].url}{range_request.peer_range.path}"
            headers = {"Location": location, NODE_HEADER: ",".join(nodes)}
            return DistributionError("TOOMANYREQUESTS", status=307, headers=headers)
        headers = {"Retry-After": "1"} if is_coming else {}
        return DistributionError("TOOMANYREQUESTS", status=BUSY, headers=headers)


def _build_unknown_error(range_request: RangeRequest) -> DistributionError:
    return DistributionError(
        "BLOB_UNKNOWN", {"digest": str(range_request.peer_range.content.digest)}
    )
