"""Bytes of a file to a client, by the kernel (sendfile)."""

from __future__ import annotations

import asyncio
from typing import BinaryIO

from aiohttp import web

from clowder_aimage.distribution.blob_fetch import CachedFetch

PIECE = 4 * 1024 * 1024  # bytes that must be taken in time
PATIENCE = 300.0  # seconds for one piece: a slower client holds a file and a connection for ever


async def send(
    request: web.Request,
    file: BinaryIO,
    offset: int,
    count: int,
    *,
    piece: int = PIECE,
    patience: float = PATIENCE,
) -> None:
    """Send ``count`` bytes of ``file``, each ``piece`` within ``patience`` seconds. The head is
    out: a failure closes the connection.

    Raises:
        ConnectionError: the client is gone, or takes nothing, or the file is too short.
    """
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    loop = asyncio.get_running_loop()
    try:
        while count:
            async with asyncio.timeout(patience):
                sent = await loop.sendfile(transport, file, offset, min(count, piece))
            if not sent:
                raise ConnectionResetError("the blob was cut short while it was sent")
            offset, count = offset + sent, count - sent
    except (OSError, RuntimeError) as error:  # RuntimeError: the transport is closing
        transport.abort()
        raise ConnectionResetError(str(error)) from error


async def send_as_it_comes(
    request: web.Request, fetch: CachedFetch, file: BinaryIO, start: int, end: int
) -> None:
    """Send bytes [start, end) of what is being fetched; if that fails, the connection is cut.

    Raises:
        ConnectionError: as ``send``, or the rest does not come.
    """
    while start < end:
        try:
            front = min(end, await fetch.wait(start))
        except ConnectionError:
            if request.transport is not None:
                request.transport.abort()  # never an answer that looks complete
            raise
        await send(request, file, start, front - start)
        start = front
