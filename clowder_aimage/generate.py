"""generate: render pictures from a prompt with an AImage."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.errors import AImageError, ModelError, NotFoundError
from clowder_aimage.generation.request import COUNTS, GenerateRequest, map_parameter_locations
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.model.adapter_source import (
    AdapterFinder,
    AdapterSource,
    ControlSource,
)
from clowder_aimage.model.batch_table import BatchTable
from clowder_aimage.model.flow.array_library import ArrayLibrary, DeviceMemory
from clowder_aimage.model.library_choice import NO_TUNING, TorchTuning
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image, Pipeline, PipelineEvent, Step
from clowder_aimage.model.rounding import merge_forms
from clowder_aimage.oci import Reference
from clowder_aimage.pictures.input import PictureInputs, PreparedPicture, TiledPicture
from clowder_aimage.pictures.provenance.marking import PictureMarking, plan_marking
from clowder_aimage.pictures.provenance.signer import PictureSigner


def do_nothing() -> None:
    """Do nothing: all blobs are in the store."""


@dataclass(frozen=True, slots=True)
class RunnableModel:
    """A loaded AImage. Only the thread that loaded it may use it.

    ``end`` is called before each picture; it waits for a pull, or raises its error. ``adapters``
    opens the adapters of requests; those of the last request stay in the pipeline. ``pictures``
    opens those that requests begin with, or that guide ``controls``.
    """

    stored: StoredAImage
    pipeline: Pipeline
    end: Callable[[], None] = do_nothing
    adapters: AdapterSource | None = None
    pictures: PictureInputs | None = None
    controls: ControlSource | None = None

    def open_variant(self, stored: StoredAImage) -> RunnableModel:
        """Return the model of another AImage with the same networks: its adapters are used.

        Raises FormatError: the adapters that it uses are not in it.
        """
        adapters = self.adapters.open_variant(stored) if self.adapters else None
        return replace(self, stored=stored, adapters=adapters)

    @property
    def backend(self) -> str:
        """Return the device, with the version of PyTorch or the BLAS of MLX on a CPU."""
        return self._library.describe()

    @property
    def dtype(self) -> str:
        """Return the name of the compute type."""
        return self._library.dtype_name

    @property
    def batches(self) -> BatchTable:
        """Return how many forward passes are computed at once."""
        return self._library.batches

    @property
    def device_memory(self) -> int | None:
        """Return the usable memory of the GPU in bytes, or None."""
        return self._library.memory.total

    @property
    def memory(self) -> DeviceMemory:
        """Return the memory of the device."""
        return self._library.memory

    @property
    def warning(self) -> str | None:
        """Return a warning about the device, or None."""
        return self._library.warning

    @property
    def _library(self) -> ArrayLibrary:
        library: ArrayLibrary = self.pipeline.library
        return library

    def check(self, request: GenerateRequest) -> None:
        """Reject a request that the model cannot fulfil, before its weights are read.

        These are sizes, parameters of other families, long prompts, wrong masks, and adapters and
        ControlNets of other models. Raises UsageError, FormatError, and as ``generate``.
        """
        with self._use_adapters(request):
            self._check(request)

    def preload(self, request: GenerateRequest) -> str:
        """Load the weights that can stay in memory for such requests; return them in words.

        Raises ModelError, and as ``check``.
        """
        with self._use_adapters(request):
            self._check(request)
            return self.pipeline.preload(request)

    def _check(self, request: GenerateRequest) -> None:
        prepared = None
        if self.pictures and request.input.mask is not None:
            # The picture may be stored later. It is opened again by generate.
            with suppress(NotFoundError):
                picture = self.pictures.open(request)
                prepared = picture.inputs if isinstance(picture, PreparedPicture) else None
        self.pipeline.check(request, prepared)

    def generate(self, request: GenerateRequest) -> Generator[PipelineEvent, None, None]:
        """Yield steps, previews and pictures; closing the generator cancels.

        Raises ModelError: the model's numbers cannot be computed with. Also the errors of a pull,
        and of ``AdapterSource.open``.
        """
        return self.pipeline.complete(self.open(request))

    def open(self, request: GenerateRequest) -> Generator[Any, None, None]:
        """Yield as ``generate``; and passes, which ``Pipeline.compute`` computes in between.

        Raises as ``generate``.
        """
        picture = self.pictures.open(request) if self.pictures else None
        with self._use_adapters(request):
            if isinstance(picture, TiledPicture):
                self.pipeline.check(request)
                return self._guard(self._generate_tiles(request, picture))
            events = self.pipeline.open(request, *([picture.inputs] if picture else []))
        return self._guard(events, picture)

    def _generate_tiles(
        self, request: GenerateRequest, picture: TiledPicture
    ) -> Generator[Any, None, None]:
        """Yield the steps of all tiles of each picture, and the picture."""
        pixels = picture.parts[0].pixels
        assert pixels is not None  # noqa: S101 - enlarge sets it
        height, width, _ = pixels.shape
        size = {"width": width, "height": height}
        count = len(picture.parts)
        for number in range(request.output.n):
            seed = request.sampling.seed + number
            tile = request.change(**size, seed=seed, n=1, previews=0, upscale=None)
            finished = list[Image]()
            for index, prepared in enumerate(picture.parts):
                # Those of a later request may be in use
                with self._use_adapters(request):
                    events = self.pipeline.open(tile, prepared)
                for event in events:
                    if isinstance(event, Step):
                        done = index * event.total + event.index
                        yield Step(done, count * event.total, number)
                    elif isinstance(event, Image):
                        finished.append(event)
                    else:
                        yield event
            pixels = picture.finish([image.pixels for image in finished])
            batch = max(image.batch for image in finished)
            form = merge_forms({image.forward for image in finished})
            yield Image(pixels, seed, number, batch, form)

    def list_warnings(self, request: GenerateRequest) -> list[str]:
        """Return sentences about parameters without effect in a request. Raises as ``generate``."""
        opened = self.adapters.open(request.adapters.loras) if self.adapters else []
        warnings = [adapter.warning for adapter, _ in opened if adapter.warning]
        with _computing():
            return [*warnings, *self.pipeline.list_warnings(request)]

    def plan_marking(
        self,
        request: GenerateRequest,
        signer: PictureSigner | None = None,
        *,
        is_marked: bool = True,
    ) -> PictureMarking:
        """Return what the files of a request's pictures say about their origin."""
        store = self.pictures.store if self.pictures else None
        return plan_marking(request, store, signer, is_marked=is_marked)

    def prepare(self, request: GenerateRequest) -> None:
        """Check the next request, and encode its texts. Raises as ``check``."""
        with self._use_adapters(request):
            self._check(request)
            self.pipeline.prepare(request)

    @contextmanager
    def _use_adapters(self, request: GenerateRequest) -> Iterator[None]:
        """Use the adapters of a request, and no others; and its control network."""
        opened = self.adapters.open(request.adapters.loras) if self.adapters else []
        with _computing():
            if self.adapters:
                self.pipeline.use_adapters(opened)
            if self.controls and request.control.network is not None:
                self._use_control(self.controls, request.control.network)
            yield

    def _use_control(self, controls: ControlSource, name: str) -> None:
        """Use a control network; an error has its name as a fact."""
        try:
            self.pipeline.use_control(controls.open(name))
        except AImageError as error:
            error.facts["controlnet"] = name
            raise

    def _guard(
        self, events: Generator[Any, None, None], picture: PreparedPicture | None = None
    ) -> Generator[Any, None, None]:
        with _computing():
            for event in events:
                if isinstance(event, Image):
                    self.end()
                    if picture is not None:
                        event = replace(event, pixels=picture.finish(event.pixels))
                yield event


