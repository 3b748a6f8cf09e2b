"""Requests of ollama's API for a model: loading and unloading, and the lines of a response."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from aiohttp import web
from pydantic import BeforeValidator, Field

from clowder_aimage.api import model_list
from clowder_aimage.api.answer_stream import Arrivals, NdjsonStream, add_warnings
from clowder_aimage.api.request_body import StreamedBody
from clowder_aimage.api.service import Service
from clowder_aimage.api.text.request import StopTexts, parse_stops
from clowder_aimage.engine.admission import NEVER
from clowder_aimage.engine.event import Event, PullingEvent
from clowder_aimage.engine.executor import run_generation
from clowder_aimage.engine.settings import DURATION, parse_duration
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import ADMIN
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.model.text.language_model import MAX_STOP, MAX_STOPS
from clowder_aimage.oci import Descriptor, Digest, Reference

# Seconds of silence before an empty line is sent
SILENCE = 10.0
_Line = dict[str, Any]


def _keep_alive(value: object) -> float | None:
    """Parse seconds, a number or a duration in Go's form. A negative value means for ever."""
    try:
        return None if value == "" else parse_duration(value)
    except ValueError:
        message = "must be a number of seconds, or a duration such as '5m' or '1h30m'"
        raise ValueError(message) from None


_Duration = Annotated[
    str, Field(json_schema_extra={"pattern": f"^({DURATION})?$"}, examples=["5m"])
]


def _read_stop(value: object) -> object:
    """Return a flag, or the texts in a list. Raises ValueError."""
    if isinstance(value, bool):
        return value
    texts = parse_stops(value)
    is_valid = all(isinstance(text, str) and len(text) <= MAX_STOP for text in texts)
    if len(texts) > MAX_STOPS or not is_valid:
        message = f"must be a boolean, or up to {MAX_STOPS} texts of up to {MAX_STOP} characters"
        raise ValueError(message)
    return texts


class OllamaBody(StreamedBody):
    """The fields of a request that loads a model.

    ``stop`` as a flag and ``sleep`` are extensions.
    """

    # The texts of stop end an answer
    HAS_STOPS: ClassVar[bool] = False

    keep_alive: Annotated[
        float | None, BeforeValidator(_keep_alive, json_schema_input_type=float | _Duration)
    ] = Field(
        default=None,
        description="How long the model stays in memory: seconds, or a duration such as `5m`; "
        "negative is unlimited.",
    )
    stop: Annotated[
        bool | list[str], BeforeValidator(_read_stop, json_schema_input_type=bool | StopTexts)
    ] = Field(
        default=False,
        description="`true`: end the work of the model after the current step, and unload it. "
        "Texts: as in `options`.",
    )

    sleep: bool = Field(
        default=False,
        description="Let the model leave its device, if it serves no request, and load it again "
        "for the next one, sooner than after `stop`.",
    )

    @property
    def ends_work(self) -> bool:
        """Return True if the work of the model is to end."""
        return self.stop is True

    @property
    def stop_texts(self) -> list[str]:
        """Return the texts that end an answer."""
        return self.stop if isinstance(self.stop, list) else []

    def iter_ignored(self) -> Iterator[str]:
        yield from super().iter_ignored()
        if self.stop_texts and not self.HAS_STOPS:
            yield "stop"


