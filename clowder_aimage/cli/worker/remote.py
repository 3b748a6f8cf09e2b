"""A worker that is reached over HTTP, by OpenAI's API."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.console.output import clean_line, note_once, remark
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.worker.chat_completion import (
    build_completion_fields,
    iter_pieces,
    parse_end,
)
from clowder_aimage.cli.worker.embedding import build_embedding_fields, parse_embeddings
from clowder_aimage.cli.worker.image_generation import build_generation_fields, parse_picture
from clowder_aimage.cli.worker.worker import Announce, PictureTask
from clowder_aimage.errors import NetworkError, NotFoundError
from clowder_aimage.model.text.language_model import (
    EmbeddingRequest,
    Embeddings,
    TextEnd,
    TextEvent,
    TextRequest,
    join_embeddings,
)
from clowder_aimage.pictures.generated_picture import GeneratedPicture

if TYPE_CHECKING:
    from clowder_aimage.engine.worker_client import WorkerClient
    from clowder_aimage.generation.request import GenerateRequest
    from clowder_aimage.oci import Reference

# Texts whose embeddings one reply has: it stays far below the limit of a reply
_TEXTS = 64


@dataclass(frozen=True, slots=True)
class RemoteWorker:
    """A model of a worker; ``label`` names the worker for people.

    Requests raise as ``WorkerClient``. NotFoundError: the worker has another model only.
    FormatError: the reply is not as in OpenAI's API.
    """

    client: WorkerClient
    reference: Reference
    label: str

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
        end = TextEnd("", 0, 0)
        events = self._iter_events("/v1/chat/completions", build_completion_fields(request))
        with closing(events):
            for kind, value in events:
                if kind != "open":
                    yield from iter_pieces(value)
                    end = parse_end(end, value)
        if not end.reason:
            raise self._make_disconnected("answer")
        yield end

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return the embeddings of texts, a request for some of them at a time."""
        remark(f"computing on the {self.label}")
        parts = []
        for start in range(0, len(request.texts), _TEXTS):
            part = replace(request, texts=request.texts[start : start + _TEXTS])
            fields = {"model": str(self.reference), **build_embedding_fields(part)}
            answer = self.client.ask("POST", "/v1/embeddings", fields)
            parts.append(parse_embeddings(answer, len(part.texts)))
            _warn(answer.get("warnings"))
        return join_embeddings(parts)

    def _generate(
        self, fields: Mapping[str, Any], bars: _Bars, index: int, announce: Announce
    ) -> Mapping[str, Any]:
        """Return the last event of picture ``index`` of a run; show the others."""
        with closing(self._iter_events("/v1/images/generations", fields)) as events:
            for kind, value in events:
                if kind == "open":
                    announce(f"rendering on the {self.label}")
                elif kind == "pull":
                    bars.show_pull(value)
                elif kind == "progress":
                    bars.show_steps(value, index)
                elif kind == "done":
                    # Warnings about a model that was pulled first.
                    _warn(value.get("warnings"))
                    return value
        raise self._make_disconnected("picture")

    def _iter_events(
        self, path: str, fields: Mapping[str, Any]
    ) -> Generator[tuple[str, Mapping[str, Any]], None, None]:
        """Yield the events of a reply of the model; print its warnings."""
        body = {"model": str(self.reference), **fields}
        with closing(self.client.iter_events(path, body)) as events:
            for kind, value in events:
                if kind == "open":
                    self._check_model(value)
                    _warn(value.get("x-aimage-warning", "").splitlines())
                yield kind, value

    def _check_model(self, headers: Mapping[str, Any]) -> None:
        """Reject a reply of the worker's default model; accept an alias. Raises NotFoundError."""
        name, used_name = str(self.reference), headers.get("x-aimage-model")
        if used_name not in (None, name) and headers.get("x-aimage-alias") != name:
            raise NotFoundError(
                f"{name} not found on the worker at {self.client.endpoint}, "
                f"which would use {used_name}",
                hint=f"use {used_name}, or pull yours: aimage pull --remote {name}",
            )

    def _make_disconnected(self, result: str) -> NetworkError:
        subject = f"the worker at {self.client.endpoint}"
        return NetworkError(f"{subject} disconnected before the {result} was complete")


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


def _warn(warnings: object) -> None:
    """Print the warnings of a worker, each once."""
    for warning in warnings if isinstance(warnings, list) else ():
        note_once(f"warning: {clean_line(str(warning))}")
