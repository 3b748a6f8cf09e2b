"""A model of a worker, by OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from clowder_aimage.engine.remote.chat_completion import (
    build_completion_fields,
    iter_pieces,
    parse_end,
)
from clowder_aimage.engine.remote.embedding import build_embedding_fields, parse_embeddings
from clowder_aimage.engine.worker_client import COMMENT, WorkerClient
from clowder_aimage.errors import NetworkError, NotFoundError
from clowder_aimage.model.text.language_model import (
    EmbeddingRequest,
    Embeddings,
    TextDelta,
    TextEnd,
    TextEvent,
    TextRequest,
    join_embeddings,
)
from clowder_aimage.oci import Reference

# Texts whose embeddings one reply has: it stays far below the limit of a reply
_TEXTS = 64
OnWarning = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model of a worker; without a name it is the default of the worker.

    Requests raise as ``WorkerClient``. NotFoundError: the worker has another model only.
    FormatError: the reply is not as in OpenAI's API. ``on_warning`` is called with the sentences
    of the worker.
    """

    client: WorkerClient
    reference: Reference | None
    on_warning: OnWarning

    def iter_picture(
        self, fields: Mapping[str, Any]
    ) -> Generator[tuple[str, Mapping[str, Any]], None, None]:
        """Yield the events of a picture: ``open``, ``pull``, ``progress``, and last ``done``.

        A COMMENT may come between them.
        """
        with closing(self._iter_events("/v1/images/generations", fields)) as events:
            for kind, value in events:
                if kind == "done":
                    # Warnings about a model that was pulled first.
                    self._warn(value.get("warnings"))
                yield kind, value
                if kind == "done":
                    return
        raise self._make_disconnected("picture")

    def answer(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        """Yield the pieces of an answer; closing the generator cancels it."""
        end = TextEnd("", 0, 0)
        events = self._iter_events("/v1/chat/completions", build_completion_fields(request))
        with closing(events):
            for kind, value in events:
                if kind == COMMENT:
                    yield TextDelta("")
                elif kind != "open":
                    yield from iter_pieces(value)
                    end = parse_end(end, value)
        if not end.reason:
            raise self._make_disconnected("answer")
        yield end

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return the embeddings of texts, a request for some of them at a time."""
        parts = []
        for start in range(0, len(request.texts), _TEXTS):
            part = replace(request, texts=request.texts[start : start + _TEXTS])
            body = self._name_model(build_embedding_fields(part))
            answer = self.client.ask("POST", "/v1/embeddings", body)
            parts.append(parse_embeddings(answer, len(part.texts)))
            self._warn(answer.get("warnings"))
        return join_embeddings(parts)

    def _iter_events(
        self, path: str, fields: Mapping[str, Any]
    ) -> Generator[tuple[str, Mapping[str, Any]], None, None]:
        """Yield the events of a reply of the model; report its warnings."""
        with closing(self.client.iter_events(path, self._name_model(fields))) as events:
            for kind, value in events:
                if kind == "open":
                    self._check_model(value)
                    self._warn(value.get("x-aimage-warning", "").splitlines())
                yield kind, value

    def _name_model(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        named = {} if self.reference is None else {"model": str(self.reference)}
        return {**named, **fields}

    def _check_model(self, headers: Mapping[str, Any]) -> None:
        """Reject a reply of the worker's default model; accept an alias. Raises NotFoundError."""
        used_name = headers.get("x-aimage-model")
        if self.reference is None or used_name is None:
            return
        name = str(self.reference)
        if used_name != name and headers.get("x-aimage-alias") != name:
            raise NotFoundError(
                f"{name} not found on the worker at {self.client.endpoint}, "
                f"which would use {used_name}",
                remedy="model_of_worker",
                name=name,
                used=used_name,
            )

    def _make_disconnected(self, result: str) -> NetworkError:
        subject = f"the worker at {self.client.endpoint}"
        return NetworkError(f"{subject} disconnected before the {result} was complete")

    def _warn(self, warnings: object) -> None:
        for warning in warnings if isinstance(warnings, list) else ():
            self.on_warning(str(warning))
