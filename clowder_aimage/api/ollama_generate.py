"""ollama's ``/api/generate``, for models that make pictures.

The fields are those of ollama's image generation, which left it in July 2026 (ollama,
server/routes.go, ``handleImageGenerate``; docs/api.md): ``width``, ``height``, ``steps``, and the
``seed`` in ``options``; ``completed`` of ``total`` steps while it runs, ``image`` at the end. With
our own ``stop`` and an empty prompt, what the model is at ends after the step.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from clowder_aimage.api import model_list
from clowder_aimage.api.image_request import MAX_TEXT, check_pixels
from clowder_aimage.api.ndjson import (
    NdjsonStream,
    fields,
    flag,
    paced,
    read_object,
    text,
    whole,
    wrong,
)
from clowder_aimage.api.request_body import wrong as invalid
from clowder_aimage.api.service import Service
from clowder_aimage.engine.engine import Engine
from clowder_aimage.engine.event import Event, ImageEvent, PullingEvent, StartedEvent
from clowder_aimage.engine.limits import FOR_EVER, IF_MISSING, NEVER
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.route import ADMIN
from clowder_aimage.model.pipeline import GenerateRequest, PictureEncoding, Step
from clowder_aimage.oci import Descriptor, Reference

SILENCE = 10.0  # seconds after which it hears that the request lives
_LONGEST = 100 * 365 * 86400.0  # seconds of keep_alive; more is for ever
_NOTHING: dict[str, Any] = {}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a request asks for. ``name`` is the model as the client calls it."""

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
    def of(cls, service: Service, body: Mapping[str, Any]) -> _Wanted:
        """Raises ApiError, UsageError: a field is not what it should be."""
        name = text(body, "model", "name")
        reference = service.reference(name)
        if body.get("images"):
            raise ApiError(
                400, "no model here takes pictures", code="unsupported_value", param="images"
            )
        prompt = text(body, "prompt")
        if len(prompt) > MAX_TEXT:
            message = f"can have {MAX_TEXT} characters at most, not {len(prompt)}"
            raise invalid("prompt", message)
        return cls(
            name or str(reference),
            reference,
            prompt,
            _parameters(body),
            keep_alive(body.get("keep_alive")),
            flag(body, "stream", True),
            flag(body, "stop", False),
            service.pull,
            flag(body, "png_facts", service.facts),
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
        """A line of the answer."""
        created = datetime.now(UTC).isoformat()
        return {"model": self.name, "created_at": created, "response": "", **more, "done": done}


def _parameters(body: Mapping[str, Any]) -> dict[str, int]:
    """Sizes, steps and seed, of the request itself or of its ``options``; a size of 0, or a seed
    below 0, is none."""
    options, found = fields(body, "options"), {}
    for name in ("width", "height", "steps", "seed"):
        value = whole(body, name)
        value = whole(options, name) if value is None else value
        is_said = value is not None and (value >= 0 if name == "seed" else value != 0)
        if value is not None and is_said:
            found[name] = value
    width, height = found.get("width", 0), found.get("height", 0)
    if min(width, height) > 0:  # before a model is loaded for it
        check_pixels("width" if width >= height else "height", width, height)
    found.setdefault("seed", secrets.randbits(32))
    return found


def keep_alive(value: object) -> float | None:
    """Seconds: a number, or a duration as Go writes it (``5m``, ``1h30m``; Go, ``ParseDuration``),
    or a number in a string. Below 0 is for ever.

    Raises:
        ApiError: it is none of them.
    """
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong("keep_alive", "a number of seconds, or a duration such as '5m'", value)
    seconds = _seconds(value) if isinstance(value, str) else float(min(max(value, -1), _LONGEST))
    if seconds is None or math.isnan(seconds):
        raise ApiError(
            400,
            "keep_alive must be a number of seconds, or a duration such as '5m' or '1h30m'",
            code="invalid_value",
            param="keep_alive",
        )
    return FOR_EVER if seconds < 0 or seconds >= _LONGEST else seconds


def _seconds(said: str) -> float | None:
    sign = -1 if said.startswith("-") else 1
    rest = said.removeprefix("-" if sign < 0 else "+")
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", rest):
        return sign * min(float(rest), _LONGEST)
    parts = list(_DURATION.finditer(rest))
    if not parts or "".join(part[0] for part in parts) != rest:
        return None
    return sign * min(sum(float(part[1]) * _SECONDS[part[2]] for part in parts), _LONGEST)


def drawing(service: Service) -> Callable[[web.Request], Any]:
    """The handler."""

    async def handler(request: web.Request) -> web.StreamResponse:
        wanted = _Wanted.of(service, await read_object(request))
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
    """Requests under way are not disturbed: the model goes after the last of them."""
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
    """Load without making anything."""
    answer = NdjsonStream(request)
    try:
        async with contextlib.aclosing(
            paced(service.engine.load(wanted.reference, **wanted.terms(request)), SILENCE, SILENCE)
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
        async with contextlib.aclosing(paced(events, SILENCE, SILENCE)) as heard:
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
    """What a client hears of an event; None stands for silence. It hears nothing of its place and
    of loading: what the model refuses then still has a status of its own."""
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
