"""The index of a large store, which a process that runs long writes in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from clowder_aimage.engine.executor import run_locking
from clowder_aimage.errors import AImageError, StoreBusyError
from clowder_aimage.http.background import run_in_background
from clowder_aimage.layout import ImageLayout

# Seconds between two looks, and after an error
_INTERVAL, _PAUSE = 1.0, 60.0
_log = logging.getLogger("aimage.store")


@contextlib.asynccontextmanager
async def writing_index(layout: ImageLayout) -> AsyncIterator[None]:
    """Write index.json when that is due, instead of with changes of names, and on exit."""
    layout.defers_index = True
    try:
        async with run_in_background(_write_regularly(layout)):
            yield
    finally:
        layout.defers_index = False
        await _write(layout, is_due=False)


async def _write_regularly(layout: ImageLayout) -> None:
    while True:
        await asyncio.sleep(_INTERVAL)
        if not await _write(layout, is_due=True):
            await asyncio.sleep(_PAUSE)


async def _write(layout: ImageLayout, *, is_due: bool) -> bool:
    """Write the index, and return True unless an error is logged: the names are durable."""
    try:
        await run_locking(layout.write_pending, is_due=is_due)
    except StoreBusyError:
        # Another process may be writing it
        pass
    except AImageError as error:
        _log.warning(f"index.json is not written, other tools lack new names: {error.message}")
        return False
    return True
