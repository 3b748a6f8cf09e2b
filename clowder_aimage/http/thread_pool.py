"""Work that waits for the network, off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


async def aside(call: Callable[[], _T]) -> _T:
    """``call()`` in a thread of its own.

    Those of the event loop's executor are few, and the process does not end before they do: an
    upstream that keeps silent must neither keep others from the disk nor the server from ending.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def answer(tell: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and who waited with it
            loop.call_soon_threadsafe(lambda: None if done.done() else tell())

    def work() -> None:
        try:
            result = call()
        except BaseException as error:
            failed = error  # which outlives the block
            answer(lambda: done.set_exception(failed))
        else:
            answer(lambda: done.set_result(result))

    threading.Thread(target=work, name="aimage-upstream", daemon=True).start()
    return await done
