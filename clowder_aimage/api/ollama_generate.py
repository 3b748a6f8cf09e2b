"""ollama's ``/api/generate`` for image models.

The fields are those of ollama's image generation, which was removed in July 2026 (ollama,
server/routes.go, ``handleImageGenerate``; docs/api.md): ``width``, ``height``, ``steps``, and the
``seed`` in ``options``; ``images`` in base64; ``completed`` of ``total`` steps while it runs,
``image`` at the end. Extensions, such as ``guidance``, may be in ``options`` too. ``stop``, with an
empty prompt, ends the model's work after the current step.
"""

from __future__ import annotations

import base64
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Self

from aiohttp import web
from pydantic import BeforeValidator, Field

from clowder_aimage.api import model_list
from clowder_aimage.api.answer_stream import NdjsonStream, add_warnings, ticking
from clowder_aimage.api.control_field import controlnet_error, find_controlnet
from clowder_aimage.api.guidance_field import MAX_TEXT, GuidanceFields
from clowder_aimage.api.lora_field import LoraFields, PromptedLoras
from clowder_aimage.api.picture_field import PictureFields, check_pixels
from clowder_aimage.api.picture_source import take_bare_pictures
from clowder_aimage.api.picture_upload import KeptPictures, PictureUploads
from clowder_aimage.api.request_body import ModelBody, Whole, check_fields, wrong
from clowder_aimage.api.service import Service
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.admission import NEVER
from clowder_aimage.engine.event import Event, ImageEvent, PullingEvent, StartedEvent
from clowder_aimage.engine.executor import run_generation
from clowder_aimage.engine.settings import duration
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.route import ADMIN, INFER, Route
from clowder_aimage.model.pipeline import (
    GenerateRequest,
    LoraUse,
    PictureEncoding,
    Step,
    check_parameters,
)
from clowder_aimage.oci import Descriptor

SILENCE = 10.0  # seconds of silence before an empty line is sent


def _keep_alive(value: object) -> float | None:
    """Parse seconds, a number or a duration in Go's form. A negative value means for ever."""
    try:
        return None if value == "" else duration(value)
    except ValueError:
        message = "must be a number of seconds, or a duration such as '5m' or '1h30m'"
        raise ValueError(message) from None


class _Options(GuidanceFields):
    width: Whole | None = None
    height: Whole | None = None
    steps: Whole | None = None
    seed: Whole | None = None


class _GenerateBody(ModelBody, _Options, PictureFields):
    prompt: str = Field("", max_length=MAX_TEXT)
    options: _Options = _Options()
    keep_alive: Annotated[float | None, BeforeValidator(_keep_alive)] = None
    stop: bool = False
    png_facts: bool | None = None
    loras: LoraFields = Field(default_factory=list)
    trigger: bool = False

    def whole(self) -> Self:
        """Return the request with the fields that are only in its ``options``."""
        own = self.options
        names = own.model_fields_set - self.model_fields_set
        found = {name: getattr(own, name) for name in names if getattr(own, name) is not None}
        return self.model_copy(update=found)

    def parameters(self) -> dict[str, Any]:
        """Return the parameters other than those of pictures.

        A size of 0 or a negative seed counts as not given.
        """
        found = self.of_guidance()
        for name in ("width", "height", "steps", "seed"):
            value: int | None = getattr(self, name)
            if value is not None and (value >= 0 if name == "seed" else value != 0):
                found[name] = value
        width, height = found.get("width", 0), found.get("height", 0)
        if min(width, height) > 0:  # before a model is loaded for the request
            check_pixels("width" if width >= height else "height", width, height)
        found.setdefault("seed", secrets.randbits(32))
        return found


