"""The body of a request, from a client that may be slow on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from clowder_aimage.distribution.distribution_error import DistributionError

STALL = 60.0  # seconds to wait for the next byte, and over which the speed is judged
SLOWEST = 1024  # bytes per second that must come on average


async def pieces(request: web.Request) -> AsyncIterator[bytes]:
    """The body as it arrives, so that it need not be held.

    Raises:
        ApiError: 408, nothing comes any more, or hardly anything.
    """
    clock = asyncio.get_running_loop().time
    waited, count = 0.0, 0
    while True:
        began = clock()
        try:
            async with asyncio.timeout(STALL):
                piece = await request.content.readany()
        except TimeoutError:
            raise _too_slow(f"nothing has arrived for {STALL:.0f} seconds") from None
        if not piece:
            return
        waited += clock() - began  # for the client, not for our own disk
        count += len(piece)
        if waited > STALL:
            if count < SLOWEST * STALL:
                raise _too_slow(f"less than {SLOWEST} bytes per second arrive")
            waited, count = 0.0, 0
        yield piece


def _too_slow(message: str) -> DistributionError:
    return DistributionError("BLOB_UPLOAD_INVALID", message=message, status=408)
