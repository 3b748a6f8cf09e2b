"""ollama's ``/api/generate``, for models that make pictures.

The fields are those of ollama's image generation, which left it in July 2026 (ollama,
server/routes.go, ``handleImageGenerate``; docs/api.md): ``width``, ``height``, ``steps``, and the
``seed`` in ``options``; ``completed`` of ``total`` steps while it runs, ``image`` at the end. Our
own ``stop``, with an empty prompt, ends the model's work after the current step.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from aiohttp import web
from pydantic import BeforeValidator, Field

from clowder_aimage.api import model_list
from clowder_aimage.api.image_request import MAX_TEXT, check_pixels
from clowder_aimage.api.ndjson import NdjsonStream
from clowder_aimage.api.request_body import ModelBody, RequestBody, Whole, read_body
from clowder_aimage.api.service import Service
from clowder_aimage.api.sse import ticking
from clowder_aimage.engine.engine import Engine
from clowder_aimage.engine.event import Event, ImageEvent, PullingEvent, StartedEvent
from clowder_aimage.engine.limits import IF_MISSING, NEVER
from clowder_aimage.engine.settings import duration
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.route import ADMIN
from clowder_aimage.model.pipeline import GenerateRequest, PictureEncoding, Step
from clowder_aimage.oci import Descriptor, Reference

SILENCE = 10.0  # seconds after which it hears that the request lives
_NOTHING: dict[str, Any] = {}


def _keep_alive(value: object) -> float | None:
    """Return seconds: a number, or a duration as Go writes it. Below 0 is for ever."""
    try:
        return None if value == "" else duration(value)
    except ValueError:
        message = "must be a number of seconds, or a duration such as '5m' or '1h30m'"
        raise ValueError(message) from None


class _Options(RequestBody):
    width: Whole | None = None
    height: Whole | None = None
    steps: Whole | None = None
    seed: Whole | None = None


class _GenerateBody(ModelBody, _Options):
    prompt: str = Field("", max_length=MAX_TEXT)
    images: Any = None
    options: _Options = _Options()
    keep_alive: Annotated[float | None, BeforeValidator(_keep_alive)] = None
    stop: bool = False
    png_facts: bool | None = None

    def parameters(self) -> dict[str, int]:
        """Return sizes, steps and seed, of the request itself or of its ``options``.

        A size of 0, or a seed below 0, is none.
        """
        found = {}
        for name in ("width", "height", "steps", "seed"):
            own: int | None = getattr(self, name)
            value: int | None = getattr(self.options, name) if own is None else own
            if value is not None and (value >= 0 if name == "seed" else value != 0):
                found[name] = value
        width, height = found.get("width", 0), found.get("height", 0)
        if min(width, height) > 0:  # before a model is loaded for it
            check_pixels("width" if width >= height else "height", width, height)
        found.setdefault("seed", secrets.randbits(32))
        return found


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A request; ``name`` is the model as the client names it."""

    name: str
    reference: Reference
    prompt: str
    parameters: Mapping[str, int]
    keep_alive: float | None
    is_streaming: bool
    is_stop: bool = False
    pull: str = IF_MISSING
    facts: bool = True

    @classmethod
    def of(cls, service: Service, body: _GenerateBody) -> _Wanted:
        """Return the request in a body. Raises ApiError, UsageError."""
        reference = service.reference(body.reference)
        if body.images:
            raise ApiError(
                400, "no model here takes pictures", code="unsupported_value", param="images"
            )
        return cls(
            body.reference or str(reference),
            reference,
            body.prompt,
            body.parameters(),
            body.keep_alive,
            body.stream,
            body.stop,
            service.pull,
            service.facts if body.png_facts is None else body.png_facts,
        )

    def terms(self, request: web.Request) -> dict[str, Any]:
        """Return ``keep_alive`` and ``pull`` of the engine, which a token may not be allowed."""
        if request.get("scope") != ADMIN:
            return {"pull": NEVER}
        return {"keep_alive": self.keep_alive, "pull": self.pull}

    def generate(self, engine: Engine, request: web.Request) -> AsyncGenerator[Event, None]:
        """Yield the events of the engine. Raises as that."""
        return engine.generate(
            self.reference,
            lambda aimage: GenerateRequest.for_model(aimage, self.prompt, **self.parameters),
            encoding=PictureEncoding(has_facts=self.facts),
            **self.terms(request),
        )

    def line(self, *, done: bool = False, **more: Any) -> dict[str, Any]:
        """Return a line of the answer."""
        created = datetime.now(UTC).isoformat()
        return {"model": self.name, "created_at": created, "response": "", **more, "done": done}


