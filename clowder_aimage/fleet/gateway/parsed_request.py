"""Requests of clients at a gateway: validated by the worker's code, and made repeatable.

Random choices are made here, once: a seed that the request lacks is added to its body.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from clowder_aimage.api.model_kind import EMBEDDER, PICTURES, TEXT
from clowder_aimage.api.ollama.generate import OllamaPictureBody
from clowder_aimage.api.ollama.text_body import OllamaChatBody, OllamaEmbedBody, OllamaPromptBody
from clowder_aimage.api.picture.body import PictureBody
from clowder_aimage.api.picture.request import (
    EditRequest,
    ImageRequest,
    VariationRequest,
    read_request,
)
from clowder_aimage.api.picture.source import (
    iter_ignored_links,
    take_bare_pictures,
    take_pictures,
)
from clowder_aimage.api.request_body import (
    GenerationBody,
    RequestBody,
    check_fields,
    read_checked,
    record_ignored,
)
from clowder_aimage.api.text.request import (
    ChatRequest,
    CompletionRequest,
    EmbeddingsBody,
    TextBody,
)
from clowder_aimage.engine.admission import (
    IF_MISSING,
    NEVER,
    BusyError,
    CallerSemaphore,
    PlaceCounter,
)
from clowder_aimage.generation.seed import read_seed
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import ADMIN

# Requests with pictures whose bodies are read at once.
MAX_UPLOADS = 32
# Bodies of these requests that are parsed at once.
_PARSED = 2
_PICTURES: Mapping[str, type[ImageRequest]] = {
    "/v1/images/generations": ImageRequest,
    "/v1/images/edits": EditRequest,
    "/v1/images/variations": VariationRequest,
}
_TEXTS: Mapping[str, type[GenerationBody]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingsBody,
}
_OLLAMA: Mapping[str, type[RequestBody]] = {
    "/api/chat": OllamaChatBody,
    "/api/embed": OllamaEmbedBody,
    "/api/embeddings": OllamaEmbedBody,
}
GENERATE = "/api/generate"
# Their bodies are streamed.
WITH_PICTURES = (*_PICTURES, GENERATE)
EMBEDDINGS = ("/v1/embeddings", "/api/embed", "/api/embeddings")


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """The request of a client: the name of a model, and the fields of the body.

    ``chosen`` are fields added by the gateway. ``is_change``: the request only loads, unloads or
    stops the model. ``is_events``: the response is a stream of events.
    """

    model: str | None
    fields: dict[str, Any]
    kinds: tuple[str, ...]
    pull: str = NEVER
    is_form: bool = False
    is_change: bool = False
    unloads: bool = False
    is_events: bool = False
    chosen: Mapping[str, Any] = field(default_factory=dict)


class ForwardedBodies:
    """Counts the bodies with pictures that a gateway reads."""

    def __init__(self) -> None:
        self.busy = CallerSemaphore(_PARSED)
        self._places = PlaceCounter()

    def enter(self) -> None:
        """Count a body. Raises BusyError."""
        self._places.enter(MAX_UPLOADS, lambda count: BusyError(count, 5))

    def leave(self, body: PictureBody) -> None:
        """Count a body as read."""
        if body.is_counted:
            self._places.leave()


KindOf = Callable[[str | None], str]


class RequestValidator:
    """Reads requests. ``kind_of`` returns the kind of a named model; an empty text if unknown."""

    def __init__(self, kind_of: KindOf) -> None:
        self._kind_of = kind_of
        self._bodies = ForwardedBodies()

    async def read(self, request: Request) -> ParsedRequest:
        """Return a validated request. Raises ApiError, BusyError."""
        path = request.path
        if path not in WITH_PICTURES:
            if path in _TEXTS:
                return await read_checked(request, partial(_parse_openai, request))
            parsed = await read_checked(request, partial(_parse_ollama, request))
            return _with_pull(request, parsed)
        body = PictureBody(request, self._bodies)
        try:
            fields = await body.read_fields(
                may_be_form=path in ("/v1/images/edits", "/v1/images/variations")
            )
        finally:
            self._bodies.leave(body)
        if path == GENERATE:
            return _with_pull(request, self._parse_prompt(request, fields))
        return _parse_picture(request, fields, is_form=body.is_form)

    def _parse_prompt(self, request: Request, fields: dict[str, Any]) -> ParsedRequest:
        name = fields.get("model") or fields.get("name")
        if self._kind_of(name if isinstance(name, str) else None) in (TEXT, EMBEDDER):
            return _parse_ollama(request, fields)
        pictures = take_bare_pictures(dict(fields))
        parameters = {key: value for key, value in fields.items() if key not in pictures}
        body = check_fields(parameters, OllamaPictureBody).with_options()
        record_ignored(request, body, iter_ignored_links(fields))
        unloads = body.ends_work or body.keep_alive == 0
        if not (body.prompt or body.enhance):
            return ParsedRequest(
                body.reference, fields, (PICTURES,), is_change=True, unloads=unloads
            )
        seed = {"seed": body.first_seed}
        return ParsedRequest(body.reference, fields, (PICTURES,), chosen=seed)


def _parse_openai(request: Request, fields: dict[str, Any]) -> ParsedRequest:
    body = check_fields(fields, _TEXTS[request.path])
    record_ignored(request, body)
    pull = body.pull if request.get("scope") == ADMIN else NEVER
    if not isinstance(body, TextBody):
        return ParsedRequest(body.model, fields, (EMBEDDER, TEXT), pull)
    body.build_requests()  # raises ApiError
    parsed = ParsedRequest(body.model, fields, (TEXT,), pull, is_events=body.stream)
    return replace(parsed, chosen=_draw_seed(fields))


def _parse_picture(request: Request, fields: dict[str, Any], *, is_form: bool) -> ParsedRequest:
    kind = _PICTURES[request.path]
    parameters = dict(fields)
    pictures = take_pictures(parameters)
    body = read_request(parameters, kind, is_form=is_form)
    record_ignored(request, body, iter_ignored_links(fields))
    body.check_rules(pictures)
    pull = body.pull if request.get("scope") == ADMIN else NEVER
    seed = {"seed": str(body.first_seed) if is_form else body.first_seed}
    is_events = body.stream
    return ParsedRequest(
        body.model, fields, (PICTURES,), pull, is_form, is_events=is_events, chosen=seed
    )


def _with_pull(request: Request, parsed: ParsedRequest) -> ParsedRequest:
    """Return a request of ollama's API: it pulls a missing model of an administrator."""
    return replace(parsed, pull=IF_MISSING) if request.get("scope") == ADMIN else parsed


def _parse_ollama(request: Request, fields: dict[str, Any]) -> ParsedRequest:
    path = request.path
    kind: type[Any] = OllamaPromptBody if path == GENERATE else _OLLAMA[path]
    body = check_fields(fields, kind)
    record_ignored(request, body)
    unloads = body.ends_work or body.keep_alive == 0
    if path in EMBEDDINGS:
        is_load = not body.texts
        return ParsedRequest(body.reference, fields, (EMBEDDER, TEXT), is_change=is_load)
    if body.is_change:
        return ParsedRequest(body.reference, fields, (TEXT,), is_change=True, unloads=unloads)
    body.request()
    options = fields.get("options") or {}
    chosen = {"options": {**options, **_draw_seed(options)}}
    return ParsedRequest(body.reference, fields, (TEXT,), chosen=chosen)


def _draw_seed(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return a seed for a text that has none."""
    return {"seed": secrets.randbits(31)} if read_seed(fields.get("seed")) is None else {}
