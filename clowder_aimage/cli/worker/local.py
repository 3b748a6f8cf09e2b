"""This process as a worker: it loads models itself."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.worker.enhancer import LocalEnhancer
from clowder_aimage.cli.worker.image_model import LocalImageModel
from clowder_aimage.cli.worker.language_model import LocalLanguageModel
from clowder_aimage.cli.worker.local_model import LocalOptions
from clowder_aimage.cli.worker.worker import Announce, PictureTask

if TYPE_CHECKING:
    from clowder_aimage.model.text.language_model import TextEvent, TextRequest
    from clowder_aimage.oci import Reference
    from clowder_aimage.pictures.made_picture import MadePicture


@dataclass(slots=True)
class LocalWorker:
    """A model in this process, which stays loaded between prompts."""

    reference: Reference
    options: LocalOptions
    _image_model: LocalImageModel | None = None
    _language_model: LocalLanguageModel = field(init=False)
    _enhancer: LocalEnhancer = field(init=False)

    def __post_init__(self) -> None:
        self._language_model = LocalLanguageModel(self.reference, self.options)
        self._enhancer = LocalEnhancer(self.reference, self.options)

    def prepare(self, parameters: Mapping[str, Any] | None) -> None:
        """Load the model. Raises as ``LocalImageModel`` and ``LocalLanguageModel``."""
        if parameters is None:
            self._language_model.load()
        else:
            self._open(parameters).load(parameters, is_last=False)

    def pictures(self, task: PictureTask, announce: Announce) -> Generator[MadePicture, None, None]:
        """Yield pictures; a prompt is enhanced before the image model is loaded."""
        runs = self._runs(task)
        model = self._open(runs[0])
        is_last = self.options.is_last and len(runs) == 1
        for run in runs:
            pictures = model.generate(run, task, announce, is_last=is_last)
            with contextlib.closing(pictures):
                yield from pictures

    def answer(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        """Yield the pieces of an answer."""
        return self._language_model.answer(request)

    def _open(self, parameters: Mapping[str, Any]) -> LocalImageModel:
        if self._image_model is None:
            self._image_model = LocalImageModel.open(self.reference, self.options, parameters)
        return self._image_model

    def _runs(self, task: PictureTask) -> list[Mapping[str, Any]]:
        """Return the parameters of each run of seeds; of each seed, if prompts are enhanced."""
        if task.enhancement is None:
            return [{**task.parameters, "seed": seed, "n": count} for seed, count in task.runs]
        runs = list[Mapping[str, Any]]()
        for seed in (first + index for first, count in task.runs for index in range(count)):
            changed = self._enhancer.write(task.enhancement, task.parameters["prompt"], seed)
            runs.append({**task.parameters, "seed": seed, "n": 1, **changed})
        self._enhancer.free_memory()
        return runs
