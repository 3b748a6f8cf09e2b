"""Workers that are reached over HTTP, in the Python interface."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clowder_aimage.client.answer import Answer, OnText, collect_answer
from clowder_aimage.client.picture import Picture, PictureFile
from clowder_aimage.client.picture_order import PictureOrder
from clowder_aimage.client.progress import ProgressCounter
from clowder_aimage.client.registry import Name, to_reference
from clowder_aimage.client.session import Session, warn
from clowder_aimage.client.store import open_layout
from clowder_aimage.client.work_thread import IsCancelled, WorkThreads, check_cancelled
from clowder_aimage.config.user_directory import (
    read_client_options,
    read_worker_host,
    read_worker_token,
)
from clowder_aimage.engine.endpoint import DEFAULT_HOST
from clowder_aimage.engine.remote.image_generation import (
    build_draft_fields,
    build_lora_fields,
    parse_picture,
)
from clowder_aimage.engine.remote.model import RemoteModel
from clowder_aimage.engine.worker_client import WorkerClient
from clowder_aimage.model.text.language_model import EmbeddingRequest, TextRequest

if TYPE_CHECKING:
    from clowder_aimage.pictures.input_file import InputFile
    from clowder_aimage.pictures.input_source import InputSource

# Calls at once: further ones wait.
_CALLS = 16


class Worker(Session):
    """A worker (``aimage serve``), with the calls of a ``Model``.

    Several calls may run at once.

    Args:
        url: The address, such as http://gpu:11434; by default that in AIMAGE_HOST, else that
            of a worker on this machine, with the token in AIMAGE_TOKEN or AIMAGE_TOKEN_FILE.
        token: The token for a worker that requires one.
        model: The name of its model; by default the worker's default model.
    """

    def __init__(
        self, url: str | None = None, *, token: str | None = None, model: Name | None = None
    ) -> None:
        super().__init__(WorkThreads("aimage-worker", _CALLS))
        if url is None:
            url, token = read_worker_host(), token or read_worker_token()
        self._client = WorkerClient(url or DEFAULT_HOST, token)
        self.model = None if model is None else str(to_reference(model))

    @property
    def url(self) -> str:
        """Return the address of the worker."""
        return str(self._client.endpoint)

    def __repr__(self) -> str:
        named = "" if self.model is None else f", model={self.model!r}"
        return f"Worker({self.url!r}{named})"

    def _generate(
        self, order: PictureOrder, counter: ProgressCounter, is_cancelled: IsCancelled
    ) -> list[Picture]:
        files, sentences = dict[str, bytes](), list[str]()

        def add(data: bytes, label: str) -> InputFile:
            from clowder_aimage.pictures.input import inspect

            file = inspect(data, label)
            files[str(file.descriptor.digest)] = data
            return file

        draft, _ = order.read(_create_reader, add)
        hint = "name an AImage that the worker has"
        fields = build_draft_fields(draft, "png", files)
        fields |= build_lora_fields(draft.adapters.loras, hint)
        pictures, count = list[Picture](), draft.output.n
        for index in range(count):
            seed = draft.sampling.seed + index
            value: Any = {}
            model = self._open_model(sentences)
            with closing(model.iter_picture({**fields, "seed": seed})) as events:
                for kind, value in events:
                    check_cancelled(is_cancelled)
                    step, total = value.get("step"), value.get("total")
                    if kind == "progress" and type(step) is int and type(total) is int:
                        counter.show(index * total + step, count * total)
            made = parse_picture(value, seed, "png")
            pictures.append(PictureFile(made.data, seed, made.facts))
        stated = {text for picture in pictures for text in picture.facts.get("warnings", ())}
        warn(sentence for sentence in sentences if sentence not in stated)
        return pictures

    def _answer(
        self, request: TextRequest, on_text: OnText | None, is_cancelled: IsCancelled
    ) -> Answer:
        sentences = list[str]()
        answer = collect_answer(self._open_model(sentences).answer(request), on_text, is_cancelled)
        return replace(answer, warnings=tuple(dict.fromkeys(sentences)))

    def _embed(self, request: EmbeddingRequest, _: IsCancelled) -> list[tuple[float, ...]]:
        sentences = list[str]()
        vectors = self._open_model(sentences).embed(request).vectors
        warn(sentences)
        return list(vectors)

    def _open_model(self, sentences: list[str]) -> RemoteModel:
        """Return the model; its warnings are added to ``sentences``."""
        reference = None if self.model is None else to_reference(self.model)
        return RemoteModel(self._client, reference, sentences.append)


def _create_reader() -> InputSource:
    from clowder_aimage.pictures.input_source import InputSource

    return InputSource(open_layout(None), read_client_options, hosts=None, has_files=True)
