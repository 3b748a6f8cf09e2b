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
from clowder_aimage.engine.event import Event, ImageEvent, ModelRequest, PreviewEvent, StartedEvent
from clowder_aimage.errors import AImageError, ModelError, NoMemoryError
from clowder_aimage.generation.encoding import PictureEncoding
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.pipeline import Step
from clowder_aimage.model.text.language_model import (
    ContextError,
    DrawnTokens,
    EmbeddingRequest,
    Embeddings,
    TextEnd,
    TextPiece,
    Token,
    ToolCall,
)
from clowder_aimage.oci import Descriptor

GRACE = 2.0  # seconds for a process to end before it is killed
_COMMAND = (sys.executable, "-m", "clowder_aimage.engine.process")
_EVENTS: dict[str, type[Event]] = {"started": StartedEvent, "step": Step}
_EVENTS |= {"preview": PreviewEvent, "image": ImageEvent}
_EVENTS |= {"piece": TextPiece, "call": ToolCall, "end": TextEnd}
_log = logging.getLogger("aimage.worker")


class DiedError(ModelError):
    """The process of a model died; ``is_alone``: while it served one request only."""

    is_alone = True


_Reply = tuple[frame.Message, bytes]


class Runner:
    """A process with one model, which serves ``parallel`` requests at once.

    ``endings`` are the tasks that wait for the process to end a cancelled request. Lines that the
    process writes to standard error are logged.
    """

    def __init__(self, process: asyncio.subprocess.Process, cancel_timeout: float) -> None:
        self._process, self._cancel_timeout = process, cancel_timeout
        # By the number of the request; None: of the load. After the process has ended, None
        self._replies: dict[int | None, asyncio.Queue[_Reply | None]] = {None: asyncio.Queue()}
        self._fault = ""  # of an invalid frame
        self._is_alone = True  # at most one request was open when the process ended
        self._numbers = itertools.count(1)
        self._logging = asyncio.create_task(log_lines(process))
        self.ended = asyncio.create_task(process.wait())
        self._receiving = asyncio.create_task(self._receive_all())
        self.endings: set[asyncio.Task[None]] = set()
        self.device = self.dtype = ""
        self.size = self.context = 0  # bytes; tokens of a language model
        self.parallel = 1

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
            process = await start_process(_COMMAND)
        except OSError as error:
            raise ModelError(
                f"cannot start the model process: {error.strerror or error}",
                hint="the limit of memory or of processes may be reached",
            ) from None
        runner = cls(process, limits.cancel_timeout)
        try:
            place = {"roots": [str(root) for root in roots], "manifest": manifest.to_json()}
            options = limits.load_options(reference)
            runner.send(
                {"do": "load", "reference": reference, **place, **options, **(arrival or {})}
            )
            message = await runner._loaded(limits.load_timeout)
            if message["is"] == "error":
                raise error_of(message)
        except BaseException:
            await runner.end(0.0)
            raise
        runner.device, runner.dtype = message["device"], message["dtype"]
        runner.size, runner.context = message["bytes"], message.get("context", 0)
        runner.parallel = message.get("parallel", 1)
        _log.debug("memory", extra={"model": reference, "plan": message["memory"]})
        return runner

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def is_free(self) -> bool:
        """Return whether a request would be accepted now."""
        return self.is_alive and len(self._replies) - 1 < self.parallel

    @property
    def pid(self) -> int:
        return self._process.pid

    async def generate(
        self,
        reference: str,
        request: ModelRequest,
        encoding: PictureEncoding,
        on_event: Callable[[Event], None],
    ) -> None:
        """Serve a request; ``on_event`` is called with steps, pictures, or pieces of text.

        On cancellation, the process ends the request after the current step, and this returns at
        once. The next request waits until the process is free, or until it was killed because a
        request did not end in time.

        Raises AImageError reported by the process; ModelError if the process died.
        """
        while self.endings and not self.is_free:
            await asyncio.wait(self.endings, return_when=asyncio.FIRST_COMPLETED)
        number = next(self._numbers)
        is_done = False
        self._replies[number] = asyncio.Queue()
        self.send({"id": number, "reference": reference, **_command(request, encoding)})
        try:
            while True:
                message, data = await self.receive(number)
                if (event := _event(message, data)) is not None:
                    on_event(event)
                    continue
                is_done = True
                if message["is"] == "error":
                    raise error_of(message)
                if message["cancelled"]:  # without a cancellation here: the process is exiting
                    raise self._died()
                self.size = message["bytes"]
                return
        finally:
            if not is_done and self.is_alive:
                ending = asyncio.create_task(self._cancel(number))
                self.endings.add(ending)
                ending.add_done_callback(self.endings.discard)
            else:
                del self._replies[number]

    async def stop(self) -> None:
        """End the process, which frees all of its memory."""
        await self.end(GRACE)
        if self.endings:
            await asyncio.wait(self.endings)

    def send(self, message: frame.Message) -> None:
        """Send a frame; if the process has exited, ``receive`` raises."""
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        if not self._process.stdin.is_closing():
            self._process.stdin.write(frame.encode(message))

    async def receive(self, number: int | None = None) -> _Reply:
        """Return the next frame of a request, or of the load.

        Raises ModelError if the process has exited or sent an invalid frame.
        """
        replies = self._replies[number]
        if self._receiving.done() and replies.empty():
            raise self._died()
        if (found := await replies.get()) is None:
            raise self._died()
        return found

    async def _receive_all(self) -> None:
        """Pass each frame to its request until the process has ended."""
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            while (found := await frame.receive(self._process.stdout)) is not None:
                if (replies := self._replies.get(found[0].get("id"))) is not None:
                    replies.put_nowait(found)
        except ValueError as error:
            self._fault = f"the model process sent an invalid frame: {error}"
            self._kill()
        await asyncio.wait({self.ended})
        self._is_alone = len(self._replies) <= 2
        for replies in self._replies.values():
            replies.put_nowait(None)

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
            self._kill()
        await asyncio.wait({self.ended, self._logging, self._receiving})

    def _kill(self) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

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
                    while (await self.receive(number))[0]["is"] not in ("done", "error"):
                        pass
            except TimeoutError:
                await self.end(0.0)
        del self._replies[number]

    def _died(self) -> DiedError:
        error = DiedError(self._fault or self._death(), hint="the next request restarts it")
        error.is_alone = self._is_alone
        return error

    def _death(self) -> str:
        how, signal = "exited", -(self._process.returncode or 0)
        if signal > 0:  # the advice is in the message, as a 5xx response has no hint
            how = f"was killed by signal {signal}, possibly for lack of memory; "
            less = "a smaller context or fewer requests at once"
            how += f"try {less if self.context else 'a smaller picture'}"
        return f"the model process {how}"


