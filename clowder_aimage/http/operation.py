"""Operations: the descriptions of routes for clients. They make up the OpenAPI document.

An operation is a constant beside its handlers. A worker and a gateway serve the same operation by
different handlers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

# Bytes: ample for a prompt and its parameters
BODY = 1 << 20
JSON = "application/json"
# Errors of operations that pull or push
TRANSFERS = (404, 502, 503, 504, 507)
# Errors of operations that need a model, and may pull it first
COMPUTES = (*TRANSFERS, 422)


@dataclass(frozen=True, slots=True)
class Tag:
    """A group of operations."""

    name: str
    description: str


HEALTH = Tag("health", "Health, metrics, events and this description.")
OPENAI = Tag("openai", "OpenAI's APIs for images, chats, completions and embeddings.")
BATCH = Tag("batch", "OpenAI's APIs of files and batches.")
STORE = Tag("store", "The store: sizes, referrers, adapters and jobs.")
OLLAMA = Tag("ollama", "ollama's API for images and texts.")
CONTENT = Tag("content", "Clowder's storage API.")
PAGE = Tag("page", "The page for browsers.")


@dataclass(frozen=True, slots=True)
class Answer:
    """A response that is not an error.

    ``body`` is the type of its JSON; ``media`` are other media types that it may have; ``headers``
    are descriptions by name.
    """

    description: str
    body: object = None
    status: int = 200
    media: tuple[str, ...] = ()
    headers: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """A method and a path with their description for clients.

    ``name`` identifies it, as a function in generated clients. ``limit`` is that of the body, as of
    ``Route``. ``body`` is the type of the JSON body, ``form`` of a multipart one. ``path_fields``,
    ``query`` and ``headers`` are the types of the parameters. ``refusals`` are the statuses of
    errors other than those that follow from the scope and the body.
    """

    method: str
    path: str
    scope: str
    tag: Tag
    name: str
    summary: str
    answers: tuple[Answer, ...]
    details: str = ""
    limit: int | None = BODY
    body: object = None
    form: object = None
    path_fields: type | None = None
    query: type | None = None
    headers: type | None = None
    refusals: tuple[int, ...] = ()
    has_head: bool = True

    def with_refusals(self, *statuses: int) -> Operation:
        """Return the operation of a server that has more reasons to refuse it."""
        return replace(self, refusals=tuple({*self.refusals, *statuses}))