class OllamaRequest:
    """A request for a model, ``stored`` if the AImage was read before.

    ``EMPTY`` are the fields of a line without a part of the answer.
    """

    EMPTY: _Line = {"response": ""}  # noqa: RUF012 - not changed

    def __init__(
        self,
        service: Service,
        request: Request,
        body: OllamaBody,
        stored: StoredAImage | None = None,
    ) -> None:
        self.service, self._stored = service, stored
        self._request, self._body = request, body
        self.reference = service.resolve_reference(body.reference)
        request["model"] = str(self.reference)
        self._is_admin = request.get("scope") == ADMIN
        self.started_ns = time.monotonic_ns()
        self.warnings: list[str] = []

    async def change(self) -> web.StreamResponse:
        """Load, unload or stop the model, as the request says. Raises AImageError."""
        if self._body.ends_work:
            self._check_admin("stop")
            was_loaded = await self.service.engine.stop(self.reference)
            if not was_loaded and not await run_generation(self._resolve):
                raise model_list.build_missing_error(self.reference)
            return web.json_response(self.build_line(done=True, done_reason="unload"))
        if self._body.sleep:
            self._check_admin("unload")
            return await self._unload(self.service.engine.sleep)
        if self._body.keep_alive == 0:
            self._check_admin("unload")
            return await self._unload(self.service.engine.release)
        events = self.service.engine.load(self.reference, **self.build_terms())
        return await self.stream(
            events, lambda _: None, self.build_line(done=True, done_reason="load")
        )

    def _check_admin(self, verb: str) -> None:
        if not self._is_admin:
            message = f"the scope admin is required to {verb} models"
            raise ApiError(403, message, code="insufficient_scope")

    def build_terms(self) -> dict[str, Any]:
        """Return the terms of the request for the engine; only admins may load and pull models."""
        terms: dict[str, Any] = {"stored": self._stored}
        if not self._is_admin:
            return terms | {"pull": NEVER}
        return terms | {"keep_alive": self._body.keep_alive, "pull": self.service.settings.pull}

    def _resolve(self) -> Descriptor | None:
        try:
            return self.service.store.resolve(self.reference)
        except NotFoundError:
            return None

    async def _unload(
        self, unload: Callable[[Reference, Digest | None], Awaitable[bool]]
    ) -> web.StreamResponse:
        descriptor = await run_generation(self._resolve)
        digest = descriptor.digest if descriptor else None
        was_loaded = await unload(self.reference, digest)
        if digest is None and not was_loaded:
            raise model_list.build_missing_error(self.reference)
        return web.json_response(self.build_line(done=True, done_reason="unload"))

    async def stream(
        self,
        events: AsyncGenerator[Event, None],
        progress: Callable[[Event], _Line | None],
        last_line: _Line | None = None,
    ) -> web.StreamResponse:
        """Respond with the lines of the events, and with ``last_line`` or that of ``finish``.

        Queueing and loading have no line, so that an error can still determine the status. Raises
        AImageError before the first line.
        """
        answer, is_change = NdjsonStream(self._request), last_line is not None
        try:
            async with Arrivals(events) as arrivals:
                while (arrived := await arrivals.take(SILENCE)) is not None:
                    lines = [
                        self._build_event_line(event, progress) for event in arrived or (None,)
                    ]
                    shown = [line for line in lines if line is not None]
                    if shown and self._body.stream:
                        if not answer.has_begun:
                            add_warnings(answer.headers, self.warnings)
                        await answer.write(*shown)
            last_line = last_line or self.finish()
        except AImageError as error:
            return await answer.fail(self.explain(error))
        if not self._body.stream or (is_change and not answer.has_begun):
            # In a thread: embeddings may have millions of numbers
            text = await run_generation(json.dumps, last_line)
            response = web.json_response(text=text)
            add_warnings(response.headers, self.warnings)
            return response
        await answer.write(last_line)
        return await answer.end()

    def _build_event_line(
        self, event: Event | None, progress: Callable[[Event], _Line | None]
    ) -> _Line | None:
        """Return the line of an event, or of a silence."""
        # Without completed and total: in ollama's API they are steps
        if isinstance(event, PullingEvent):
            progress(event)
            return self.build_line(status="pulling", pulled=event.done, size=event.total)
        return self.build_line() if event is None else progress(event)

    def finish(self) -> _Line:
        """Return the last line. Raises ModelError."""
        raise NotImplementedError

    def explain(self, error: AImageError) -> AImageError:
        """Return the error with the field of the request that caused it."""
        return error

    def build_line(self, *, done: bool = False, **fields: Any) -> _Line:
        """Return a line of the response."""
        name = self._body.reference or str(self.reference)
        created = datetime.now(UTC).isoformat()
        return {"model": name, "created_at": created, **self.EMPTY, **fields, "done": done}