def _command(request: ModelRequest, encoding: PictureEncoding) -> frame.Message:
    if isinstance(request, GenerateRequest):
        command = {"do": "generate", "request": request.to_json()}
        return {**command, "encoding": asdict(encoding)}
    do = "embed" if isinstance(request, EmbeddingRequest) else "write"
    return {"do": do, "request": asdict(request)}


def _event(message: frame.Message, data: bytes) -> Event | None:
    """Return the event of a frame; None for the end of a request."""
    if message["is"] == "vectors":
        return Embeddings.unpack(data, message["count"], message["tokens"])
    if (kind := _EVENTS.get(message["is"])) is None:
        return None
    fields = {key: value for key, value in message.items() if key not in ("is", "id")}
    if data:
        fields["data"] = data
    if kind is TextPiece:
        fields["tokens"] = tuple(map(Token.from_json, fields.get("tokens", ())))
    if "drawn" in fields:
        fields["drawn"] = DrawnTokens.from_json(fields["drawn"])
    return kind(**fields)


def error_of(message: frame.Message) -> AImageError:
    """Return the error that a process has reported."""
    facts = message.get("facts", {})
    if message["kind"] == "ContextError":
        return ContextError(int(facts["tokens"]), int(facts["context"]))
    kind: type[AImageError] = getattr(errors, message["kind"], ModelError)
    error = kind(message["message"], hint=message["hint"])
    error.facts.update(facts)
    return error


async def start_process(command: Sequence[str]) -> asyncio.subprocess.Process:
    """Start a child process of the worker, with pipes. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        # A terminal interrupt goes to the worker only
        start_new_session=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


async def log_lines(process: asyncio.subprocess.Process) -> None:
    """Log the lines that a process writes to standard error."""
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
