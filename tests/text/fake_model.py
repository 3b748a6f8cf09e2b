"""A language model that answers as a test says, in place of the runtimes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from clowder_aimage.model.text.language_model import (
    CHAT,
    COMPLETION,
    STOP,
    EmbeddingRequest,
    Embeddings,
    TextDelta,
    TextEnd,
    TextEvent,
    TextRequest,
)

Answer = Sequence[str | TextEvent | BaseException]


@dataclass
class FakeModel:
    """``answer`` returns the pieces of the answer to a request; an exception is raised there.

    ``asked`` are the requests, ``loads`` the arguments of loads, ``closed`` the answers that were
    closed before their end.
    """

    answer: Callable[[TextRequest], Answer]
    asked: list[TextRequest] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)
    closed: int = 0
    capabilities: frozenset[str] = frozenset({CHAT, COMPLETION})
    context: int = 512
    parallel: int = 1
    device: str = "fake"
    dtype: str = "float32"
    warnings: tuple[str, ...] = ()

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the runtimes in this process."""
        runtime = importlib.import_module("clowder_aimage.model.text.runtime")
        monkeypatch.setattr(runtime, "load_language_model", self.load)

    def load(self, *_: object, **options: Any) -> FakeModel:
        """Stand in for ``load_language_model``."""
        self.loads.append(options)
        return self

    def generate(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        """Yield the answer, and its end if it has none."""
        self.asked.append(request)
        said = 0
        try:
            for piece in self.answer(request):
                if isinstance(piece, BaseException):
                    raise piece
                said += 1
                yield TextDelta(piece) if isinstance(piece, str) else piece
                if isinstance(piece, TextEnd):
                    return
        except GeneratorExit:
            self.closed += 1
            raise
        read = sum(len(str(one["content"]).split()) for one in request.messages)
        yield TextEnd(STOP, read, said, 1 if len(request.messages) > 1 else 0, 0.25, 0.5)

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Refuse: no test needs it."""
        raise NotImplementedError
