"""Prompts of pictures that a language model in this process writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clowder_aimage.cli.console.option import get_settings
from clowder_aimage.cli.console.output import remark
from clowder_aimage.cli.create.named_model import obtain
from clowder_aimage.cli.text.enhance_option import Enhancement
from clowder_aimage.cli.worker.language_model import LocalLanguageModel
from clowder_aimage.cli.worker.local_model import LocalOptions
from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.config.name_index import NamedModel

# Bytes in memory for each byte of weights.
_FACTOR = 1.3


@dataclass(slots=True)
class LocalEnhancer:
    """A language model in this process that writes prompts.

    picture_model: the AImage that the prompts are for.
    """

    picture_model: Reference
    options: LocalOptions
    _model: LocalLanguageModel | None = None
    # As the user named the model.
    _name: Reference | None = None

    def write(
        self, enhancement: Enhancement, drafts: Iterable[GenerateRequest]
    ) -> list[GenerateRequest]:
        """Return a draft for each picture, whose prompt is written for its seed.

        Raises as ``LocalLanguageModel``, and ModelError.
        """
        written = []
        for draft in drafts:
            first_seed = draft.sampling.seed
            for seed in range(first_seed, first_seed + draft.output.n):
                written.append(self._write(enhancement, draft.change(seed=seed, n=1)))
        self._free_memory()
        return written

    def _write(self, enhancement: Enhancement, draft: GenerateRequest) -> GenerateRequest:
        from clowder_aimage.model.text.enhancement import build_enhancement_request, collect_prompt

        reference = enhancement.model or _resolve_default_model()
        if self._model is None or self._name != reference:
            # Frees the memory before the load.
            self._model = None
            self._model = LocalLanguageModel(obtain(reference, check_enhancer), self.options)
            self._name = reference
        prompt, seed = draft.prompt, draft.sampling.seed
        request = build_enhancement_request(prompt, seed, enhancement.instruction)
        with contextlib.closing(self._model.answer(request)) as events:
            text = collect_prompt(events)
        remark(f"prompt: {text}")
        return draft.change(prompt=text, original_prompt=prompt, enhancer=self._model.name)

    def _free_memory(self) -> None:
        """Unload the language model, unless other prompts follow and there is memory for both."""
        if self._model is not None and (self.options.is_last or not self._has_memory()):
            self._model.unload()

    def _has_memory(self) -> bool:
        """Return True if the language model can stay while pictures are generated."""
        from clowder_aimage.engine.machine import read_available_memory
        from clowder_aimage.layout.stored_aimage import read_aimage

        try:
            layers = read_aimage(get_settings().layout, self.picture_model).aimage.layers
        except NotFoundError:
            return False
        weights = sum(layer.descriptor.size for layer in layers if layer.is_tensor)
        free = read_available_memory()
        return free is not None and free >= _FACTOR * weights


def check_enhancer(model: NamedModel) -> None:
    """Reject an image model before a download. Raises UsageError."""
    if model.kind == "image":
        raise UsageError(f"{model.name} is not a language model: it enhances no prompts")


def _resolve_default_model() -> Reference:
    """Return the language model of the environment or the configuration. Raises UsageError."""
    from clowder_aimage.config.user_directory import read_user_configuration

    name = os.environ.get("AIMAGE_ENHANCER", "").strip()
    name = name or read_user_configuration(lambda it: str(it.get("run", {}).get("enhancer", "")))
    if not name:
        raise UsageError("no language model is named for --enhance", remedy="name_enhancer")
    return Reference.parse(name)
