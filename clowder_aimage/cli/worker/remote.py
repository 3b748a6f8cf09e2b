"""A worker that is reached over HTTP."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.console.output import clean_line, note_once, remark
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.worker.image_generation import build_generation_fields
from clowder_aimage.cli.worker.worker import Announce, PictureTask
from clowder_aimage.engine.remote.image_generation import parse_picture
from clowder_aimage.engine.remote.model import RemoteModel
from clowder_aimage.model.text.language_model import (
    EmbeddingRequest,
    Embeddings,
    TextEvent,
    TextRequest,
)
from clowder_aimage.pictures.generated_picture import GeneratedPicture

if TYPE_CHECKING:
    from clowder_aimage.engine.worker_client import WorkerClient
    from clowder_aimage.generation.request import GenerateRequest
    from clowder_aimage.oci import Reference


@dataclass(frozen=True, slots=True)
class RemoteWorker:
    """A model of a worker; ``label`` names the worker for people.

    Requests raise as ``RemoteModel``.
    """

    client: WorkerClient
    reference: Reference
    label: str

    @property
    def _model(self) -> RemoteModel:
        return RemoteModel(self.client, self.reference, _warn)

    def prepare(self, draft: GenerateRequest | None) -> None:
        """Print the label for answers; that for pictures is announced with each prompt."""
        if draft is None:
            remark(f"answering on the {self.label}")

    def generate_pictures(
        self, task: PictureTask, announce: Announce
    ) -> Generator[GeneratedPicture, None, None]:
        """Yield pictures, and show a bar of the steps.

        Each is a request of its own: a finished picture can be kept, and other clients are served
        in between.
        """
        fields = build_generation_fields(self.client, task)
        for draft in task.drafts:
            first_seed, count = draft.sampling.seed, draft.output.n
            with ExitStack() as stack:
                bars = _Bars(self.reference, count, stack)
                for index in range(count):
                    seed = first_seed + index
                    reply = self._generate({**fields, "seed": seed}, bars, index, announce)
                    picture = parse_picture(reply, seed, task.kind)
                    if "original_prompt" in picture.facts:
                        remark(f"prompt: {clean_line(str(picture.facts.get('prompt')))}")
                    yield picture

    def answer(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        """Yield the pieces of an answer; closing the generator cancels it."""
        return self._model.answer(request)

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return the embeddings of texts."""
        remark(f"computing on the {self.label}")
        return self._model.embed(request)

    def _generate(
        self, fields: Mapping[str, Any], bars: _Bars, index: int, announce: Announce
    ) -> Mapping[str, Any]:
        """Return the last event of picture ``index`` of a run; show the others."""
        value: Mapping[str, Any] = {}
        with closing(self._model.iter_picture(fields)) as events:
            for kind, value in events:
                if kind == "open":
                    announce(f"rendering on the {self.label}")
                elif kind == "pull":
                    bars.show_pull(value)
                elif kind == "progress":
                    bars.show_steps(value, index)
        return value


class _Bars:
    """The bars of a run of pictures: a pull is shown until the first step."""

    _progress: Progress

    def __init__(self, reference: Reference, count: int, stack: ExitStack) -> None:
        self._reference, self._count, self._stack = reference, count, stack
        self._unit = ""

    def show_pull(self, value: Mapping[str, Any]) -> None:
        """Show the bytes of a pull by the worker."""
        progress = self._begin("pulling", self._reference, "bytes")
        progress.show(value.get("completed"), value.get("total"))

    def show_steps(self, value: Mapping[str, Any], index: int) -> None:
        """Show the steps of picture ``index``; all pictures have the same number of steps."""
        step, total = value.get("step"), value.get("total")
        if type(step) is int and type(total) is int:
            progress = self._begin("rendering", None, "steps")
            progress.show(index * total + step, self._count * total)
            progress.rename("decoding" if step == total else "rendering")

    def _begin(self, task: str, subject: Reference | None, unit: str) -> Progress:
        """Return the bar of a unit. It replaces the bar of another unit."""
        if unit != self._unit:
            self._stack.close()
            self._progress = self._stack.enter_context(Progress(task, subject, unit=unit))
            self._unit = unit
        return self._progress


def _warn(warning: str) -> None:
    """Print a warning of a worker, once."""
    note_once(f"warning: {clean_line(warning)}")