class OllamaGeneration:
    """A request to load, unload or stop a model, or to generate a picture."""

    def __init__(
        self,
        service: Service,
        request: web.Request,
        body: _GenerateBody,
        parameters: dict[str, Any],
        pictures: KeptPictures | None,
    ) -> None:
        self._service, self._request, self._body = service, request, body
        self.reference = service.reference(body.reference)
        has_size = _has_size(parameters)
        self._parameters = parameters
        self._of_pictures = partial(body.of_pictures, pictures, has_size=has_size)
        self._of_pictures(None)  # before a model is pulled
        self._warn = partial(body.warnings, pictures=pictures, has_size=has_size)
        self._adapters = PromptedLoras.of(body.prompt, body.loras, has_words=body.trigger)
        if body.prompt and not self._adapters.prompt:
            raise ApiError(400, "prompt must not be empty", code="invalid_value", param="prompt")
        self._is_admin = request.get("scope") == ADMIN
        self._begun = time.monotonic_ns()
        self._used: tuple[LoraUse, ...] = ()
        self._warnings: list[str] = []

    async def answer(self) -> web.StreamResponse:
        """Respond to the request. Raises AImageError."""
        if self._body.prompt:
            return await self._generate()
        if self._body.stop:
            self._check_admin("stop")
            was_loaded = await self._service.engine.stop(self.reference)
            if not was_loaded and not await run_generation(self._resolve):
                raise model_list.unknown(self.reference)
            return web.json_response(self._line(done=True, done_reason="unload"))
        if self._body.keep_alive == 0:
            self._check_admin("unload")
            return await self._unload()
        events = self._service.engine.load(self.reference, **self._terms())
        return await self._stream(events, self._line(done=True, done_reason="load"))

    def _check_admin(self, verb: str) -> None:
        if not self._is_admin:
            message = f"the scope admin is required to {verb} models"
            raise ApiError(403, message, code="insufficient_scope")

    def _terms(self) -> dict[str, Any]:
        """Return ``keep_alive`` and ``pull`` for the engine; only admins may set them."""
        if not self._is_admin:
            return {"pull": NEVER}
        return {"keep_alive": self._body.keep_alive, "pull": self._service.settings.pull}

    def _resolve(self) -> Descriptor | None:
        try:
            return self._service.store.resolve(self.reference)
        except NotFoundError:
            return None

    async def _unload(self) -> web.StreamResponse:
        found = await run_generation(self._resolve)
        loaded = self._service.engine.loaded()
        digests = {found.digest} if found else set()
        digests |= {one.digest for one in loaded if one.reference == self.reference}
        if not digests:
            raise model_list.unknown(self.reference)
        for digest in digests:
            await model_list.unload(self._service, digest)
        return web.json_response(self._line(done=True, done_reason="unload"))

    async def _generate(self) -> web.StreamResponse:
        adapters, facts = self._adapters, self._body.png_facts
        has_facts = self._service.settings.png_facts if facts is None else facts

        def make(aimage: AImage) -> GenerateRequest:
            parameters = self._parameters | self._of_pictures(aimage)
            request = GenerateRequest.for_model(aimage, adapters.prompt, **parameters)
            check_parameters(request)  # before the request is queued
            self._body.check_negative(request)
            request = find_controlnet(self._service, request, aimage)
            request = adapters.resolve(self._service, request, aimage)
            self._used = request.loras
            self._warnings[:] = self._warn(request)
            return request

        events = self._service.engine.generate(
            self.reference,
            make,
            encoding=PictureEncoding(has_facts=has_facts),
            adapters=await adapters.references(self._service),
            **self._terms(),
        )
        return await self._stream(events, None)

    async def _stream(
        self, events: AsyncGenerator[Event, None], last: dict[str, Any] | None
    ) -> web.StreamResponse:
        answer, has_no_picture = NdjsonStream(self._request), last is not None
        try:
            async with contextlib.aclosing(ticking(events, SILENCE)) as coming:
                async for event in coming:
                    if isinstance(event, ImageEvent):
                        last = self._finished(event)
                    elif self._body.stream and (line := self._progress(event)) is not None:
                        if not answer.has_begun:
                            add_warnings(answer.headers, self._warnings)
                        await answer.write(line)
        except AImageError as error:
            return await answer.fail(controlnet_error(self._adapters.error(error)))
        if not self._body.stream or (has_no_picture and not answer.has_begun):
            response = web.json_response(last)
            add_warnings(response.headers, self._warnings)
            return response
        await answer.write(last or {})
        return await answer.end()

    def _line(self, *, done: bool = False, **more: Any) -> dict[str, Any]:
        name = self._body.reference or str(self.reference)
        created = datetime.now(UTC).isoformat()
        return {"model": name, "created_at": created, "response": "", **more, "done": done}

    def _progress(self, event: Event | None) -> dict[str, Any] | None:
        """Return the line for an event; None means silence.

        Queueing and loading have no line, so that an error can still determine the status.
        """
        if isinstance(event, Step):
            return self._line(completed=event.index, total=event.total)
        if isinstance(event, PullingEvent):  # without completed and total, which are steps
            return self._line(status="pulling", pulled=event.done, size=event.total)
        return self._line() if event is None or isinstance(event, StartedEvent) else None

    def _finished(self, picture: ImageEvent) -> dict[str, Any]:
        return self._line(
            done=True,
            done_reason="stop",
            image=base64.b64encode(picture.data).decode(),
            **{name: getattr(picture, name) for name in ("seed", "width", "height")},
            digest=picture.digest.removeprefix("sha256:"),
            **model_list.described(self._used, self._warnings),
            total_duration=time.monotonic_ns() - self._begun,
        )


def _has_size(parameters: Mapping[str, Any]) -> bool:
    return bool({"width", "height"} & parameters.keys())


async def generate(uploads: PictureUploads, request: web.Request) -> web.StreamResponse:
    """Respond to ``POST /api/generate``."""
    async with uploads.open(request) as upload:
        fields = await upload.fields()
        given = take_bare_pictures(fields)
        body = check_fields(fields, _GenerateBody).whole()
        if given and not body.prompt:
            raise wrong(next(iter(given)), "cannot be used without a prompt")
        parameters = body.parameters()
        body.check_given(given, has_size=_has_size(parameters))
        pictures = await upload.keep(given, body.painted)
        generation = OllamaGeneration(uploads.service, request, body, parameters, pictures)
        request["model"] = str(generation.reference)
        return await generation.answer()


def routes(uploads: PictureUploads) -> list[Route]:
    """Return the route that generates pictures."""
    return [Route("POST", "/api/generate", partial(generate, uploads), INFER, body=None)]
