"""Threads for calls that block, of separate executors: none of a kind waits for another kind.

A wait for a lock of a store ends after LOCK_TIMEOUT, and a queued call of a cancelled task is not
begun, so that no thread is blocked for long.
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from clowder_aimage.layout.lock import PATIENCE

# Seconds of waiting for a lock of a store
LOCK_TIMEOUT = 10.0
# Seconds of a probe in all
PROBE_TIMEOUT = 2.0
_IO, _LOCKING, _GENERATION, _PROBE = "io", "locking", "generation", "probe"
_DECODING = "decoding"
_THREADS = {_IO: 16, _LOCKING: 8, _GENERATION: 8, _PROBE: 2, _DECODING: 2}
_T = TypeVar("_T")
_P = ParamSpec("_P")
_Executors = dict[str, ThreadPoolExecutor]
_executors: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Executors] = (
    weakref.WeakKeyDictionary()
)


async def run_io(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return the result of a call that reads, computes, or writes without a lock."""
    return await _run(_IO, LOCK_TIMEOUT, partial(call, *args, **kwargs))


async def run_locking(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return the result of a call that may wait for a lock. Raises StoreBusyError."""
    return await _run(_LOCKING, LOCK_TIMEOUT, partial(call, *args, **kwargs))


async def run_generation(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return the result of a call that a generation needs."""
    return await _run(_GENERATION, LOCK_TIMEOUT, partial(call, *args, **kwargs))


async def run_decoding(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return the result of a call that decodes pictures of strangers. Raises as run_locking."""
    return await _run(_DECODING, LOCK_TIMEOUT, partial(call, *args, **kwargs))


async def run_probe(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return the result of a probe. Raises TimeoutError after PROBE_TIMEOUT."""
    async with asyncio.timeout(PROBE_TIMEOUT):
        return await _run(_PROBE, PROBE_TIMEOUT, partial(call, *args, **kwargs))


async def _run(kind: str, patience: float, call: Callable[[], _T]) -> _T:
    loop = asyncio.get_running_loop()
    executors = _executors.setdefault(loop, {})
    if kind not in executors:
        executors[kind] = ThreadPoolExecutor(_THREADS[kind], f"aimage-{kind}")
    context = contextvars.copy_context()
    # Threads of an executor are shared: the timeout is a variable of the call's context
    context.run(PATIENCE.set, patience)
    return await loop.run_in_executor(executors[kind], context.run, call)
