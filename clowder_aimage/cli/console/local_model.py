"""A model in this process: fetched, loaded, and what it generates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.adapter_source import OWN, find_control
from clowder_aimage.cli.console.later_model import LaterModel
from clowder_aimage.cli.console.lora_option import adapter_finder, offer
from clowder_aimage.cli.console.named_picture import named_pictures
from clowder_aimage.cli.console.option import needs, settings
from clowder_aimage.cli.console.output import is_verbose, note, note_once, remark, size
from clowder_aimage.cli.console.picture_option import for_model
from clowder_aimage.cli.console.picture_order import Render
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import AImageError, NotFoundError, UsageError
from clowder_aimage.generation.effect import ignored_parameters
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.library_choice import (
    AUTO,
    BACKENDS,
    NO_TUNING,
    TorchTuning,
    choose_library,
)
from clowder_aimage.oci import Reference
from clowder_aimage.pictures.made_picture import MadePicture

if TYPE_CHECKING:
    from clowder_aimage.adapter_source import AdapterFinder
    from clowder_aimage.dialect import AImage
    from clowder_aimage.engine.local_fetch import Check, FetchedAImage
    from clowder_aimage.generate import RunnableModel
    from clowder_aimage.model.pipeline import Image, PipelineEvent
    from clowder_aimage.registry import ClientOptions


backend_option = click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default=AUTO,
    help="Library to compute with. [default: auto, by what is installed and the GPU]",
)


def open_model(
    reference: Reference,
    load: Callable[..., RunnableModel],
    library: tuple[str, TorchTuning],
    precision: str | None,
    first: Mapping[str, Any],
    lora_dir: Path | None,
) -> Render:
    """Return a function that generates pictures in this process; load the model by ``load``.

    ``first`` has the parameters of the first request, checked before the model is loaded;
    ``library`` is the name of that which computes, and its options.
    """
    backend, tuning = library
    choose_library(backend, tuning)
    connect = cache(settings().connection)
    with needs("running a model", "mlx"):
        finder = adapter_finder(lora_dir, connect)
    for use in first["loras"]:  # before the model, which is larger
        if not use.model.startswith(OWN):
            finder.find(use)
    if first.get("controlnet") is not None:
        find_control(first["controlnet"], finder.open_stored)
    used = _variant(reference, precision, connect) if precision else reference
    fetched = fetch_model(used, connect)
    how = partial(load, backend=backend, tuning=tuning, finder=finder)
    model = LocalModel(reference, how, first, connect, fetched, finder)
    model.load(fetched)
    if not first["prompt"]:  # prompts are typed below the bar
        fetched.end()
    if used != reference and not first["prompt"]:
        model.later = LaterModel(reference, settings().layout, connect(), str(precision))
    return model.generate


@dataclass(slots=True)
class LocalModel:
    """A model in this process; ``later`` replaces it between two requests."""

    reference: Reference
    load_model: Callable[..., RunnableModel]
    first: Mapping[str, Any]
    connect: Callable[[], ClientOptions]
    fetched: FetchedModel
    finder: AdapterFinder
    later: LaterModel | None = None
    _loaded: list[RunnableModel] = field(default_factory=list)

    def load(self, fetched: FetchedModel) -> None:
        """Load a model for the parameters ``first`` and others."""
        aimage = fetched.found.stored.aimage
        request = _to_request(aimage, self.first)
        weights = sum(layer.descriptor.size for layer in aimage.layers if layer.is_tensor)
        fetched.progress.remark(f"loading {size(weights)}")
        pictures = named_pictures()
        # A wrong mask is refused before a load
        pictures.keep(request.input.image, request.input.mask, *request.input.references)
        try:
            self._loaded = [self.load_model(fetched, request)]
        except UsageError:
            pictures.discard()
            raise
        self.fetched = fetched

    def generate(
        self, options: Mapping[str, Any], count: int, kind: str, announce: Callable[[str], None]
    ) -> Generator[MadePicture, None, None]:
        from clowder_aimage import adapter_source
        from clowder_aimage.cli.console.installation import install_command
        from clowder_aimage.generate import describe_picture
        from clowder_aimage.model.library_choice import SLOW
        from clowder_aimage.model.picture import encode_picture
        from clowder_aimage.model.picture_facts import stated_facts

        if self.later is not None and self.later.is_done:
            self._replace(self.later)
        if not self._loaded:  # the load was interrupted
            self.load(self.fetched)
        (model,) = self._loaded
        given = {name: value for name, value in options.items() if name != "trigger"}
        request = _to_request(model.stored.aimage, {**given, "n": count})
        found = self.finder.find_all(request, model.stored.aimage)
        pairs = adapter_source.own_adapters(self.fetched.found.files, model.stored.aimage)
        packed = [adapter for adapter, _ in pairs]
        request = adapter_source.resolve(request, found, packed, adds_words=options["trigger"])
        offer(adapter_source.missing(request.prompt, [*packed, *found]))
        pictures = (
            request.input.image,
            request.input.mask,
            request.control.image,
            *request.input.references,
        )
        named_pictures().keep(*pictures)
        events = model.generate(request)
        facts = describe_picture(self.reference, model, request)
        with contextlib.closing(events):
            begun = self.fetched.watch(events)
            announce(f"rendering on {model.backend}")
            if model.backend == SLOW:
                remark("warning: this takes many times longer than with OpenBLAS; to install it:")
                remark(f"  {install_command('mlx')}")
            for picture in render(begun, request):
                own = stated_facts(facts | {"seed": picture.seed}, kind, None)
                data = encode_picture(picture.pixels, own, kind)
                yield MadePicture(data, picture.seed, kind, own)

    def _replace(self, later: LaterModel) -> None:
        """Load the AImage itself in place of its variant, or say why it cannot be used."""
        try:
            later.end()
            wanted = fetch_model(self.reference, self.connect)
            self._loaded = []  # the memory is free before the load
            self.load(wanted)
        except AImageError as error:
            message = f"{self.reference} cannot be used instead of its variant: {error.message}"
            note(f"warning: {message}")
        else:
            note(f"{self.reference} has been pulled and is used instead of its variant")
        self.later = None


def _to_request(aimage: AImage, parameters: Mapping[str, Any]) -> GenerateRequest:
    """Return a request with the defaults of an AImage. Raises UsageError."""
    from clowder_aimage.formats.controlnet import is_packed_with

    request = GenerateRequest.for_model(aimage, **for_model(aimage, parameters))
    if (
        request.control.image is not None
        and request.control.network is None
        and not is_packed_with(aimage)
    ):
        raise UsageError(
            "this model has no ControlNet of its own", hint="name one with --controlnet"
        )
    given = [name for name, value in parameters.items() if value is not None]
    for warning in ignored_parameters(request, given):
        note_once(f"warning: {warning}")
    return request


def _variant(
    reference: Reference, precision: str, connect: Callable[[], ClientOptions]
) -> Reference:
    """Return the variant of an AImage that the store lacks, else ``reference``."""
    from clowder_aimage.layout.completeness import check_stored
    from clowder_aimage.layout.stored_aimage import read_aimage
    from clowder_aimage.variant import find_variant

    if reference.digest is not None:
        raise UsageError("--first cannot be combined with a digest, which names one AImage")
    layout = settings().layout
    with contextlib.suppress(NotFoundError):
        if check_stored(layout, read_aimage(layout, reference)).is_complete:
            return reference
    if connect().expand(reference).registry is None:
        return reference
    found = find_variant(reference, connect(), precision)
    if found is None:
        remark(f"{reference} has no variant {precision}: it is used itself")
        return reference
    remark(f"the store lacks {reference}: its variant {precision} is used")
    return found


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """An AImage that may still be arriving, and the bar of its pull."""

    found: FetchedAImage
    progress: Progress
    bar: contextlib.ExitStack

    def watch(self, events: Iterator[PipelineEvent]) -> Iterator[PipelineEvent]:
        """Return the events, once the first one is there if the model is still arriving."""
        first = [next(events)] if self.found.is_arriving else []
        self.bar.close()
        return chain(first, events)

    def end(self) -> None:
        """Wait until the AImage is in the store. Raises as ``pull``."""
        self.found.end()
        self.bar.close()


def fetch_model(
    reference: Reference,
    connect: Callable[[], ClientOptions] | None = None,
    check: Check | None = None,
) -> FetchedModel:
    """Return an AImage, pulled where the store lacks it; the lease is held until the verb ends.

    A pull may still be running; it is stopped when the verb ends. ``check`` is that of
    ``local_fetch.fetch``, whose errors are raised; for a pipeline, without it, the extra [mlx] is
    required (UsageError).
    """
    from clowder_aimage.engine.local_fetch import fetch

    if check is None:
        with needs("running a model", "mlx"):
            from clowder_aimage import generate  # noqa: F401 (before anything is pulled)
    chosen = settings()
    layout, connect = chosen.layout, connect or cache(chosen.connection)
    if chosen.has_connection:  # refuse invalid options at once
        connect()
    context, progress = click.get_current_context(), Progress("pulling", reference)
    bar = context.with_resource(contextlib.ExitStack())
    bar.enter_context(progress)
    lease = context.with_resource(layout.lease())
    event = progress.on_event
    fetching = fetch(layout, reference, connect, lease, on_event=event, check=check)
    return FetchedModel(context.with_resource(fetching), progress, bar)


def load_model(
    fetched: FetchedModel,
    request: GenerateRequest,
    *,
    backend: str | None = None,
    dtype: str | None,
    tuning: TorchTuning = NO_TUNING,
    memory: int | None = None,
    is_last: bool = True,
    finder: AdapterFinder | None = None,
) -> RunnableModel:
    """Load a model for ``request``, and for others unless it is the last one.

    ``memory`` limits this process; None for all the memory of the machine.
    """
    from clowder_aimage import generate
    from clowder_aimage.engine import machine
    from clowder_aimage.model.flow.memory_budget import AUTO

    found = fetched.found
    place = found.files, found.stored
    how: dict[str, Any] = {"backend": backend, "dtype": dtype, "tuning": tuning}
    model = generate.load(*place, **how, request=request, end=found.end, finder=finder)
    total = model.device_memory or machine.memory()
    is_last = is_last and not request.input.upscale  # each tile uses all networks
    model.pipeline.set_memory(AUTO, memory or total, total, limit=memory, is_last=is_last)
    model.pipeline.check(request)
    plan = model.preload(request)
    if is_verbose():
        note(f"memory: {plan}")
    if model.warning:
        note(f"warning: {model.warning}")
    return model


def render(events: Iterable[PipelineEvent], request: GenerateRequest) -> Iterator[Image]:
    """Yield the pictures of a run as they are completed; show a bar of its steps."""
    from clowder_aimage.model.pipeline import Image, Step

    with Progress("rendering", unit="steps") as progress:
        progress.begin(request.sampling.steps * request.output.n)
        for event in events:
            if isinstance(event, Image):
                progress.rename("rendering")
                yield event
                continue
            if isinstance(event, Step) and (event.index, event.picture) == (1, 0):
                progress.begin(event.total * request.output.n)  # fewer with an image, more in tiles
            progress.advance(1)
            if isinstance(event, Step) and event.index == event.total:
                progress.rename("decoding")
