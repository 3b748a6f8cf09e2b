"""OpenAI's APIs of language models: chat completions, completions, and embeddings."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from clowder_aimage.api.answer_stream import StreamForm, add_warnings, stream_events
from clowder_aimage.api.model_choice import SelectedModel, choose_model
from clowder_aimage.api.model_kind import EMBEDDER, TEXT, check_kind
from clowder_aimage.api.openai.chunk import (
    ChatAnswer,
    CompletionAnswer,
    TextAnswer,
    encode_embeddings,
)
from clowder_aimage.api.openai.text_operation import CHAT, COMPLETE, EMBED
from clowder_aimage.api.request_body import (
    GenerationBody,
    read_body,
    record_ignored,
)
from clowder_aimage.api.service import Service
from clowder_aimage.api.text.request import (
    ChatRequest,
    CompletionRequest,
    EmbeddingsBody,
    TextBody,
)
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.event import Event
from clowder_aimage.engine.executor import run_generation, run_io
from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import ADMIN, Route, share
from clowder_aimage.model.text.language_model import (
    ContextError,
    EmbeddingRequest,
    Embeddings,
    TextNotice,
    TextRequest,
)

# Fields of a model's request and their names in those of OpenAI's API
_PARAMS = {
    "schema": "response_format",
    "alternatives": "logprobs",
    "thinking": "reasoning_effort",
    "texts": "input",
}
_BodyT = TypeVar("_BodyT", bound=GenerationBody)
_TextT = TypeVar("_TextT", bound=TextBody)


class TextRoutes:
    """Handlers that generate texts and compute embeddings."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def build_routes(self) -> list[Route]:
        """Return the routes."""
        return [
            share(CHAT, partial(self.write, ChatRequest, ChatAnswer)),
            share(COMPLETE, partial(self.write, CompletionRequest, CompletionAnswer)),
            share(EMBED, self.embed),
        ]

    async def write(
        self, kind: type[_TextT], make: Callable[[_TextT], TextAnswer], request: Request
    ) -> web.StreamResponse:
        """Respond with the next message of a chat, or with continuations of texts."""
        body = await self._read(request, kind)
        selected = await self._choose(request, body, TEXT)
        return await self._answer(request, body, selected, make(body))

    async def embed(self, request: Request) -> web.StreamResponse:
        """Respond with embeddings of texts."""
        body = await self._read(request, EmbeddingsBody)
        selected = await self._choose(request, body, EMBEDDER, TEXT)
        headers = selected.build_headers(self._service, body)
        result, embedding_request = Embeddings((), 0), body.request()
        try:
            events = self._generate(selected, embedding_request, EMBEDDER, TEXT)
            async with contextlib.aclosing(events):
                async for event in events:
                    if isinstance(event, Embeddings):
                        result = event
        except UsageError as error:
            raise explain_refusal(error, "input") from None
        if digest := await self._resolve_digest(selected):
            headers["X-Aimage-Digest"] = digest
        text = await run_generation(encode_embeddings, result, body, str(selected.reference))
        response = web.json_response(text=text, headers=headers)
        add_warnings(response.headers, result.list_warnings())
        return response

    async def _read(self, request: Request, kind: type[_BodyT]) -> _BodyT:
        return await read_body(request, kind, {"pull": self._service.settings.pull})

    async def _choose(self, request: Request, body: GenerationBody, *kinds: str) -> SelectedModel:
        may_pull = request.get("scope") == ADMIN
        selected = await choose_model(self._service, body, kinds, may_pull=may_pull)
        request["model"] = selected.reference
        return selected

    def _generate(
        self, selected: SelectedModel, model_request: TextRequest | EmbeddingRequest, *kinds: str
    ) -> AsyncGenerator[Event, None]:
        def make(aimage: AImage) -> TextRequest | EmbeddingRequest:
            check_kind(selected.reference, aimage, *kinds)
            return model_request

        engine = self._service.engine
        terms: dict[str, Any] = {"pull": selected.pull, "stored": selected.stored}
        return engine.generate(selected.reference, make, is_text=True, **terms)

    async def _generate_choices(
        self,
        selected: SelectedModel,
        requests: list[TextRequest],
        answer: TextAnswer,
        note: Callable[[TextNotice], None],
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """Yield the index of a choice and its events; the choices are made one after another."""
        for index, text_request in enumerate(requests):
            async with contextlib.aclosing(self._generate(selected, text_request, TEXT)) as events:
                async for event in events:
                    if not answer.digest and answer.is_text(event):
                        answer.digest = await self._resolve_digest(selected)
                    if isinstance(event, TextNotice):
                        note(event)
                    yield index, event

    async def _resolve_digest(self, selected: SelectedModel) -> str:
        """Return the digest of the manifest; if it was pulled, while the store has it."""
        if selected.stored is not None:
            return str(selected.stored.descriptor.digest)

        def resolve() -> str:
            try:
                return str(self._service.store.resolve(selected.reference).digest)
            except NotFoundError:
                return ""

        return await run_io(resolve)

    async def _answer(
        self, request: Request, body: TextBody, selected: SelectedModel, answer: TextAnswer
    ) -> web.StreamResponse:
        """Respond with the texts, in one piece or as a stream."""
        answer.model = str(selected.reference)
        headers = selected.build_headers(self._service, body)
        if selected.stored is not None:
            answer.digest = headers["X-Aimage-Digest"] = await self._resolve_digest(selected)
        explain = _build_explainer("messages" if isinstance(body, ChatRequest) else "prompt")
        requests = body.build_requests()

        def note(notice: TextNotice) -> None:
            answer.warnings.extend(notice.warnings)
            record_ignored(request, body, notice.ignored)

        events = self._generate_choices(selected, requests, answer, note)
        if body.stream:
            frames, warnings = answer.iter_frames, answer.warnings
            form = StreamForm(frames, answer.end, explain, warnings, is_early=False)
            return await stream_events(request, events, form, headers)
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    answer.add(*event)
        except UsageError as error:
            raise explain(error) from None
        if answer.digest:
            headers["X-Aimage-Digest"] = answer.digest
        response = web.json_response(answer.build_body(), headers=headers)
        add_warnings(response.headers, answer.warnings)
        return response


def _build_explainer(prompt: str) -> Callable[[Exception], Exception]:
    return lambda error: explain_refusal(error, prompt) if isinstance(error, UsageError) else error


def explain_refusal(error: UsageError, prompt: str) -> ApiError:
    """Return the response to a refusal of a model, with the field of the request."""
    name = error.facts.get("field")
    if isinstance(error, ContextError) or "context" in error.facts:
        return ApiError(400, error.message, code="context_length_exceeded", param=prompt)
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    param = None if name is None else {**_PARAMS, "prompt": prompt}.get(name, name)
    return ApiError(
        400, message, code="unsupported_value" if param else "invalid_value", param=param
    )
