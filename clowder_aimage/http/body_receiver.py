"""Bodies that are received into buffers of their reader.

aiohttp's parser copies each piece of a body, and the event loop allocates each piece first. A large
body is therefore taken from the socket itself.
"""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from clowder_aimage.http.body_stream import ClientPace

# Bytes. The connection ends after a body that the parser has not seen: for a smaller one, a new
# connection costs more than the copies.
DIRECT_SIZE = 4 * 1024 * 1024
# A key of requests: the bytes that the parser has not seen
DIRECT = "received_directly"


class BodyReceiver:
    """The body of a request. ``filled`` bytes of the last buffer are valid, also after an error.

    A large one that ``may_bypass`` the parser is taken from the socket, for which it has a further
    descriptor.
    """

    def __init__(self, request: web.Request, *, may_bypass: bool) -> None:
        self.filled = 0
        self.is_large = may_bypass and (request.content_length or 0) >= DIRECT_SIZE
        self._request, self._pace = request, ClientPace()
        self._is_begun = False
        # What did not fit into the last buffer
        self._rest = memoryview(b"")
        self._socket: socket.socket | None = None
        self._remaining = 0

    async def fill(self, buffer: memoryview) -> int:
        """Fill a buffer, and return the number of bytes; only the end of the body leaves space.

        Raises ApiError (408) if nothing arrives or it is too slow; ConnectionError.
        """
        self.filled = 0
        while self.filled < len(buffer):
            if self._rest:
                count = min(len(self._rest), len(buffer) - self.filled)
                buffer[self.filled : self.filled + count] = self._rest[:count]
                self._rest = self._rest[count:]
            elif self._socket is not None:
                count = await self._receive(buffer[self.filled :])
                if not count:
                    break
            else:
                await self._read()
                if not self._rest and self._socket is None:
                    break
                continue
            self.filled += count
        return self.filled

    async def _read(self) -> None:
        """Read what the parser has; of a large body, the rest is left to the socket."""
        content, transport = self._request.content, self._request.transport
        if self._is_begun or not self.is_large or transport is None:
            self._rest = memoryview(await self._pace.wait(content.readany()))
        else:
            # The parser may have more once some is read
            self._rest = memoryview(b"".join(iter(content.read_nowait, b"")))
            self._bypass(transport)
        self._is_begun = True
        self._pace.count(len(self._rest))

    def _bypass(self, transport: asyncio.Transport) -> None:
        """Take the rest of the body from the socket, unless the parser has all of it."""
        shared = transport.get_extra_info("socket")
        is_encrypted = transport.get_extra_info("sslcontext") is not None
        self._remaining = (self._request.content_length or 0) - self._request.content.total_bytes
        if self._remaining <= 0 or shared is None or is_encrypted:
            return
        transport.pause_reading()
        self._socket = shared.dup()
        self._request[DIRECT] = 0

    async def _receive(self, buffer: memoryview) -> int:
        assert self._socket is not None  # noqa: S101 - the caller tests it
        if not self._remaining:
            return 0
        loop = asyncio.get_running_loop()
        into = buffer[: self._remaining]
        count = await self._pace.wait(loop.sock_recv_into(self._socket, into))
        if not count:
            raise ConnectionResetError("the client disconnected")
        self._remaining -= count
        self._request[DIRECT] += count
        self._pace.count(count)
        return count

    def close(self) -> None:
        """Give the socket back to the connection, which ends after the response."""
        if self._socket is None:
            return
        self._socket.close()
        self._socket = None
        transport = self._request.transport
        if not self._remaining:
            self._request.content.feed_eof()
            # The parser would take a further request for a part of this body
            if transport is not None:
                transport.pause_reading()
        elif transport is not None:
            # The rest is read and dropped, so that the client reads the response
            transport.resume_reading()
