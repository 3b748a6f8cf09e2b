"""A loaded model in the worker: a child process. Both exchange frames."""

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
from clowder_aimage.engine.admission import (
    GUILTY,
    INNOCENT,
    SUSPECT,
    DiedError,
    EngineLimits,
)
from clowder_aimage.engine.event import (
    ComputedEvent,
    Event,
    ImageEvent,
    ModelRequest,
    PreviewEvent,
    StartedEvent,
)
from clowder_aimage.engine.request_text import RequestTexts
from clowder_aimage.errors import AImageError, ModelError, NoMemoryError, StuckError
from clowder_aimage.generation.encoding import PictureEncoding
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.batch_table import BatchTable
from clowder_aimage.model.pipeline import Step
from clowder_aimage.model.text.language_model import (
    ContextError,
    DrawnTokens,
    EmbeddingRequest,
    Embeddings,
    TextDelta,
    TextEnd,
    TextNotice,
    TextRequest,
    Token,
    ToolCall,
)
from clowder_aimage.oci import Descriptor

# Seconds for a process to end before it is killed
GRACE = 2.0
_COMMAND = (sys.executable, "-m", "clowder_aimage.engine.process")
_EVENTS: dict[str, type[Event]] = {"started": StartedEvent, "step": Step}
_EVENTS |= {"computed": ComputedEvent}
_EVENTS |= {"preview": PreviewEvent, "image": ImageEvent}
_EVENTS |= {"piece": TextDelta, "call": ToolCall, "end": TextEnd, "notice": TextNotice}
_log = logging.getLogger("aimage.worker")


_Reply = tuple[frame.Message, bytes]


