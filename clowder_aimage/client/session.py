"""The calls of the Python interface that generate, the same for a loaded model and a worker."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Unpack

from clowder_aimage.client.answer import (
    Answer,
    AnswerKeywords,
    Messages,
    OnText,
    build_embedding_request,
    build_text_request,
)
from clowder_aimage.client.picture import Picture
from clowder_aimage.client.picture_order import Lora, PictureOrder
from clowder_aimage.client.progress import Progress, ProgressCounter, count_progress
from clowder_aimage.client.work_thread import IsCancelled, Work, WorkThreads

if TYPE_CHECKING:
    from clowder_aimage.client.picture_order import PictureSource
    from clowder_aimage.generation.keywords import PictureKeywords
    from clowder_aimage.model.text.language_model import EmbeddingRequest, TextRequest


class Session(ABC):
    """Pictures, answers and embeddings of a model, by calls that wait, or that are awaited.

    Any thread may call. Cancelling a task, or an interrupt, cancels the work at its next step.
    """

    def __init__(self, threads: WorkThreads) -> None:
        self._threads = threads

    def generate(
        self,
        prompt: str,
        *,
        image: PictureSource | None = None,
        mask: PictureSource | None = None,
        control: PictureSource | None = None,
        references: Sequence[PictureSource] = (),
        loras: Sequence[Lora] = (),
        size: str | None = None,
        progress: Progress = None,
        **parameters: Unpack[PictureKeywords],
    ) -> list[Picture]:
        """Generate pictures of a prompt, with the seeds ``seed``, ``seed + 1`` and so on.

        None stands for the default of the model; the seed is random. ``image`` is the picture to
        start from, ``mask`` (or "alpha") is white in the painted area, ``control`` guides a
        ControlNet, and ``references`` are the pictures that a model edits: each a ``Picture``, the
        bytes of a file, an array, a path, a URL or the name of an artifact. ``loras`` are adapters:
        names of AImages or files, or pairs of them and their strengths. ``size`` is WIDTHxHEIGHT.
        ``progress`` is called with the steps done and their total; True shows a bar. The other
        parameters are those of ``PictureKeywords``.

        Raises:
            UsageError: It is a language model, or does not support these parameters, or a picture
                cannot be read.
            NotFoundError: A picture does not exist, or an adapter or ControlNet is in neither the
                store nor the registry.
            FormatError: An adapter or ControlNet is damaged, or for another model.
        """
        sources = {"image": image, "mask": mask, "control": control}
        order = PictureOrder.of(prompt, sources, references, loras, size, parameters)
        return self._threads.run(self._make_pictures(order, progress))

    async def agenerate(
        self,
        prompt: str,
        *,
        image: PictureSource | None = None,
        mask: PictureSource | None = None,
        control: PictureSource | None = None,
        references: Sequence[PictureSource] = (),
        loras: Sequence[Lora] = (),
        size: str | None = None,
        progress: Progress = None,
        **parameters: Unpack[PictureKeywords],
    ) -> list[Picture]:
        """Generate pictures as ``generate``, without blocking the event loop."""
        sources = {"image": image, "mask": mask, "control": control}
        order = PictureOrder.of(prompt, sources, references, loras, size, parameters)
        return await self._threads.arun(self._make_pictures(order, progress))

    def chat(
        self,
        messages: Messages,
        *,
        on_text: OnText | None = None,
        **parameters: Unpack[AnswerKeywords],
    ) -> Answer:
        """Answer a text, or the messages of a chat as in OpenAI's API.

        ``on_text`` is called with each piece of the answer. The other parameters are those of
        ``AnswerKeywords``.

        Raises:
            UsageError: It is not a language model, or does not support these parameters, or the
                prompt is too long.
        """
        request = build_text_request(messages, parameters)
        return self._threads.run(lambda is_cancelled: self._answer(request, on_text, is_cancelled))

    async def achat(
        self,
        messages: Messages,
        *,
        on_text: OnText | None = None,
        **parameters: Unpack[AnswerKeywords],
    ) -> Answer:
        """Answer as ``chat``, without blocking the event loop."""
        request = build_text_request(messages, parameters)
        return await self._threads.arun(
            lambda is_cancelled: self._answer(request, on_text, is_cancelled)
        )

    def embed(
        self, texts: str | Sequence[str], *, prompt: str | None = None
    ) -> list[tuple[float, ...]]:
        """Return the embeddings of texts, of unit length; ``prompt`` names one of the model's.

        Warns (RuntimeWarning) of texts that are too long, and were cut.

        Raises:
            UsageError: The model computes no embeddings, or has no such prompt.
        """
        request = build_embedding_request(texts, prompt)
        return self._threads.run(lambda is_cancelled: self._embed(request, is_cancelled))

    async def aembed(
        self, texts: str | Sequence[str], *, prompt: str | None = None
    ) -> list[tuple[float, ...]]:
        """Return embeddings as ``embed``, without blocking the event loop."""
        request = build_embedding_request(texts, prompt)
        return await self._threads.arun(lambda is_cancelled: self._embed(request, is_cancelled))

    def _make_pictures(self, order: PictureOrder, progress: Progress) -> Work[list[Picture]]:
        def work(is_cancelled: IsCancelled) -> list[Picture]:
            with count_progress(progress, "rendering", is_bytes=False) as counter:
                return self._generate(order, counter, is_cancelled)

        return work

    @abstractmethod
    def _generate(
        self, order: PictureOrder, counter: ProgressCounter, is_cancelled: IsCancelled
    ) -> list[Picture]:
        """Return the pictures of an order; called in a work thread."""

    @abstractmethod
    def _answer(
        self, request: TextRequest, on_text: OnText | None, is_cancelled: IsCancelled
    ) -> Answer:
        """Return an answer; called in a work thread."""

    @abstractmethod
    def _embed(
        self, request: EmbeddingRequest, is_cancelled: IsCancelled
    ) -> list[tuple[float, ...]]:
        """Return embeddings; called in a work thread."""


def warn(sentences: Iterable[str]) -> None:
    """Warn of each sentence once. The stack is that of a work thread."""
    for sentence in dict.fromkeys(sentences):
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)
