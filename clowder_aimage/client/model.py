"""Models that this process loads, in the Python interface."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from clowder_aimage.client.answer import Answer, OnText, collect_answer
from clowder_aimage.client.picture import Picture
from clowder_aimage.client.picture_order import PictureOrder
from clowder_aimage.client.progress import Progress, ProgressCounter, count_progress
from clowder_aimage.client.registry import Name, Registry, connect, to_reference
from clowder_aimage.client.session import Session, warn
from clowder_aimage.client.store import Store, open_layout
from clowder_aimage.client.transfer import create_finder
from clowder_aimage.client.work_thread import IsCancelled, WorkThreads, check_cancelled
from clowder_aimage.content.copy_option import CopyEvent
from clowder_aimage.errors import UsageError, needs
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.text.language_model import Embeddings, join_embeddings
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from clowder_aimage.content import Lease
    from clowder_aimage.engine.local_fetch import Check, FetchedAImage
    from clowder_aimage.generate import RunnableModel
    from clowder_aimage.layout import ImageLayout
    from clowder_aimage.model.adapter_source import AdapterFinder
    from clowder_aimage.model.library_choice import TorchTuning
    from clowder_aimage.model.text.language_model import (
        EmbeddingRequest,
        LanguageModel,
        TextRequest,
    )
    from clowder_aimage.pictures.input_file import InputFile
    from clowder_aimage.pictures.input_source import InputSource
    from clowder_aimage.registry import ClientOptions


@dataclass(frozen=True, slots=True)
class _ImageModel:
    """A loaded image model, its adapters, and a reader of pictures."""

    loaded: RunnableModel
    finder: AdapterFinder
    layout: ImageLayout
    reader: Callable[[], InputSource]

    def request(self, order: PictureOrder, lease: Lease) -> GenerateRequest:
        """Return the request of an order; its pictures are kept in the store."""
        from clowder_aimage.pictures.input_kind import own_sized

        def add(data: bytes, label: str) -> InputFile:
            from clowder_aimage.pictures.input import keep

            return keep(self.layout, lease, data, label)

        base = self.loaded.stored.aimage
        draft, first_file = order.read(self.reader, add)
        request = own_sized(draft, first_file).apply_defaults(base)
        return self.finder.resolve(request, base, self.layout)[0]


class Model(Session):
    """A loaded model. Close it, or use ``with``.

    It has a thread of its own, which does the calls of all threads, one after another.
    """

    def __init__(
        self,
        reference: Reference,
        loaded: _ImageModel | LanguageModel,
        threads: WorkThreads,
        resources: ExitStack,
    ) -> None:
        super().__init__(threads)
        self.reference = reference
        self._loaded = loaded
        self._resources = resources

    def __repr__(self) -> str:
        return f"<Model {self.reference}>"

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the call that runs, and release the model's blobs, so that gc may remove them.

        A closed model cannot be used.
        """
        self._threads.close()
        self._resources.close()

    def _generate(
        self, order: PictureOrder, counter: ProgressCounter, is_cancelled: IsCancelled
    ) -> list[Picture]:
        from clowder_aimage.generate import describe_picture
        from clowder_aimage.model.pipeline import Image, Step

        if not isinstance(self._loaded, _ImageModel):
            message = f"{self.reference} is a language model, which does not generate pictures"
            raise UsageError(message)
        model, pictures = self._loaded.loaded, list[Picture]()
        with self._loaded.layout.lease() as lease:
            request = self._loaded.request(order, lease)
            events, total = model.generate(request), request.sampling.steps * request.output.n
            counter.begin(total)
            marking = model.plan_marking(request)
            facts = describe_picture(self.reference, model, request, marking)
            with closing(events):
                for event in events:
                    check_cancelled(is_cancelled)
                    if isinstance(event, Image):
                        made = {"forward": event.forward, "seed": event.seed, "batch": event.batch}
                        stated = facts | made
                        pictures.append(Picture(event.pixels, event.seed, stated, marking.mark))
                    elif isinstance(event, Step):
                        # With an image there are fewer steps.
                        if total != (total := event.total * request.output.n):
                            counter.begin(total)
                        counter.advance(1)
        return pictures

    def _answer(
        self, request: TextRequest, on_text: OnText | None, is_cancelled: IsCancelled
    ) -> Answer:
        events = self._get_language_model().generate(request)
        return collect_answer(events, on_text, is_cancelled)

    def _embed(
        self, request: EmbeddingRequest, is_cancelled: IsCancelled
    ) -> list[tuple[float, ...]]:
        model, parts = self._get_language_model(), list[Embeddings]()
        for batch in request.iter_batches():
            check_cancelled(is_cancelled)
            parts.append(model.embed(batch))
        joined = join_embeddings(parts)
        warn(joined.list_warnings())
        return list(joined.vectors)

    def _get_language_model(self) -> LanguageModel:
        if isinstance(self._loaded, _ImageModel):
            raise UsageError(f"{self.reference} is not a language model")
        return self._loaded


