"""A loaded model as the worker sees it: a process to speak with, and to end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

from clowder_aimage import errors
from clowder_aimage.engine import frame
from clowder_aimage.engine.child_process import ChildProcess
from clowder_aimage.engine.event import Event, ImageEvent, PreviewEvent, StartedEvent, StepEvent
from clowder_aimage.errors import AImageError, ModelError
from clowder_aimage.oci import Descriptor

GRACE = 2.0  # seconds that a process gets to end in, before it is killed
STALL = 300.0  # seconds that a load may stand still
PATIENCE = 30.0  # seconds that a process gets to end what was given up


class NoMemoryError(ModelError):
    """A model, or a picture, for which the memory did not do."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """What stays in memory between requests. ``text_encoder``: "keep", "release" for loading it
    again when a prompt is new, "auto" for what fits. ``memory``: bytes that ``models`` models share
    at most; None for what the machine has."""

    text_encoder: str = "auto"
    memory: int | None = None
    models: int = 1


_USUAL = KeepAlive()


class Runner:
    """One process with one model. Requests are served one at a time, as they come.

    ``ending`` is at work while the process ends what was given up.
    """

    def __init__(
        self, child: ChildProcess, loaded: Mapping[str, Any], *, patience: float = PATIENCE
    ) -> None:
        self._child, self._patience = child, patience
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
        keep: KeepAlive = _USUAL,
        stall: float = STALL,
        patience: float = PATIENCE,
    ) -> Runner:
        """Start a process and load the AImage ``reference``, whose ``manifest`` is known, and which
        is complete in the store. Where this is cancelled, the process is killed.

        Raises:
            AImageError: what the process could not do, as it said it.
            NoMemoryError: the memory did not do.
            ModelError: it died, or nothing moved for ``stall`` seconds.
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
                    "keep": asdict(keep),
                }
            )
            message = await _loaded(child, stall)
            if message["is"] == "error":
                raise _error(message)
        except BaseException:
            await child.end(0.0)
            raise
        return cls(child, message, patience=patience)

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    @property
    def is_free(self) -> bool:
        """Whether it would take a request now."""
        return self.is_alive and (self.ending is None or self.ending.done())

    @property
    def pid(self) -> int:
        return self._child.pid

    async def generate(
        self, reference: str, prompt: str, wishes: Mapping[str, Any], encoding: Mapping[str, Any]
    ) -> AsyncGenerator[Event, None]:
        """Steps and pictures as they come. Closing the iterator cancels between two steps, and
        returns at once: the next request waits until the process is free, or was killed because
        it did not get free.

        Raises:
            AImageError: what the model could not do, as it said it.
            ModelError: the process died.
        """
        if self.ending is not None:
            await asyncio.wait({self.ending})
        number = next(self._numbers)
        command = {"do": "generate", "id": number, "reference": reference, "prompt": prompt}
        is_done = False
        self._child.send({**command, "wishes": dict(wishes), "encoding": dict(encoding)})
        try:
            while True:
                message, data = await self._child.receive()
                if message["is"] in ("done", "error"):
                    is_done = True
                    if message["is"] == "error":
                        raise _error(message)
                    if message["cancelled"]:  # and not by us: it is about to end
                        raise self._child.died()
                    return
                yield _event(message, data)
        finally:
            if not is_done and self.is_alive:
                self.ending = asyncio.create_task(self._cancel(number))

    async def _cancel(self, number: int) -> None:
        """Have the process drop a request, and read what it had still to say of it. One that does
        not listen for long is killed: a step may take its time, one that hangs takes all of it."""
        with contextlib.suppress(ModelError):
            try:
                async with asyncio.timeout(self._patience):
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


async def _loaded(child: ChildProcess, stall: float) -> frame.Message:
    """What the process says when it has loaded. While it loads it tells how much it has in memory:
    what does not change for long stands still."""
    loop, known = asyncio.get_running_loop(), None
    end = loop.time() + stall
    while True:
        try:
            async with asyncio.timeout_at(end):
                message, _ = await child.receive()
        except TimeoutError:
            raise ModelError(
                f"the model did not load: nothing moved for {stall:g} seconds",
                hint="see the worker's log, and whether the disk and the device work",
            ) from None
        except ModelError as error:
            if child.signal == SIGKILL:  # and not by us: it is how a system gets memory back
                raise NoMemoryError(error.message, hint=error.hint) from None
            raise
        if message["is"] != "loading":
            return message
        if message["bytes"] != known:
            known, end = message["bytes"], loop.time() + stall


def _event(message: frame.Message, data: bytes) -> Event:
    if message["is"] == "begun":
        return StartedEvent()
    if message["is"] == "step":
        return StepEvent(message["index"], message["total"], message["picture"])
    if message["is"] == "preview":
        return PreviewEvent(data, message["number"], message["picture"])
    return ImageEvent(
        data, message["seed"], message["picture"], message["width"], message["height"]
    )


def _error(message: frame.Message) -> AImageError:
    """What the process raised, of the same kind."""
    if message["kind"] == "MemoryError":
        return NoMemoryError(message["message"], hint=message["hint"])
    kind = getattr(errors, message["kind"], ModelError)
    if not (isinstance(kind, type) and issubclass(kind, AImageError)):
        kind = ModelError
    error: AImageError = kind(message["message"], hint=message["hint"])
    return error