def drawing(service: Service) -> Callable[[web.Request], Any]:
    """Return the handler."""

    async def handler(request: web.Request) -> web.StreamResponse:
        wanted = _Wanted.of(service, await read_body(request, _GenerateBody))
        request["model"] = str(wanted.reference)
        if wanted.prompt:
            return await _generate(service, request, wanted)
        if wanted.is_stop:
            if request.get("scope") != ADMIN:
                raise ApiError(403, "this token may not stop models", code="insufficient_scope")
            was_loaded = await service.engine.stop(wanted.reference)
            if not was_loaded and not await asyncio.to_thread(_found, service, wanted.reference):
                raise model_list.unknown(wanted.reference)
            return web.json_response(wanted.line(done=True, done_reason="unload"))
        if wanted.keep_alive == 0:
            if request.get("scope") != ADMIN:
                raise ApiError(403, "this token may not unload models", code="insufficient_scope")
            return await _unload(service, wanted)
        return await _load(service, request, wanted)

    return handler


async def _unload(service: Service, wanted: _Wanted) -> web.StreamResponse:
    """Unload a model after the last of its requests."""
    found = await asyncio.to_thread(_found, service, wanted.reference)
    digests = {found.digest} if found else set()
    loaded = service.engine.loaded()
    digests |= {one.digest for one in loaded if one.reference == wanted.reference}
    if not digests:
        raise model_list.unknown(wanted.reference)
    for digest in digests:
        await model_list.let_go(service, digest)
    return web.json_response(wanted.line(done=True, done_reason="unload"))


def _found(service: Service, reference: Reference) -> Descriptor | None:
    try:
        return service.store.resolve(reference)
    except NotFoundError:
        return None


async def _load(service: Service, request: web.Request, wanted: _Wanted) -> web.StreamResponse:
    """Load a model without making anything."""
    answer = NdjsonStream(request)
    try:
        async with contextlib.aclosing(
            ticking(service.engine.load(wanted.reference, **wanted.terms(request)), SILENCE)
        ) as events:
            async for event in events:
                if event is None and wanted.is_streaming:
                    await answer.write(wanted.line())
    except AImageError as error:
        return await answer.fail(error)
    last = wanted.line(done=True, done_reason="load")
    if not answer.has_begun:
        return web.json_response(last)
    await answer.write(last)
    return await answer.end()


async def _generate(service: Service, request: web.Request, wanted: _Wanted) -> web.StreamResponse:
    answer, begun, last = NdjsonStream(request), time.monotonic_ns(), _NOTHING
    events = wanted.generate(service.engine, request)
    try:
        async with contextlib.aclosing(ticking(events, SILENCE)) as heard:
            async for event in heard:
                if isinstance(event, ImageEvent):
                    last = _finished(wanted, event, begun)
                elif wanted.is_streaming and (line := _line(wanted, event)) is not None:
                    await answer.write(line)
    except AImageError as error:
        return await answer.fail(error)
    if not wanted.is_streaming:
        return web.json_response(last)
    await answer.write(last)
    return await answer.end()


def _line(wanted: _Wanted, event: Event | None) -> dict[str, Any] | None:
    """Return the line for an event; None stands for silence.

    Queueing and loading have no line: an error of the model then still has a status of its own.
    """
    if isinstance(event, Step):
        return wanted.line(completed=event.index, total=event.total)
    if isinstance(event, StartedEvent):
        return wanted.line()
    if isinstance(event, PullingEvent):  # not completed and total: those are steps
        return wanted.line(status="pulling", pulled=event.done, size=event.total)
    return wanted.line() if event is None else None


def _finished(wanted: _Wanted, picture: ImageEvent, begun: int) -> dict[str, Any]:
    return wanted.line(
        done=True,
        done_reason="stop",
        image=base64.b64encode(picture.data).decode(),
        seed=picture.seed,
        width=picture.width,
        height=picture.height,
        total_duration=time.monotonic_ns() - begun,
    )
