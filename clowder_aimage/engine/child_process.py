"""A child process that speaks in frames: what a runner knows of its model's process."""

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
    """A process of a model. Whoever waits for a frame may stop waiting at any time: nothing is
    lost, the frame is there for the next who asks. What the process writes to standard error is
    written to our log, line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._coming: asyncio.Task[tuple[frame.Message, bytes] | None] | None = None
        self._saying = asyncio.create_task(_repeat(process))
        self.ended = asyncio.create_task(process.wait())

    @classmethod
    async def spawn(cls) -> ChildProcess:
        """Start one. Raises ModelError."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # an interrupt at the terminal is the worker's to hear
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
        """The signal that killed it; 0 for none."""
        return max(0, -(self._process.returncode or 0))

    def send(self, message: frame.Message) -> None:
        """Send a frame. A process that has ended is not told: whoever asks it for a frame hears
        that it has, and how."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(frame.encode(message))

    async def receive(self) -> tuple[frame.Message, bytes]:
        """The next frame. Raises ModelError: the process has ended, or speaks in no frames."""
        assert self._process.stdout is not None
        if self._coming is None:
            self._coming = asyncio.create_task(frame.receive(self._process.stdout))
        await asyncio.wait({self._coming})
        coming, self._coming = self._coming, None
        try:
            found = coming.result()
        except ValueError as error:
            await self.end(0.0)
            raise ModelError(f"the model's process said what cannot be read: {error}") from None
        if found is None:
            await asyncio.wait({self.ended})
            raise self.died()
        return found

    def died(self) -> ModelError:
        """That it has ended, and how."""
        how = "ended"
        if self.signal:  # what to do is in the message: a 5xx tells no hint
            how = f"was killed by signal {self.signal}: it may have lacked memory; "
            how += "ask for a smaller picture"
        return ModelError(f"the model's process {how}", hint="the next request starts it again")

    async def end(self, grace: float) -> None:
        """Have it end within ``grace`` seconds, or be killed; all of its memory is free then. It is
        killed at once where this is cancelled."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            if grace > 0:
                await asyncio.wait({self.ended}, timeout=grace)
        finally:
            if self.is_alive:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        await asyncio.wait({self.ended, self._saying})


async def _repeat(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:  # a line beyond all measure, which is dropped
            continue
        if not line:
            return
        if said := line.decode("utf-8", "replace").strip():
            _log.warning("a model's process (%d): %s", process.pid, said)
