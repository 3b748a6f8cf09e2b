"""A loaded model in the worker: a child process with which it exchanges frames."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from signal import SIGKILL

from clowder_aimage import errors
from clowder_aimage.engine import frame
from clowder_aimage.engine.admission import EngineLimits
from clowder_aimage.engine.event import Event, ImageEvent, PreviewEvent, StartedEvent
from clowder_aimage.errors import AImageError, ModelError
from clowder_aimage.model.pipeline import GenerateRequest, PictureEncoding, Step
from clowder_aimage.oci import Descriptor

GRACE = 2.0  # seconds for a process to end before it is killed
_COMMAND = (sys.executable, "-m", "clowder_aimage.engine.process")
_LOAD_OPTIONS = ("dtype", "text_encoder", "memory", "models", "lora_dir")  # of EngineLimits
_EVENTS: dict[str, type[Event]] = {"started": StartedEvent, "step": Step}
_EVENTS |= {"preview": PreviewEvent, "image": ImageEvent}
_log = logging.getLogger("aimage.worker")


class NoMemoryError(ModelError):
    """The memory is insufficient for a model or a picture."""


class Runner:
    """A process with one model. Requests are served one at a time, in order.

    ``ending`` is the task that waits for the process to end a cancelled request. Lines that the
    process writes to standard error are logged.
    """

    def __init__(self, process: asyncio.subprocess.Process, cancel_timeout: float) -> None:
        self._process, self._cancel_timeout = process, cancel_timeout
        self._receiving: asyncio.Task[tuple[frame.Message, bytes] | None] | None = None
        self._numbers = itertools.count(1)
        self._logging = asyncio.create_task(_log_lines(process))
        self.ended = asyncio.create_task(process.wait())
        self.ending: asyncio.Task[None] | None = None
        self.device = self.dtype = ""
        self.size = 0  # bytes

    @classmethod
    async def start(
        cls,
        roots: Sequence[Path],
        reference: str,
        manifest: Descriptor,
        limits: EngineLimits,
        arrival: frame.Message | None = None,
    ) -> Runner:
        """Start a process and load an AImage from the store, where it is complete or arriving.

        Cancellation kills the process. Raises AImageError reported by the process; NoMemoryError;
        ModelError if the process does not start, dies, or makes no progress during the load.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *_COMMAND,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                start_new_session=True,  # a terminal interrupt goes to the worker only
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )
        except OSError as error:
            raise ModelError(
                f"cannot start the model process: {error.strerror or error}",
                hint="the limit of memory or of processes may be reached",
            ) from None
        runner = cls(process, limits.cancel_timeout)
        try:
            place = {"roots": [str(root) for root in roots], "manifest": manifest.to_json()}
            options = {name: getattr(limits, name) for name in _LOAD_OPTIONS}
            runner.send(
                {"do": "load", "reference": reference, **place, **options, **(arrival or {})}
            )
            message = await runner._loaded(limits.load_timeout)
            if message["is"] == "error":
                raise _error(message)
        except BaseException:
            await runner.end(0.0)
            raise
        runner.device, runner.dtype = message["device"], message["dtype"]
        runner.size = message["bytes"]
        _log.debug("memory", extra={"model": reference, "plan": message["memory"]})
        return runner

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def is_free(self) -> bool:
        """Return whether a request would be accepted now."""
        return self.is_alive and (self.ending is None or self.ending.done())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def generate(
        self,
        reference: str,
        request: GenerateRequest,
        encoding: PictureEncoding,
        on_event: Callable[[Event], None],
    ) -> None:
        """Generate pictures; ``on_event`` is called with steps, previews and pictures.

        On cancellation, the process ends the request after the current step, and this returns at
        once. The next request waits until the process is free, or until it was killed because the
        request did not end in time.

        Raises AImageError reported by the process; ModelError if the process died.
        """
        if self.ending is not None:
            await asyncio.wait({self.ending})
        number = next(self._numbers)
        is_done = False
        facts = {"request": asdict(request), "encoding": asdict(encoding)}
        self.send({"do": "generate", "id": number, "reference": reference, **facts})
        try:
            while True:
                message, data = await self.receive()
                if message["is"] in _EVENTS:
                    on_event(_event(message, data))
                    continue
                is_done = True
                if message["is"] == "error":
                    raise _error(message)
                if message["cancelled"]:  # without a cancellation here: the process is exiting
                    raise self._died()
                self.size = message["bytes"]
                return
        finally:
            if not is_done and self.is_alive:
                self.ending = asyncio.create_task(self._cancel(number))

    async def stop(self) -> None:
        """End the process, which frees all of its memory."""
        await self.end(GRACE)
        if self.ending is not None:
            await asyncio.wait({self.ending})

    def send(self, message: frame.Message) -> None:
        """Send a frame; if the process has exited, ``receive`` raises."""
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        if not self._process.stdin.is_closing():
            self._process.stdin.write(frame.encode(message))

    async def receive(self) -> tuple[frame.Message, bytes]:
        """Return the next frame; after a cancellation, the next call returns it.

        Raises ModelError if the process has exited or sent an invalid frame.
        """
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        if self._receiving is None:
            self._receiving = asyncio.create_task(frame.receive(self._process.stdout))
        await asyncio.wait({self._receiving})
        receiving, self._receiving = self._receiving, None
        try:
            found = receiving.result()
        except ValueError as error:
            await self.end(0.0)
            raise ModelError(f"the model process sent an invalid frame: {error}") from None
        if found is None:
            await asyncio.wait({self.ended})
            raise self._died()
        return found

    async def end(self, grace: float) -> None:
        """End the process within ``grace`` seconds or kill it, which frees its memory.

        On cancellation, the process is killed at once.
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

    async def _loaded(self, timeout: float) -> frame.Message:
        """Return the message that ends a load.

        The process reports its memory: a load during which it does not change has stalled.
        """
        loop, size = asyncio.get_running_loop(), None
        end = loop.time() + timeout
        while True:
            try:
                async with asyncio.timeout_at(end):
                    message, _ = await self.receive()
            except TimeoutError:
                raise ModelError(
                    f"loading the model made no progress for {timeout:g} seconds",
                    hint="check the worker's log, the disk and the device",
                ) from None
            except ModelError as error:
                # not sent by this worker: the system is out of memory
                if self._process.returncode == -SIGKILL:
                    raise NoMemoryError(error.message, **error.advice) from None
                raise
            if message["is"] != "loading":
                return message
            if message["bytes"] != size:
                size, end = message["bytes"], loop.time() + timeout

    async def _cancel(self, number: int) -> None:
        """Cancel a request and discard the rest of its frames; kill the process on a timeout."""
        with contextlib.suppress(ModelError):
            try:
                async with asyncio.timeout(self._cancel_timeout):
                    self.send({"do": "cancel", "id": number})
                    while (await self.receive())[0]["is"] not in ("done", "error"):
                        pass
            except TimeoutError:
                await self.end(0.0)

    def _died(self) -> ModelError:
        how, signal = "exited", -(self._process.returncode or 0)
        if signal > 0:  # the advice is in the message, as a 5xx response has no hint
            how = f"was killed by signal {signal}, possibly for lack of memory; "
            how += "try a smaller picture"
        return ModelError(f"the model process {how}", hint="the next request restarts it")


def _event(message: frame.Message, data: bytes) -> Event:
    fields = {key: value for key, value in message.items() if key not in ("is", "id")}
    if data:
        fields["data"] = data
    return _EVENTS[message["is"]](**fields)


def _error(message: frame.Message) -> AImageError:
    if message["kind"] == "MemoryError":
        return NoMemoryError(message["message"], hint=message["hint"])
    kind: type[AImageError] = getattr(errors, message["kind"], ModelError)
    error = kind(message["message"], hint=message["hint"])
    error.facts.update(message.get("facts", {}))
    return error


async def _log_lines(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None  # noqa: S101 - it is a pipe
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:  # the line exceeds the limit and is dropped
            continue
        if not line:
            return
        if text := line.decode("utf-8", "replace").strip():
            _log.warning("model process %d: %s", process.pid, text)
