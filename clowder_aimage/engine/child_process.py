"""A child process that communicates in frames."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys

from clowder_aimage.engine import frame
from clowder_aimage.errors import ModelError

_MODULE = "clowder_aimage.engine.process"
_log = logging.getLogger("aimage.worker")


class ChildProcess:
    """The process of a model.

    A cancelled ``receive`` loses nothing: the next one returns the frame. Lines that the process
    writes to standard error go to the log.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._receiving: asyncio.Task[tuple[frame.Message, bytes] | None] | None = None
        self._logging = asyncio.create_task(_log_lines(process))
        self.ended = asyncio.create_task(process.wait())

    @classmethod
    async def spawn(cls) -> ChildProcess:
        """Start a process. Raises ModelError."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # an interrupt at the terminal is for the worker alone
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )
        except OSError as error:
            raise ModelError(
                f"the model's process cannot be started: {error.strerror or error}",
                hint="the machine may be out of memory or of processes",
            ) from None
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def signal(self) -> int:
        """The signal that killed the process; 0 for none."""
        return max(0, -(self._process.returncode or 0))

    def send(self, message: frame.Message) -> None:
        """Send a frame; if the process has ended, ``receive`` raises."""
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        if not self._process.stdin.is_closing():
            self._process.stdin.write(frame.encode(message))

    async def receive(self) -> tuple[frame.Message, bytes]:
        """Return the next frame. Raises ModelError: the process has ended, or sent none."""
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        if self._receiving is None:
            self._receiving = asyncio.create_task(frame.receive(self._process.stdout))
        await asyncio.wait({self._receiving})
        receiving, self._receiving = self._receiving, None
        try:
            found = receiving.result()
        except ValueError as error:
            await self.end(0.0)
            raise ModelError(f"the model's process sent what is not a frame: {error}") from None
        if found is None:
            await asyncio.wait({self.ended})
            raise self.died()
        return found

    def died(self) -> ModelError:
        """Return the error of a process that has ended."""
        how = "ended"
        if self.signal:  # the advice is in the message: a 5xx has no hint
            how = f"was killed by signal {self.signal}: it may have lacked memory; "
            how += "ask for a smaller picture"
        return ModelError(f"the model's process {how}", hint="the next request starts it again")

    async def end(self, grace: float) -> None:
        """End the process within ``grace`` seconds, or kill it; its memory is free then.

        If this is cancelled, the process is killed at once.
        """
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            if grace > 0:
                await asyncio.wait({self.ended}, timeout=grace)
        finally:
            if self.is_alive:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        await asyncio.wait({self.ended, self._logging})


async def _log_lines(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None  # noqa: S101 - it is a pipe
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:  # a line above the limit, which is dropped
            continue
        if not line:
            return
        if text := line.decode("utf-8", "replace").strip():
            _log.warning("a model's process (%d): %s", process.pid, text)
