"""A language model in this process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clowder_aimage.cli.console.option import get_settings
from clowder_aimage.cli.console.output import note_once
from clowder_aimage.cli.worker.local_model import LocalOptions, fetch_model
from clowder_aimage.model.text.language_model import (
    EmbeddingRequest,
    Embeddings,
    TextEvent,
    TextNotice,
    TextRequest,
    join_embeddings,
)

if TYPE_CHECKING:
    from clowder_aimage.model.text.language_model import LanguageModel
    from clowder_aimage.oci import Reference

_SHORT = {"f32": "float32", "bf16": "bfloat16"}


@dataclass(slots=True)
class LocalLanguageModel:
    """A language model that is pulled and loaded when it is first used."""

    reference: Reference
    options: LocalOptions
    # The name with the digest, once the model is loaded.
    name: str = ""
    _loaded: LanguageModel | None = None

    def load(self) -> LanguageModel:
        """Return the loaded model. Raises as ``local_fetch.fetch`` and ``load_language_model``."""
        if self._loaded is None:
            from clowder_aimage.engine.local_fetch import check_language_model
            from clowder_aimage.model.stored_ability import find_ability
            from clowder_aimage.model.text.runtime import load_language_model

            fetched = fetch_model(self.reference, check=check_language_model)
            stored = fetched.aimage.stored
            self.name = f"{self.reference.name}@{stored.descriptor.digest}"
            fetched.end()
            layout, digest = get_settings().layout, stored.descriptor.digest
            find_ability(layout, digest, stored.aimage).check(self.reference)
            fetched.say_loading(all_layers=True)
            dtype, memory = self.options.dtype, self.options.memory
            dtype = dtype and _SHORT.get(dtype, dtype)
            files, aimage = fetched.aimage.files, stored.aimage
            self._loaded = load_language_model(files, aimage, dtype=dtype, memory=memory)
            for warning in self._loaded.warnings:
                note_once(f"warning: {warning}")
        return self._loaded

    def answer(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        """Yield the pieces of an answer; closing the generator ends it."""
        with contextlib.closing(self.load().generate(request)) as events:
            for event in events:
                if isinstance(event, TextNotice):
                    for warning in event.warnings:
                        note_once(f"warning: {warning}")
                yield event

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return the embeddings of texts, which are computed in batches of bounded memory."""
        model = self.load()
        return join_embeddings([model.embed(batch) for batch in request.iter_batches()])

    def unload(self) -> None:
        """Free the memory of the model. It is loaded again for the next request."""
        self._loaded = None
        gc.collect()