class Runner:
    """A process with one model. It serves ``parallel`` requests at once.

    ``cancellations`` are the tasks that wait for the process to end a cancelled request. Lines of
    the process's standard error are logged.
    """

    def __init__(self, process: asyncio.subprocess.Process, cancel_timeout: float) -> None:
        self._process, self._cancel_timeout = process, cancel_timeout
        # Requests that only try a schema
        self._trials: set[int] = set()
        # Requests of which only pictures are still encoded
        self._computed: set[int] = set()
        # By the number of the request; None: of the load. After the process has ended, None
        self._replies: dict[int | None, asyncio.Queue[_Reply | None]] = {None: asyncio.Queue()}
        # The reason, after an invalid frame
        self._fault = ""
        # Requests that the process has begun to prepare, and the last one, if it has not yet begun
        self._opened: set[int] = set()
        self._opening: int | None = None
        # At most one request was open when the process ended
        self._is_alone = True
        # It was killed because it did not end a cancelled request
        self._is_hung = False
        self._numbers = itertools.count(1)
        self._texts = RequestTexts()
        self._logging = asyncio.create_task(log_lines(process, self._texts.occur_in))
        self.ended = asyncio.create_task(process.wait())
        self._receiving = asyncio.create_task(self._receive_all())
        self.cancellations: set[asyncio.Task[None]] = set()
        self.device = self.dtype = ""
        # Bytes; tokens of a language model
        self.size = self.context = 0
        # Bytes of the memory of a GPU; 0 if unknown
        self.total = 0
        # The GPU has memory of its own, and ``size`` is that of it
        self.is_discrete = False
        self.parallel = 1
        # Of pictures
        self.batches = BatchTable()

    @classmethod
    async def start(
        cls,
        roots: Sequence[Path],
        reference: str,
        manifest: Descriptor,
        limits: EngineLimits,
        arrival: frame.Message | None = None,
        reserved: int = 0,
    ) -> Runner:
        """Start a process and load an AImage of the store, complete or arriving.

        ``reserved`` bytes of the memory are left to other models.

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
            content = {"roots": [str(root) for root in roots], "manifest": manifest.to_json()}
            options = limits.load_options(reference)
            command = {"do": "load", "reference": reference, "reserved": reserved}
            runner.send(command | content | options | (arrival or {}))
            message = await runner._await_loaded(limits.load_timeout)
            if message["is"] == "error":
                raise parse_error(message)
        except BaseException:
            await runner.end(0.0)
            raise
        runner._set_loaded(message, reference)
        return runner

    def _set_loaded(self, message: frame.Message, reference: str) -> None:
        self.device, self.dtype = message["device"], message["dtype"]
        self.size, self.context = message["bytes"], message.get("context", 0)
        self._set_batches(message)
        self.total = message.get("total", 0)
        self.is_discrete = message.get("discrete", False)
        _log.debug("memory", extra={"model": reference, "plan": message["memory"]})

    def _set_batches(self, message: frame.Message) -> None:
        self.batches = BatchTable.parse(message.get("batches", []))
        self.parallel = message.get("parallel", self.batches.largest)

    async def sleep(self, room: int) -> bool:
        """Let the model leave its device; ``room`` bytes of the machine may have copies.

        The process keeps what takes longest to load, but for the weights: its libraries. Returns
        False if it did not answer in time, or failed.
        """
        self.send({"do": "sleep", "room": room})
        with contextlib.suppress(TimeoutError, ModelError):
            async with asyncio.timeout(self._cancel_timeout):
                message, _ = await self.receive()
                self.size = message.get("bytes", self.size)
                return bool(message["is"] == "asleep")
        return False

    async def wake_up(self, reference: str, limits: EngineLimits, reserved: int) -> None:
        """Load the model again, after ``sleep``. Raises as ``start``: the process has ended."""
        try:
            self.send({"do": "wake", "reserved": reserved})
            message = await self._await_loaded(limits.load_timeout)
            if message["is"] == "error":
                raise parse_error(message)
        except BaseException:
            await self.end(0.0)
            raise
        self._set_loaded(message, reference)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def is_free(self) -> bool:
        """Return True if a request would be accepted now."""
        return self.is_alive and self._count_served() < self.parallel

    def _count_served(self) -> int:
        return len(self._replies) - 1 - len(self._trials) - len(self._computed)

    @property
    def is_on_gpu(self) -> bool:
        """Return True if the model computes on a GPU."""
        device = self.device.lower()
        return bool(self.total) or any(word in device for word in ("gpu", "metal"))

    @property
    def is_encoding(self) -> bool:
        """Return True while pictures of requests that were computed are encoded."""
        return bool(self._computed)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def generate(
        self,
        reference: str,
        manifest: Descriptor,
        request: ModelRequest,
        encoding: PictureEncoding,
        on_event: Callable[[Event], None],
    ) -> None:
        """Serve a request; ``on_event`` is called with steps, pictures, or tokens of a text.

        ``manifest`` is that of the AImage, which may be another one of the same base.

        On cancellation, the process ends the request after the current step, and this returns at
        once. The next request waits until the process is free, or until it was killed because a
        request did not end in time.

        Raises AImageError reported by the process; ModelError if the process died.
        """
        while self.cancellations and not self.is_free:
            await asyncio.wait(self.cancellations, return_when=asyncio.FIRST_COMPLETED)
        command = _build_command(request, encoding, manifest)
        await self._ask(next(self._numbers), reference, command, on_event)

    async def try_schema(self, reference: str, request: TextRequest) -> None:
        """Try the schema of a request while others are served. Raises as ``generate``."""
        number, command = next(self._numbers), {"do": "try", "request": request.to_json()}
        self._trials.add(number)
        await self._ask(number, reference, command, lambda _: None)

    async def _ask(
        self,
        number: int,
        reference: str,
        command: frame.Message,
        on_event: Callable[[Event], None],
    ) -> None:
        """Send a request, and pass its events on up to its end."""
        is_done = False
        self._replies[number] = asyncio.Queue()
        self._texts.add(command["request"])
        self.send({"id": number, "reference": reference, **command})
        try:
            while True:
                message, data = await self.receive(number)
                if (event := _parse_event(message, data)) is not None:
                    on_event(event)
                    continue
                is_done = True
                if message["is"] == "error":
                    raise parse_error(message)
                # This side did not cancel it: the process is exiting
                if message["cancelled"]:
                    raise self._make_error(number)
                self.size = message["bytes"]
                return
        finally:
            if not is_done and self.is_alive:
                cancellation = asyncio.create_task(self._cancel(number))
                self.cancellations.add(cancellation)
                cancellation.add_done_callback(self.cancellations.discard)
            else:
                self._forget(number)

    async def stop(self) -> None:
        """End the process, so that all of its memory is free."""
        await self.end(GRACE)
        if self.cancellations:
            await asyncio.wait(self.cancellations)

    def reserve(self, size: int) -> None:
        """Leave ``size`` bytes of the memory to other models, from the next request on."""
        self.send({"do": "reserve", "reserved": size})

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
            raise self._make_error(number)
        if (reply := await replies.get()) is None:
            raise self._make_error(number)
        return reply

    async def _receive_all(self) -> None:
        """Pass each frame to its request until the process has ended."""
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            while (reply := await frame.receive(self._process.stdout)) is not None:
                if self._track(reply[0]):
                    continue
                if (replies := self._replies.get(reply[0].get("id"))) is not None:
                    replies.put_nowait(reply)
        except ValueError as error:
            self._fault = f"the model process sent an invalid frame: {error}"
            self._kill()
        await asyncio.wait({self.ended})
        self._is_alone = self._count_served() <= 1
        for replies in self._replies.values():
            replies.put_nowait(None)

    def _track(self, message: frame.Message) -> bool:
        """Note which request the process prepares; return True if the frame says that only.

        Also note that a request was computed, and a measured table of batches.
        """
        if message["is"] == "batches":
            self._set_batches(message)
            return True
        if message["is"] == "computed" and message["id"] in self._replies:
            self._computed.add(message["id"])
        is_opening = bool(message["is"] == "opening")
        if is_opening:
            self._opening = message["id"]
            self._opened.add(message["id"])
        elif message.get("id") == self._opening and message.get("kind") != StuckError.__name__:
            self._opening = None
        return is_opening

    async def end(self, grace: float) -> None:
        """End the process within ``grace`` seconds, or kill it.

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

    async def _await_loaded(self, timeout: float) -> frame.Message:
        """Return the message that ends a load.

        The process reports its memory: the load has stalled if that does not change.
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
                # This worker did not send SIGKILL: the system is out of memory
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
                self._is_hung = self.is_alive
                await self.end(0.0)
        self._forget(number)

    def _forget(self, number: int) -> None:
        del self._replies[number]
        self._trials.discard(number)
        self._computed.discard(number)
        self._opened.discard(number)

    def _make_error(self, number: int | None) -> ModelError:
        """Return the error of a request; for None that of the load, which may succeed elsewhere."""
        message, hint = self._fault or self._describe_exit(), "the next request restarts it"
        if number is None:
            return ModelError(message, hint=hint)
        error = DiedError(message, hint=hint)
        error.part = self._judge(number)
        return error

    def _judge(self, number: int) -> str:
        """Return the part of a request in the end of the process."""
        if self._opening is not None:
            return GUILTY if number == self._opening else INNOCENT
        if number not in self._opened:
            return INNOCENT
        return GUILTY if self._is_hung or self._is_alone else SUSPECT

    def _describe_exit(self) -> str:
        if self._is_hung:
            return (
                "the model process did not end a cancelled request within "
                f"{self._cancel_timeout:g} seconds, and was killed"
            )
        reason, signal = "exited", -(self._process.returncode or 0)
        # The advice is in the message, as hints are not sent with a 5xx response
        if signal > 0:
            reason = f"was killed by signal {signal}, possibly for lack of memory; "
            advice = "a smaller context or fewer requests at once"
            reason += f"try {advice if self.context else 'a smaller picture'}"
        return f"the model process {reason}"


def _build_command(
    request: ModelRequest, encoding: PictureEncoding, manifest: Descriptor
) -> frame.Message:
    if isinstance(request, GenerateRequest):
        command = {"do": "generate", "request": request.to_json(), "manifest": manifest.to_json()}
        return {**command, "encoding": asdict(encoding)}
    if isinstance(request, EmbeddingRequest):
        return {"do": "embed", "request": asdict(request)}
    return {"do": "write", "request": request.to_json()}


def _parse_event(message: frame.Message, data: bytes) -> Event | None:
    """Return the event of a frame; None for the end of a request."""
    if message["is"] == "vectors":
        names = ("count", "tokens", "cut", "limit")
        return Embeddings.unpack(data, *(message[name] for name in names))
    if (kind := _EVENTS.get(message["is"])) is None:
        return None
    fields = {key: value for key, value in message.items() if key not in ("is", "id")}
    if data:
        fields["data"] = data
    if kind is TextDelta:
        fields["tokens"] = tuple(map(Token.from_json, fields.get("tokens", ())))
    if "drawn" in fields:
        fields["drawn"] = DrawnTokens.from_json(fields["drawn"])
    return kind(**fields)


def parse_error(message: frame.Message) -> AImageError:
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


async def log_lines(
    process: asyncio.subprocess.Process, is_confidential: Callable[[str], bool] = lambda _: False
) -> None:
    """Log the lines that a process writes to standard error; of a confidential one only that."""
    assert process.stderr is not None  # noqa: S101 - it is a pipe
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:
            # The line exceeds the limit and is dropped
            continue
        if not line:
            return
        if text := line.decode("utf-8", "replace").strip():
            text = "(a line with a text of a request)" if is_confidential(text) else text
            _log.warning("model process %d: %s", process.pid, text)
