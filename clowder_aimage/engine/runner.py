"""A loaded model as seen by the worker: a child process and its requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

from clowder_aimage import errors
from clowder_aimage.engine import frame
from clowder_aimage.engine.child_process import ChildProcess
from clowder_aimage.engine.event import Event, ImageEvent, PreviewEvent, StartedEvent
from clowder_aimage.errors import AImageError, ModelError
from clowder_aimage.model.pipeline import GenerateRequest, PictureEncoding, Step
from clowder_aimage.oci import Descriptor

GRACE = 2.0  # seconds in which a process may end before it is killed
LOAD_TIMEOUT = 300.0  # seconds without progress
CANCEL_TIMEOUT = 30.0  # seconds
_EVENTS: dict[str, type[Event]] = {
    "started": StartedEvent,
    "step": Step,
    "preview": PreviewEvent,
    "image": ImageEvent,
}


class NoMemoryError(ModelError):
    """The memory is not enough for a model or a picture."""


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """The memory of a model between requests.

    text_encoder: "keep", "release" to load it again for new prompts, "auto" for what fits. memory:
    bytes that ``models`` models share; None for the machine's.
    """

    text_encoder: str = "auto"
    memory: int | None = None
    models: int = 1


_DEFAULT_POLICY = MemoryPolicy()


class Runner:
    """One process with one model. Requests are served one at a time, in order.

    ``ending`` is the task in which the process ends a cancelled request.
    """

    def __init__(
        self,
        child: ChildProcess,
        loaded: Mapping[str, Any],
        *,
        cancel_timeout: float = CANCEL_TIMEOUT,
    ) -> None:
        self._child, self._cancel_timeout = child, cancel_timeout
        self._numbers = itertools.count(1)
        self.ended = child.ended
        self.ending: asyncio.Task[None] | None = None
        self.device: str = loaded["device"]
        self.dtype: str = loaded["dtype"]
        self.size: int = loaded["bytes"]

    @classmethod
    async def start(
        cls,
        roots: Sequence[Path],
        reference: str,
        manifest: Descriptor,
        *,
        dtype: str | None = None,
        policy: MemoryPolicy = _DEFAULT_POLICY,
        load_timeout: float = LOAD_TIMEOUT,
        cancel_timeout: float = CANCEL_TIMEOUT,
    ) -> Runner:
        """Start a process and load an AImage that the store has in full.

        If this is cancelled, the process is killed.

        Raises:
            AImageError: the error that the process reported.
            NoMemoryError: the memory is not enough.
            ModelError: the process died, or made no progress for ``load_timeout`` seconds.
        """
        child = await ChildProcess.spawn()
        try:
            child.send(
                {
                    "do": "load",
                    "roots": [str(root) for root in roots],
                    "reference": reference,
                    "manifest": manifest.to_json(),
                    "dtype": dtype,
                    "memory": asdict(policy),
                }
            )
            message = await _loaded(child, load_timeout)
            if message["is"] == "error":
                raise _error(message)
        except BaseException:
            await child.end(0.0)
            raise
        return cls(child, message, cancel_timeout=cancel_timeout)

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    @property
    def is_free(self) -> bool:
        """True if it would accept a request now."""
        return self.is_alive and (self.ending is None or self.ending.done())

    @property
    def pid(self) -> int:
        return self._child.pid

    async def generate(
        self,
        reference: str,
        request: GenerateRequest,
        encoding: PictureEncoding,
        on_event: Callable[[Event], None],
    ) -> None:
        """Make pictures; ``on_event`` is called with steps, previews and pictures.

        If this is cancelled, the process ends the request after the current step, and this returns
        at once: the next request waits until the process is free, or was killed because it did not
        end the request in time.

        Raises:
            AImageError: the error that the process reported.
            ModelError: the process died.
        """
        if self.ending is not None:
            await asyncio.wait({self.ending})
        number = next(self._numbers)
        is_done = False
        self._child.send(
            {
                "do": "generate",
                "id": number,
                "reference": reference,
                "request": asdict(request),
                "encoding": asdict(encoding),
            }
        )
        try:
            while True:
                message, data = await self._child.receive()
                if message["is"] in _EVENTS:
                    on_event(_event(message, data))
                    continue
                is_done = True
                if message["is"] == "error":
                    raise _error(message)
                if message["cancelled"]:  # though this request was not: the process is ending
                    raise self._child.died()
                return
        finally:
            if not is_done and self.is_alive:
                self.ending = asyncio.create_task(self._cancel(number))

    async def _cancel(self, number: int) -> None:
        """Cancel a request and read the rest of its frames; kill the process after a timeout."""
        with contextlib.suppress(ModelError):
            try:
                async with asyncio.timeout(self._cancel_timeout):
                    self._child.send({"do": "cancel", "id": number})
                    while (await self._child.receive())[0]["is"] not in ("done", "error"):
                        pass
            except TimeoutError:
                await self._child.end(0.0)

    async def stop(self) -> None:
        """End the process; all of its memory is free then."""
        await self._child.end(GRACE)
        if self.ending is not None:
            await asyncio.wait({self.ending})


async def _loaded(child: ChildProcess, timeout: float) -> frame.Message:
    """Return the message that ends a load.

    The process reports how much memory it has: a load whose size does not change has stalled.
    """
    loop, size = asyncio.get_running_loop(), None
    end = loop.time() + timeout
    while True:
        try:
            async with asyncio.timeout_at(end):
                message, _ = await child.receive()
        except TimeoutError:
            raise ModelError(
                f"the model did not load: no progress for {timeout:g} seconds",
                hint="see the worker's log, and whether the disk and the device work",
            ) from None
        except ModelError as error:
            if child.signal == SIGKILL:  # not sent by this worker: the system needs memory
                raise NoMemoryError(error.message, **error.advice) from None
            raise
        if message["is"] != "loading":
            return message
        if message["bytes"] != size:
            size, end = message["bytes"], loop.time() + timeout


def _event(message: frame.Message, data: bytes) -> Event:
    fields = {key: value for key, value in message.items() if key not in ("is", "id")}
    if data:
        fields["data"] = data
    return _EVENTS[message["is"]](**fields)


def _error(message: frame.Message) -> AImageError:
    """Return an error of the class that the process raised."""
    if message["kind"] == "MemoryError":
        return NoMemoryError(message["message"], hint=message["hint"])
    kind = getattr(errors, message["kind"], ModelError)
    if not (isinstance(kind, type) and issubclass(kind, AImageError)):
        kind = ModelError
    error: AImageError = kind(message["message"], hint=message["hint"])
    return error
