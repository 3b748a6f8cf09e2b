"""A loaded model as the worker sees it: a process to speak with, and to end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clowder_aimage import errors
from clowder_aimage.errors import AImageError, ModelError
from clowder_aimage.worker import frame
from clowder_aimage.worker.event import Begun, Event, Picture, Preview, Progress

GRACE = 2.0  # seconds that a process gets to end in, before it is killed
_MODULE = "clowder_aimage.worker.process"


class Runner:
    """One process with one model. Requests are served one at a time, as they come."""

    def __init__(self, process: asyncio.subprocess.Process, loaded: Mapping[str, Any]) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self.device: str = loaded["device"]
        self.dtype: str = loaded["dtype"]
        self.size: int = loaded["bytes"]

    @classmethod
    async def start(
        cls, roots: Sequence[Path], reference: str, *, dtype: str | None = None
    ) -> Runner:
        """Start a process and load the AImage ``reference``, which is complete in the store.

        Raises:
            AImageError: what the process could not do, as it said it.
            ModelError: it died.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # an interrupt at the terminal is the worker's to hear
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        command = {
            "do": "load",
            "roots": [str(root) for root in roots],
            "reference": reference,
            "dtype": dtype,
        }
        try:
            _send(process, command)
            message, _ = await _receive(process)
        except BaseException:
            await _end(process, 0.0)
            raise
        if message["is"] == "error":
            await _end(process, 0.0)
            raise _error(message)
        return cls(process, message)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def generate(
        self, reference: str, prompt: str, wishes: Mapping[str, Any], encoding: Mapping[str, Any]
    ) -> AsyncGenerator[Event, None]:
        """Steps and pictures as they come. Closing the iterator cancels between two steps, and
        returns when the process is free again.

        Raises:
            AImageError: what the model could not do, as it said it.
            ModelError: the process died.
        """
        number = next(self._numbers)
        command = {"do": "generate", "id": number, "reference": reference, "prompt": prompt}
        is_done = False
        _send(self._process, {**command, "wishes": dict(wishes), "encoding": dict(encoding)})
        try:
            while True:
                message, data = await _receive(self._process)
                if message["is"] in ("done", "error"):
                    is_done = True
                    if message["is"] == "error":
                        raise _error(message)
                    if message["cancelled"]:  # and not by us: it is about to end
                        raise _died(self._process)
                    return
                yield _event(message, data)
        finally:
            if not is_done and self.is_alive:
                await asyncio.shield(self._cancel(number))

    async def _cancel(self, number: int) -> None:
        """Have the process drop a request, and read what it had still to say of it."""
        with contextlib.suppress(ModelError):
            _send(self._process, {"do": "cancel", "id": number})
            while (await _receive(self._process))[0]["is"] not in ("done", "error"):
                pass

    async def stop(self) -> None:
        """End the process; all of its memory is free then."""
        await _end(self._process, GRACE)


def _send(process: asyncio.subprocess.Process, message: frame.Message) -> None:
    assert process.stdin is not None  # noqa: S101 - it is a pipe
    if process.stdin.is_closing() or process.returncode is not None:
        raise _died(process)
    process.stdin.write(frame.encode(message))


async def _receive(process: asyncio.subprocess.Process) -> tuple[frame.Message, bytes]:
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    found = await frame.receive(process.stdout)
    if found is None:
        await process.wait()
        raise _died(process)
    return found


def _died(process: asyncio.subprocess.Process) -> ModelError:
    code = process.returncode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else "ended"
    return ModelError(
        f"the model's process {how}",
        hint="it may have run out of memory; the next request starts it again",
    )


async def _end(process: asyncio.subprocess.Process, grace: float) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(grace):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _event(message: frame.Message, data: bytes) -> Event:
    if message["is"] == "begun":
        return Begun()
    if message["is"] == "step":
        return Progress(message["index"], message["total"], message["picture"])
    if message["is"] == "preview":
        return Preview(data, message["number"], message["picture"])
    return Picture(data, message["seed"], message["picture"], message["width"], message["height"])


def _error(message: frame.Message) -> AImageError:
    """What the process raised, of the same kind."""
    kind = getattr(errors, message["kind"], ModelError)
    if not (isinstance(kind, type) and issubclass(kind, AImageError)):
        kind = ModelError
    error: AImageError = kind(message["message"], hint=message["hint"])
    return error
