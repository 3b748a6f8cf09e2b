"""ollama's API of language models: chat, generate, and embeddings (ollama, docs/api.md)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from clowder_aimage.api.model_kind import EMBEDDER, TEXT, check_kind
from clowder_aimage.api.ollama.request import OllamaRequest
from clowder_aimage.api.ollama.text_body import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaPromptBody,
    OllamaTextBody,
)
from clowder_aimage.api.ollama.text_operation import (
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
)
from clowder_aimage.api.openai.chunk import describe_token
from clowder_aimage.api.openai.text import explain_refusal
from clowder_aimage.api.request_body import check_fields, read_body, record_ignored
from clowder_aimage.api.service import Service
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.event import Event, LoadingEvent, StartedEvent
from clowder_aimage.errors import AImageError, FormatError, ModelError, UsageError
from clowder_aimage.http.api_error import OLLAMA
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import Route, share
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.model.text.language_model import (
    LENGTH,
    STOP,
    EmbeddingRequest,
    Embeddings,
    TextDelta,
    TextEnd,
    TextNotice,
    TextRequest,
    Token,
    ToolCall,
)
from clowder_aimage.oci import read_json

_NS = 1_000_000_000


class OllamaText(OllamaRequest):
    """A request for a text, or to load or unload a language model."""

    def __init__(
        self,
        service: Service,
        request: Request,
        body: OllamaTextBody,
        stored: StoredAImage | None = None,
    ) -> None:
        super().__init__(service, request, body, stored)
        self._text_body = body
        self._text, self._thinking = list[str](), list[str]()
        self._calls, self._tokens = list[dict[str, Any]](), list[Token]()
        self._end: TextEnd | None = None
        self._loading = self._started = 0

    async def answer(self) -> web.StreamResponse:
        """Respond to the request. Raises AImageError."""
        if self._text_body.is_change:
            return await self.change()
        text_request = self._text_body.request()

        def make(aimage: AImage) -> TextRequest:
            check_kind(self.reference, aimage, TEXT, interface=OLLAMA)
            return text_request

        engine = self.service.engine
        events = engine.generate(self.reference, make, is_text=True, **self.build_terms())
        return await self.stream(events, self._receive_event)

    def explain(self, error: AImageError) -> AImageError:
        return explain_refusal(error, "prompt") if isinstance(error, UsageError) else error

    def _receive_event(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, LoadingEvent):
            self._loading = time.monotonic_ns()
        elif isinstance(event, StartedEvent):
            self._started = time.monotonic_ns()
        elif isinstance(event, TextNotice):
            self.warnings += event.warnings
            record_ignored(self._request, self._text_body, event.ignored)
        elif isinstance(event, TextEnd):
            self._end = event
        elif isinstance(event, TextDelta):
            return self._receive_piece(event)
        elif isinstance(event, ToolCall):
            arguments = _parse_arguments(event.arguments)
            self._calls.append({"function": {"name": event.name, "arguments": arguments}})
            return self.build_line(**self.build_part("", tool_calls=[self._calls[-1]]))
        return None

    def _receive_piece(self, piece: TextDelta) -> dict[str, Any] | None:
        is_thinking = piece.kind == "thinking"
        (self._thinking if is_thinking else self._text).append(piece.text)
        self._tokens += piece.tokens
        if not piece.text and not piece.tokens:
            return None
        thinking = {"thinking": piece.text} if is_thinking else {}
        fields = self.build_part("" if is_thinking else piece.text, **thinking)
        return self.build_line(**fields, **self._build_logprobs(piece.tokens))

    def _build_logprobs(self, tokens: Any) -> dict[str, Any]:
        return {"logprobs": [describe_token(token) for token in tokens]} if tokens else {}

    def build_part(self, text: str, **fields: Any) -> dict[str, Any]:
        """Return the fields of a line for new tokens of the text."""
        return {"response": text, **fields}

    def finish(self) -> dict[str, Any]:
        if (end := self._end) is None:
            raise ModelError("the model ended a text without its counts")
        fields = self.build_part("")
        if not self._text_body.stream:
            message_fields: dict[str, Any] = {"tool_calls": self._calls} if self._calls else {}
            message_fields |= {"thinking": "".join(self._thinking)} if self._thinking else {}
            fields = self.build_part("".join(self._text), **message_fields) | self._build_logprobs(
                self._tokens
            )
        loading = max(0, self._started - self._loading) if self._loading else 0
        return self.build_line(
            done=True,
            done_reason=LENGTH if end.reason == LENGTH else STOP,
            **fields,
            total_duration=time.monotonic_ns() - self.started_ns,
            load_duration=loading,
            prompt_eval_count=end.prompt_tokens,
            prompt_eval_duration=int(end.prompt_seconds * _NS),
            eval_count=end.tokens,
            eval_duration=int(end.seconds * _NS),
            **({"warnings": self.warnings} if self.warnings else {}),
        )


class OllamaChat(OllamaText):
    """A request for the next message of a chat."""

    EMPTY = {"message": {"role": "assistant", "content": ""}}  # noqa: RUF012 - not changed

    def build_part(self, text: str, **fields: Any) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, **fields}}


def _parse_arguments(arguments: str) -> Any:
    try:
        return read_json(arguments.encode(), "the arguments")
    except FormatError:
        return {}


class OllamaEmbedding(OllamaRequest):
    """A request for embeddings; ``is_old`` for that of one text, ``/api/embeddings``."""

    def __init__(
        self, service: Service, request: Request, body: OllamaEmbedBody, *, is_old: bool
    ) -> None:
        super().__init__(service, request, body.model_copy(update={"stream": False}))
        self._texts, self._is_old, self._prompt = body.texts, is_old, body.prompt_name
        self._found = Embeddings((), 0)
        self._loading = self._started = 0

    async def answer(self) -> web.StreamResponse:
        """Respond to the request. Raises AImageError."""
        embedding_request = EmbeddingRequest(self._texts, self._prompt)

        def make(aimage: AImage) -> EmbeddingRequest:
            check_kind(self.reference, aimage, EMBEDDER, TEXT, interface=OLLAMA)
            return embedding_request

        engine = self.service.engine
        events = (
            engine.generate(self.reference, make, is_text=True, **self.build_terms())
            if self._texts
            else engine.load(self.reference, **self.build_terms())
        )
        return await self.stream(events, self._receive_event)

    def _receive_event(self, event: Event) -> None:
        if isinstance(event, LoadingEvent):
            self._loading = time.monotonic_ns()
        elif isinstance(event, StartedEvent):
            self._started = time.monotonic_ns()
        elif isinstance(event, Embeddings):
            self._found = event
            self.warnings += event.list_warnings()

    def explain(self, error: AImageError) -> AImageError:
        name = "prompt" if self._is_old else "input"
        return explain_refusal(error, name) if isinstance(error, UsageError) else error

    def finish(self) -> dict[str, Any]:
        embeddings = self._found
        if len(embeddings.vectors) != len(self._texts):
            raise ModelError(f"the model returned {len(embeddings.vectors)} embeddings")
        vectors = [list(vector) for vector in embeddings.vectors]
        if self._is_old:
            return {"embedding": vectors[0] if vectors else []}
        return {
            "model": self._body.reference or str(self.reference),
            "embeddings": vectors,
            "total_duration": time.monotonic_ns() - self.started_ns,
            "load_duration": max(0, self._started - self._loading) if self._loading else 0,
            "prompt_eval_count": embeddings.tokens,
        }


async def read_named(service: Service, fields: Mapping[str, Any]) -> StoredAImage | None:
    """Return the AImage of a request if it is in the store, and valid.

    Errors of its name or its AImage are raised later, by the request itself.
    """
    name = fields.get("model") or fields.get("name")
    try:
        reference = service.resolve_reference(name if isinstance(name, str) else None)
        return await service.engine.read(reference)
    except AImageError:
        return None


async def answer_prompt(
    service: Service, request: Request, fields: Mapping[str, Any], stored: StoredAImage
) -> web.StreamResponse:
    """Respond to ``POST /api/generate`` of a language model."""
    body = check_fields(fields, OllamaPromptBody)
    record_ignored(request, body)
    return await OllamaText(service, request, body, stored).answer()


async def _chat(service: Service, request: Request) -> web.StreamResponse:
    body = await read_body(request, OllamaChatBody)
    return await OllamaChat(service, request, body).answer()


async def _embed(service: Service, request: Request, *, is_old: bool) -> web.StreamResponse:
    body = await read_body(request, OllamaEmbedBody)
    return await OllamaEmbedding(service, request, body, is_old=is_old).answer()


def build_routes(service: Service) -> list[Route]:
    """Return the routes that only language models have."""
    return [
        share(OLLAMA_CHAT, partial(_chat, service)),
        share(OLLAMA_EMBED, partial(_embed, service, is_old=False)),
        share(OLLAMA_EMBEDDINGS, partial(_embed, service, is_old=True)),
    ]