def load(
    name: Name,
    *,
    store: Store | None = None,
    registry: Registry | None = None,
    backend: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    progress: Progress = None,
) -> Model:
    """Load a model, and pull it first if the store lacks it.

    ``backend`` is mlx or torch; the default depends on the installed extras and the GPU. ``dtype``
    is float32 or bfloat16; the default depends on the device. ``device`` is one of torch, such as
    cuda:1. Language models have neither backend nor device. ``progress`` is called as by ``pull``.
    Warns (RuntimeWarning) of a GPU that cannot be used.

    Raises:
        UsageError: The extra of the backend is not installed, the type is unknown, or there is no
            such device.
        NotFoundError: The AImage is in neither the store nor the registry. Also as ``pull``.
        ModelError: It cannot be run.
    """
    reference, layout = to_reference(name), open_layout(store)
    connect_once = cache(partial(connect, reference, registry))
    # A name of another registry is refused at once.
    if registry is not None:
        connect_once()
    threads = WorkThreads("aimage-model")
    place = _Place(reference, layout, connect_once, backend, dtype, device)
    try:
        with count_progress(progress, "loading") as counter:
            loaded, sentences, resources = threads.run(partial(_load, place, counter))
    except BaseException:
        # An interrupt does not wait for the work, which stops at its next step.
        threads.close(wait=False)
        raise
    for sentence in sentences:
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)
    return Model(reference, loaded, threads, resources)


class _Place(NamedTuple):
    """The source of a model, and the options of its computation."""

    reference: Reference
    layout: ImageLayout
    connect: Callable[[], ClientOptions]
    backend: str | None
    dtype: str | None
    device: str | None


_Loaded = tuple["_ImageModel | LanguageModel", tuple[str, ...], ExitStack]


def _load(place: _Place, counter: ProgressCounter, is_cancelled: IsCancelled) -> _Loaded:
    """Return a loaded model, warnings, and its resources; called in the model's thread."""
    with needs("running a model", "mlx"):
        from clowder_aimage import generate  # noqa: F401 - before anything is pulled
        from clowder_aimage.engine.local_fetch import fetch
        from clowder_aimage.model.text.runtime import find_runtime

    def on_event(event: CopyEvent) -> None:
        check_cancelled(is_cancelled)
        counter.on_event(event)

    with ExitStack() as stack:
        lease = stack.enter_context(place.layout.lease())
        check = _create_check(place)
        with fetch(
            place.layout, place.reference, place.connect, lease, on_event=on_event, check=check
        ) as fetched:
            if find_runtime(fetched.stored.aimage) is None:
                model, *sentences = _load_image_model(place, fetched, lease)
                fetched.end()
                return model, tuple(filter(None, sentences)), stack.pop_all()
            language_model = _load_language_model(place, fetched)
            return language_model, language_model.warnings, stack.pop_all()


def _create_check(place: _Place) -> Check:
    """Return a function that refuses an AImage that cannot run, before its weights are fetched."""
    from clowder_aimage.dialect import AImage
    from clowder_aimage.engine.local_fetch import check_pipeline
    from clowder_aimage.model.library_choice import choose_library
    from clowder_aimage.model.text.runtime import find_runtime

    tuning = _tune(place)
    choose_library(place.backend, tuning)

    def check(reference: Reference, aimage: AImage) -> None:
        if find_runtime(aimage) is None:
            check_pipeline(reference, aimage)
        elif place.backend is not None or place.device is not None:
            message = f"backend and device apply to image models; {reference} is a language model"
            raise UsageError(message)

    return check


def _tune(place: _Place) -> TorchTuning:
    from clowder_aimage.model.library_choice import TorchTuning

    return TorchTuning(device=place.device)


def _load_image_model(
    place: _Place, fetched: FetchedAImage, lease: Lease
) -> tuple[_ImageModel, str | None]:
    """Return an image model, and a warning about its device."""
    from clowder_aimage import generate
    from clowder_aimage.engine import machine
    from clowder_aimage.model.flow.memory_budget import KEEP
    from clowder_aimage.pictures.input_source import InputSource

    finder = create_finder(place.layout, lease, place.connect)
    loaded = generate.load(
        fetched.files,
        fetched.stored,
        backend=place.backend,
        dtype=place.dtype,
        tuning=_tune(place),
        finder=finder,
    )
    loaded.pipeline.set_memory(KEEP, None, loaded.device_memory or machine.read_memory_limit())
    loaded.preload(GenerateRequest.draft().apply_defaults(fetched.stored.aimage))
    reader = partial(InputSource, place.layout, place.connect, hosts=None, has_files=True)
    return _ImageModel(loaded, finder, place.layout, reader), loaded.warning


def _load_language_model(place: _Place, fetched: FetchedAImage) -> LanguageModel:
    from clowder_aimage.model.stored_ability import find_ability
    from clowder_aimage.model.text.runtime import load_language_model

    fetched.end()
    stored = fetched.stored
    find_ability(place.layout, stored.descriptor.digest, stored.aimage).check(place.reference)
    return load_language_model(fetched.files, stored.aimage, dtype=place.dtype)
