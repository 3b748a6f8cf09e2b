"""Waiting for what other threads and processes do, without an assertion on how long it takes."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# Seconds after which a test fails; many times what a busy machine needs
PATIENCE = 120.0
# Seconds between looks: the first, and the longest. A look is often a request, which takes time of
# the processor that others wait for.
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.1


def until(condition: Callable[[], T | None], what: str = "the condition") -> T:
    """Poll until ``condition()`` is true, and return its value; fail if it never is."""
    end, pause = time.monotonic() + PATIENCE, FIRST_PAUSE
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} never came true; last value: {value!r}"
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)
    return value


async def until_async(condition: Callable[[], object], what: str = "the condition") -> Any:
    """Poll like ``until`` in an event loop; ``condition`` may be a coroutine function."""
    end, pause = time.monotonic() + PATIENCE, FIRST_PAUSE
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < end, f"{what} never came true; last value: {value!r}"
        await asyncio.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)
