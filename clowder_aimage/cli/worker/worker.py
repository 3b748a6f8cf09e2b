"""The interface of a worker for the command line, and the task of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from clowder_aimage.cli.text.enhance_option import Enhancement
    from clowder_aimage.generation.encoding import Format
    from clowder_aimage.generation.request import GenerateRequest
    from clowder_aimage.model.text.language_model import (
        EmbeddingRequest,
        Embeddings,
        TextEvent,
        TextRequest,
    )
    from clowder_aimage.pictures.generated_picture import GeneratedPicture

# Called with the worker's label before it generates pictures.
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PictureTask:
    """The pictures of a prompt.

    drafts: one for each run of consecutive seeds; they differ in seed and number only. kind: of the
    files, such as png. adds_words: add the trigger words of adapters to the prompt. enhancement: of
    the prompt.
    """

    drafts: tuple[GenerateRequest, ...]
    kind: Format
    adds_words: bool = False
    enhancement: Enhancement | None = None


class Worker(Protocol):
    """A process that generates pictures and answers: this one, or a worker."""

    def prepare(self, draft: GenerateRequest | None) -> None:
        """Load the model for later pictures of such a draft, or for answers (None)."""

    def generate_pictures(
        self, task: PictureTask, announce: Announce
    ) -> Generator[GeneratedPicture, None, None]:
        """Yield pictures as they are completed; closing the generator cancels the others."""

    def answer(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        """Yield the pieces of an answer; closing the generator cancels it."""

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return the embeddings of texts."""
