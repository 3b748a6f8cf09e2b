"""This process as a worker: it loads models itself."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clowder_aimage.cli.worker.enhancer import LocalEnhancer
from clowder_aimage.cli.worker.image_model import LocalImageModel
from clowder_aimage.cli.worker.language_model import LocalLanguageModel
from clowder_aimage.cli.worker.local_model import LocalOptions
from clowder_aimage.cli.worker.worker import Announce, PictureTask

if TYPE_CHECKING:
    from clowder_aimage.generation.request import GenerateRequest
    from clowder_aimage.model.text.language_model import (
        EmbeddingRequest,
        Embeddings,
        TextEvent,
        TextRequest,
    )
    from clowder_aimage.oci import Reference
    from clowder_aimage.pictures.generated_picture import GeneratedPicture


@dataclass(slots=True)
class LocalWorker:
    """A model in this process. It stays loaded between prompts."""

    reference: Reference
    options: LocalOptions
    _image_model: LocalImageModel | None = None
    _language_model: LocalLanguageModel = field(init=False)
    _enhancer: LocalEnhancer = field(init=False)

    def __post_init__(self) -> None:
        self._language_model = LocalLanguageModel(self.reference, self.options)
        self._enhancer = LocalEnhancer(self.reference, self.options)

    def prepare(self, draft: GenerateRequest | None) -> None:
        """Load the model. Raises as ``LocalImageModel`` and ``LocalLanguageModel``."""
        if draft is None:
            self._language_model.load()
        else:
            self._open(draft).load(draft, is_last=False)

    def generate_pictures(
        self, task: PictureTask, announce: Announce
    ) -> Generator[GeneratedPicture, None, None]:
        """Yield pictures; a prompt is enhanced before the image model is loaded."""
        drafts = task.drafts
        if task.enhancement is not None:
            drafts = tuple(self._enhancer.write(task.enhancement, drafts))
        model = self._open(drafts[0])
        is_last = self.options.is_last and len(drafts) == 1
        for draft in drafts:
            pictures = model.generate(draft, task, announce, is_last=is_last)
            with contextlib.closing(pictures):
                yield from pictures

    def answer(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        """Yield the pieces of an answer."""
        return self._language_model.answer(request)

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return the embeddings of texts."""
        return self._language_model.embed(request)

    def _open(self, draft: GenerateRequest) -> LocalImageModel:
        if self._image_model is None:
            self._image_model = LocalImageModel.open(self.reference, self.options, draft)
        return self._image_model