def load(
    store: BlobFiles,
    stored: StoredAImage,
    *,
    backend: str | None = None,
    dtype: str | None = None,
    tuning: TorchTuning = NO_TUNING,
    request: GenerateRequest | None = None,
    end: Callable[[], None] = do_nothing,
    finder: AdapterFinder | None = None,
) -> RunnableModel:
    """Open the model on the calling thread; check the sides of the first ``request`` before.

    Weights are read by ``preload`` or when they are used. ``store`` may be the files of an arriving
    AImage, and ``end`` waits for its pull. ``finder`` finds the adapters of requests; ``backend``
    and ``tuning`` are as in ``load_pipeline``. Raises ModelError, UsageError, AccessError.
    """
    with _computing():
        pipeline = load_pipeline(
            store, stored.aimage, backend=backend, dtype=dtype, tuning=tuning, request=request
        )
    adapters = AdapterSource(finder, store, stored, lambda: pipeline.shapes)
    controls = ControlSource(finder.store, finder.open_stored) if finder else None
    pictures = PictureInputs(store)
    return RunnableModel(stored, pipeline, end, adapters, pictures, controls)


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


def _collect_stated_values(request: GenerateRequest) -> dict[str, Any]:
    """Return the parameters that a picture states: those of its inputs only if there are some."""
    has_image, has_control = request.input.image is not None, request.control.image is not None
    groups = {name: location.group for name, location in map_parameter_locations().items()}
    is_omitted = {
        **{name: not has_image for name, group in groups.items() if group == "input"},
        **{name: not has_control for name, group in groups.items() if group == "control"},
        **dict.fromkeys(COUNTS, True),
        "fit": not (has_image or has_control),
        "references": not request.input.references,
        "loras": not request.adapters.loras,
        "cfg_normalization": not request.guidance.normalization,
        "original_prompt": request.original_prompt is None,
        "enhancer": request.enhancer is None,
    }
    return {name: value for name, value in request.to_json().items() if not is_omitted.get(name)}


def describe_picture(
    reference: Reference,
    model: RunnableModel,
    request: GenerateRequest,
    marking: PictureMarking,
) -> dict[str, Any]:
    """Return the parameters to render a request's pictures again, without their own seeds.

    Also warnings about the request, if any, and that the pictures have no mark. Raises as
    ``ControlSource.name``, ``generate``.
    """
    warnings = [*model.list_warnings(request), *marking.warnings]
    if model.controls and request.control.network is not None:
        request = request.change(controlnet=model.controls.name(request.control.network))
    return {
        "reference": str(reference),
        "digest": str(model.stored.descriptor.digest),
        **_collect_stated_values(request),
        "dtype": model.dtype,
        "backend": model.backend,
        **({"warnings": warnings} if warnings else {}),
        **({} if marking.mark else {"mark": False}),
    }
