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


def until(condition: Callable[[], T | None], what: str = "the condition") -> T:
    """Poll until ``condition()`` is true, and return its value; fail if it never is."""
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} never came true; last value: {value!r}"
        time.sleep(0.01)
    return value


async def until_async(condition: Callable[[], object], what: str = "the condition") -> Any:
    """Poll like ``until`` in an event loop; ``condition`` may be a coroutine function."""
    end = time.monotonic() + PATIENCE
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < end, f"{what} never came true; last value: {value!r}"
        await asyncio.sleep(0.01)
