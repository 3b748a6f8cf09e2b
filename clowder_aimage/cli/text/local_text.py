"""A language model in this process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clowder_aimage.cli.console.local_model import fetch_model
from clowder_aimage.cli.console.output import size
from clowder_aimage.model.text.language_model import TextEvent, TextRequest

if TYPE_CHECKING:
    from clowder_aimage.model.text.language_model import LanguageModel
    from clowder_aimage.oci import Reference

_SHORT = {"f32": "float32", "bf16": "bfloat16"}


@dataclass(slots=True)
class LocalLanguageModel:
    """A language model that is pulled and loaded when it is first used.

    memory: bytes that it may take; None for the machine's memory.
    """

    reference: Reference
    dtype: str | None = None
    memory: int | None = None
    name: str = ""  # with the digest, once it is loaded
    _loaded: list[LanguageModel] = field(default_factory=list)

    def load(self) -> LanguageModel:
        """Return the loaded model. Raises as ``local_fetch.fetch`` and ``load_language_model``."""
        if not self._loaded:
            from clowder_aimage.engine.local_fetch import check_language_model
            from clowder_aimage.model.text.runtime import load_language_model

            fetched = fetch_model(self.reference, check=check_language_model)
            stored = fetched.found.stored
            aimage, self.name = stored.aimage, f"{self.reference.name}@{stored.descriptor.digest}"
            fetched.end()
            weights = sum(layer.descriptor.size for layer in aimage.layers)
            fetched.progress.remark(f"loading {size(weights)}")
            dtype = self.dtype and _SHORT.get(self.dtype, self.dtype)
            model = load_language_model(
                fetched.found.files, aimage, dtype=dtype, memory=self.memory
            )
            self._loaded.append(model)
        return self._loaded[0]

    def answer(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        """Yield the pieces of an answer; closing the generator ends it."""
        with contextlib.closing(self.load().generate(request)) as events:
            yield from events

    def let_go(self) -> None:
        """Free the memory of the model, which is loaded again when it is used again."""
        self._loaded.clear()
        gc.collect()
