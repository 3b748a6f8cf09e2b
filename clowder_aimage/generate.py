"""generate: render pictures from a prompt with an AImage, which is pulled if it is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from clowder_aimage.adapter_source import (
    AdapterFinder,
    AdapterSource,
    ControlSource,
    is_adapter,
    is_controlnet,
)
from clowder_aimage.content import ContentStore, Lease, OnEvent
from clowder_aimage.content.arriving_files import ArrivingFiles
from clowder_aimage.content.copy_option import CopyEvent, ignore
from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect import AImage
from clowder_aimage.errors import AImageError, ModelError, NotFoundError
from clowder_aimage.formats.diffusers import MAIN_PIPELINES
from clowder_aimage.layout.completeness import IncompleteError, find_complete, lease_aimage
from clowder_aimage.layout.stored_aimage import StoredAImage, interpret, read_aimage
from clowder_aimage.model.backend import describe, dtype_name
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import (
    COMPONENTS,
    PARAMETERS,
    GenerateRequest,
    Image,
    Pipeline,
    PipelineEvent,
    Step,
)
from clowder_aimage.oci import Descriptor, Manifest, Reference
from clowder_aimage.pictures.picture_input import PictureInputs, PreparedPicture, TiledPicture
from clowder_aimage.telemetry import bound

if TYPE_CHECKING:
    from clowder_aimage.pull import PullOptions
    from clowder_aimage.registry import ClientOptions

_OF_MASKS = ("mask", "paste", "feather", "crop")
_OF_IMAGES = ("image", "strength", "fine", *_OF_MASKS, "expand", "upscale")
_OF_CONTROL = ("control", "controlnet", "control_strength")
_GRACE = 2.0  # seconds for a pull to stop


def no_wait() -> None:
    """Return at once: all blobs are in the store."""


@dataclass(frozen=True, slots=True)
class RunnableModel:
    """A loaded AImage. Only the thread that loaded it may use it.

    ``end`` is called before each picture; it waits for a pull, or raises its error. ``adapters``
    opens the adapters of requests, of which those of the last one stay in the pipeline;
    ``pictures`` opens those that requests begin with, or that guide ``controls``.
    """

    stored: StoredAImage
    pipeline: Pipeline
    dtype: str
    end: Callable[[], None] = no_wait
    adapters: AdapterSource | None = None
    pictures: PictureInputs | None = None
    controls: ControlSource | None = None

    @property
    def backend(self) -> str:
        """Return the device and, on a CPU, the BLAS."""
        return describe()

    def preload(self, request: GenerateRequest) -> str:
        """Load what can stay in memory for such requests; return it in words.

        Raises ModelError, and UsageError for a wrong mask.
        """
        with self._adapted(request):
            if self.pictures and request.mask is not None:  # opened again by generate
                with suppress(NotFoundError):  # it may be kept later
                    picture = self.pictures.open(request)
                    given = picture.given if isinstance(picture, PreparedPicture) else None
                    self.pipeline.check(request, given)
            return self.pipeline.preload(request)

    def generate(self, request: GenerateRequest) -> Generator[PipelineEvent, None, None]:
        """Yield steps, previews and pictures; closing the generator cancels.

        Raises ModelError: the model's numbers cannot be computed with. Also the errors of a pull,
        and of ``AdapterSource.open``.
        """
        picture = self.pictures.open(request) if self.pictures else None
        with self._adapted(request):
            if isinstance(picture, TiledPicture):
                self.pipeline.check(request)
                return self._guarded(self._tiled(request, picture))
            events = self.pipeline.generate(request, *([picture.given] if picture else []))
        return self._guarded(events, picture)

    def _tiled(
        self, request: GenerateRequest, picture: TiledPicture
    ) -> Generator[PipelineEvent, None, None]:
        """Yield the steps of all tiles of each picture, and the picture."""
        pixels = picture.parts[0].pixels
        assert pixels is not None  # noqa: S101 - enlarge sets it
        height, width, _ = pixels.shape
        size = {"width": width, "height": height}
        count = len(picture.parts)
        for number in range(request.n):
            seed = request.seed + number
            tile = replace(request, **size, seed=seed, n=1, previews=0, upscale=0.0)
            made = []
            for index, part in enumerate(picture.parts):
                for event in self.pipeline.generate(tile, part):
                    if isinstance(event, Step):
                        done = index * event.total + event.index
                        yield Step(done, count * event.total, number)
                    elif isinstance(event, Image):
                        made.append(event.pixels)
            yield Image(picture.finish(made), seed, number)

    def prepare(self, request: GenerateRequest) -> None:
        """Encode the texts of a request, which follows. Raises as ``generate`` does."""
        with self._adapted(request):
            self.pipeline.prepare(request)

    @contextmanager
    def _adapted(self, request: GenerateRequest) -> Iterator[None]:
        """Use the adapters of a request, and no others; and its control network."""
        opened = self.adapters.open(request.loras) if self.adapters else []
        with _computing():
            if self.adapters:
                self.pipeline.use_adapters(opened)
            if self.controls and request.controlnet is not None:
                self._use_control(self.controls, request.controlnet)
            yield

    def _use_control(self, controls: ControlSource, name: str) -> None:
        """Use a control network; an error has its name as a fact."""
        try:
            self.pipeline.use_control(controls.open(name))
        except AImageError as error:
            error.facts["controlnet"] = name
            raise

    def _guarded(
        self, events: Generator[PipelineEvent, None, None], picture: PreparedPicture | None = None
    ) -> Generator[PipelineEvent, None, None]:
        with _computing():
            for event in events:
                if isinstance(event, Image):
                    self.end()
                    if picture is not None:
                        event = replace(event, pixels=picture.finish(event.pixels))
                yield event


@dataclass(frozen=True, slots=True)
class FetchedAImage:
    """A leased AImage, and its blobs, which may still be arriving by ``pull``."""

    stored: StoredAImage
    files: BlobFiles
    pull: BackgroundPull | None = None

    @property
    def is_arriving(self) -> bool:
        """Return whether blobs may be missing. Raises the error of a failed pull."""
        return self.pull is not None and not self.pull.is_over()

    def end(self) -> None:
        """Wait until the AImage is complete and named in the store. Raises as ``pull``."""
        if self.pull is not None:
            self.pull.result.result()


class BackgroundPull:
    """A pull in a thread of its own, which is stopped when the context ends.

    ``begun`` becomes the AImage, leased, before its blobs are fetched, or None if it cannot be used
    before the end; ``result`` becomes its manifest, or the error of the pull.
    """

    def __init__(
        self, work: Callable[[PullOptions], Descriptor], lease: Lease, on_event: OnEvent
    ) -> None:
        self.begun: Future[StoredAImage | None] = Future()
        self.result: Future[Descriptor] = Future()
        self._work, self._lease, self._on_event = work, lease, on_event
        self._is_stopped = False
        self._thread = threading.Thread(target=bound(self._run), daemon=True, name="aimage-pull")

    def __enter__(self) -> BackgroundPull:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped = True
        self._thread.join(_GRACE)  # it may hang on an unresponsive registry

    def is_over(self) -> bool:
        """Return whether the pull has ended. Raises its error."""
        if is_done := self.result.done():
            self.result.result()
        return is_done

    def _run(self) -> None:
        from clowder_aimage.pull import PullOptions

        try:
            self.result.set_result(self._work(PullOptions(on_event=self._watch, begin=self._begin)))
        except BaseException as error:
            self.result.set_exception(error)
        finally:
            if not self.begun.done():
                self.begun.set_result(None)

    def _begin(self, stored: StoredAImage) -> tuple[str, ...]:
        lease_aimage(stored, self._lease)
        self.begun.set_result(stored)
        return COMPONENTS

    def _watch(self, event: CopyEvent) -> None:
        if self._is_stopped and event.kind in ("plan", "progress"):  # what has come is kept
            raise AImageError("the pull was cancelled")
        self._on_event(event)


@contextmanager
def fetch(
    store: ContentStore,
    reference: Reference,
    connect: Callable[[], ClientOptions],
    lease: Lease,
    *,
    on_event: OnEvent = ignore,
) -> Iterator[FetchedAImage]:
    """Yield a leased AImage from the store, or one that is being pulled from its registry.

    Its networks can be loaded while it arrives. If the block ends before the pull, the pull is
    stopped: nothing is named then, and what has come is kept for the next one. ``connect`` is
    called for a pull only.

    Raises:
        NotFoundError: it is missing or partial in the store, and its name has no registry, or the
            registry does not have it. Also raises the errors of ``pull``.
        ModelError: it is not a pipeline.
    """
    try:
        known = read_aimage(store, reference)
    except NotFoundError:
        pass
    else:
        _check_kind(reference, known.aimage)
    try:
        found = FetchedAImage(find_complete(store, reference, lease), store)
    except NotFoundError as missing:
        connection = connect()
        if connection.expand(reference).registry is None:
            raise
        work = partial(_pull, store, reference, connection, missing)
    else:
        yield found
        return
    from clowder_aimage.pull import stored_name  # late: it takes 70 ms

    with BackgroundPull(work, lease, on_event) as pulling:
        stored = pulling.begun.result()
        if stored is None:
            name = stored_name(reference, pulling.result.result())
            yield FetchedAImage(find_complete(store, name, lease), store)
            return
        _check_kind(reference, stored.aimage)
        stored.aimage.validate()
        yield FetchedAImage(stored, ArrivingFiles(store, pulling.is_over), pulling)


def _pull(
    store: ContentStore,
    reference: Reference,
    connection: ClientOptions,
    missing: NotFoundError,
    options: PullOptions,
) -> Descriptor:
    from clowder_aimage.pull import pull

    words = ""
    if isinstance(missing, IncompleteError):  # even if the tag has moved in the registry
        reference, words = replace(reference, digest=missing.digest), f"; {missing.message}"
    try:
        return pull(reference, store, connection, options).root
    except AImageError as error:
        error.message += words
        raise


def _check_kind(reference: Reference, aimage: AImage) -> None:
    """Raise ModelError for an AImage that is not a pipeline, before its weights are fetched."""
    if is_adapter(aimage):
        message = f"{reference} is an adapter, not a model"
        raise ModelError(message, remedy="use_adapter", reference=reference)
    if is_controlnet(aimage):
        message = f"{reference} is a ControlNet, not a model"
        raise ModelError(message, remedy="use_controlnet", reference=reference)
    kind = aimage.properties.get("format")
    if kind == "diffusers":
        name = aimage.properties.get("pipeline") or aimage.properties.get("architecture")
        raise ModelError(
            f"only {' and '.join(MAIN_PIPELINES)} can be run; {reference} is {str(name)[:80]}",
            remedy="export_to_run",
            library=kind,
            reference=reference,
        )
    if kind != "files" and any(layer.name == "model_index.json" for layer in aimage.layers):
        return
    if not kind and not any(layer.name.endswith(".tar") for layer in aimage.layers):
        return  # the loader reports missing files
    what = f"has the format {str(kind)[:60]!r}" if kind else "is packed as tar files"
    raise ModelError(
        f"{reference} {what}, which cannot be run",
        remedy="export_files" if kind else "export_to_pack",
        reference=reference,
    )


def find_arriving(
    store: ContentStore,
    descriptor: Descriptor,
    document: bytes,
    lease: Lease,
    is_over: Callable[[], bool],
) -> FetchedAImage:
    """Return the AImage of a manifest whose blobs another process fetches, and lease it."""
    files, manifest = ArrivingFiles(store, is_over), Manifest.parse(document, descriptor.media_type)
    stored = interpret(files, descriptor, manifest)
    lease_aimage(stored, lease)
    stored.aimage.validate()
    return FetchedAImage(stored, files)


def load(
    store: BlobFiles,
    stored: StoredAImage,
    *,
    dtype: str | None = None,
    request: GenerateRequest | None = None,
    end: Callable[[], None] = no_wait,
    finder: AdapterFinder | None = None,
) -> RunnableModel:
    """Open the model on the calling thread; check the sides of the first ``request`` before.

    Weights are read by ``preload`` or when they are used. ``store`` may be the files of an arriving
    AImage, and ``end`` waits for its pull. ``finder`` finds the adapters of requests. Raises
    ModelError, UsageError, AccessError.
    """
    chosen = dtype_name(dtype)
    with _computing():
        pipeline = load_pipeline(store, stored.aimage, dtype=chosen, request=request)
    adapters = AdapterSource(finder, store, stored, lambda: pipeline.shapes)
    controls = ControlSource(finder.store, finder.open_stored) if finder else None
    return RunnableModel(stored, pipeline, chosen, end, adapters, PictureInputs(store), controls)


@contextmanager
def _computing() -> Iterator[None]:
    """Turn errors of arithmetic, numpy and MLX into a ModelError without their text.

    The text could hold a part of the prompt.
    """
    try:
        yield
    except (ArithmeticError, ValueError) as error:
        kind = type(error).__name__
        raise ModelError(f"the model's numbers cannot be computed with ({kind})") from error


def _facts(request: GenerateRequest) -> Iterator[str]:
    """Yield the parameters that a picture states: those of an image only if there is one."""
    is_without = {
        **dict.fromkeys(_OF_IMAGES, request.image is None),
        **dict.fromkeys(_OF_CONTROL, request.control is None),
        "fit": request.image is None and request.control is None,
        "references": not request.references,
        "loras": True,
    }
    for name in PARAMETERS:
        if is_without.get(name):
            continue
        if name != "cfg_normalization" or request.cfg_normalization:
            yield name


def describe_picture(
    reference: Reference, model: RunnableModel, request: GenerateRequest
) -> dict[str, Any]:
    """Return the parameters to render a request's pictures again, without their own seeds.

    Raises as ``ControlSource.name``.
    """
    if model.controls and request.controlnet is not None:
        request = replace(request, controlnet=model.controls.name(request.controlnet))
    return {
        "reference": str(reference),
        "digest": str(model.stored.descriptor.digest),
        **{key: getattr(request, key) for key in _facts(request)},
        **({"loras": [asdict(use) for use in request.loras]} if request.loras else {}),
        "dtype": model.dtype,
        "backend": model.backend,
    }
