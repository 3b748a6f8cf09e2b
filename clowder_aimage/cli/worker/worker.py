"""A worker as the command line knows it, and the pictures that it generates."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from clowder_aimage.cli.text.enhance_option import Enhancement
    from clowder_aimage.model.text.language_model import TextEvent, TextRequest
    from clowder_aimage.pictures.made_picture import MadePicture

Announce = Callable[[str], None]  # called with the place before pictures are generated there


@dataclass(frozen=True, slots=True)
class PictureTask:
    """The pictures of a prompt.

    parameters: by their names in interfaces, without seed and number; None is the model's default.
    runs: the first of consecutive seeds, and their number. kind: of the files, such as png.
    adds_words: add the trigger words of adapters to the prompt. enhancement: of the prompt.
    """

    parameters: Mapping[str, Any]
    runs: tuple[tuple[int, int], ...]
    kind: str
    adds_words: bool = False
    enhancement: Enhancement | None = None


class Worker(Protocol):
    """A process that generates pictures and answers: this one, or a worker."""

    def prepare(self, parameters: Mapping[str, Any] | None) -> None:
        """Load what later pictures with such parameters need, or answers (None)."""

    def pictures(self, task: PictureTask, announce: Announce) -> Generator[MadePicture, None, None]:
        """Yield pictures as they are completed; closing the generator cancels the others."""

    def answer(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        """Yield the pieces of an answer; closing the generator cancels it."""
