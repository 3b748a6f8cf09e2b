"""A model in this process: its pull, its load, and the bar of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clowder_aimage.cli.console.option import get_settings
from clowder_aimage.cli.console.output import format_size, is_verbose, note
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import needs
from clowder_aimage.model.library_choice import AUTO, NO_TUNING, TorchTuning
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.engine.local_fetch import Check, FetchedAImage
    from clowder_aimage.generate import RunnableModel
    from clowder_aimage.generation.request import GenerateRequest
    from clowder_aimage.model.adapter_source import AdapterFinder
    from clowder_aimage.model.pipeline import Image, PipelineEvent
    from clowder_aimage.registry import ClientOptions

Connect = Callable[[], "ClientOptions"]


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """The options of a model in this process.

    dtype, backend, tuning: to compute with. memory: bytes that it may take; None for the machine's.
    precision: of a smaller variant that is used until the AImage has been pulled. lora_dir: a
    directory of adapters. is_last: no prompts follow the first. is_marked: the files say that a
    machine made the pictures. is_signed: they are signed if the configuration names a key.
    """

    dtype: str | None = None
    memory: int | None = None
    backend: str = AUTO
    tuning: TorchTuning = NO_TUNING
    precision: str | None = None
    lora_dir: Path | None = None
    is_last: bool = True
    is_marked: bool = True
    is_signed: bool = True


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """An AImage that may still be arriving, and the bar of its pull."""

    aimage: FetchedAImage
    progress: Progress
    bar: contextlib.ExitStack

    def watch(self, events: Iterator[PipelineEvent]) -> Iterator[PipelineEvent]:
        """Return the events, once the first one is there if the model is still arriving."""
        head = [next(events)] if self.aimage.is_arriving else []
        self.bar.close()
        return chain(head, events)

    def end(self) -> None:
        """Wait until the AImage is in the store. Raises as ``pull``."""
        self.aimage.end()
        self.bar.close()

    def say_loading(self, *, all_layers: bool = False) -> None:
        """Print the size of the weights, or of all layers."""
        layers = self.aimage.stored.aimage.layers
        loaded = sum(
            layer.descriptor.size
            for layer in layers
            if all_layers or layer.is_tensor or layer.is_shard
        )
        self.progress.remark(f"loading {format_size(loaded)}")


def fetch_model(
    reference: Reference, connect: Connect | None = None, check: Check | None = None
) -> FetchedModel:
    """Return an AImage; missing blobs are pulled, and the lease is held until the verb ends.

    A pull may still be running; it is stopped when the verb ends. ``check`` is that of
    ``local_fetch.fetch``, whose errors are raised; for a pipeline, without it, the extra [mlx] is
    required (UsageError).
    """
    from clowder_aimage.engine.local_fetch import fetch

    if check is None:
        with needs("running a model", "mlx"):
            from clowder_aimage import generate  # noqa: F401 (before anything is pulled)
    shared = get_settings()
    layout, connect = shared.layout, connect or cache(shared.build_client_options)
    # Refuse invalid options at once.
    if shared.has_connection:
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
    options: LocalOptions,
    finder: AdapterFinder,
    *,
    is_last: bool = True,
) -> RunnableModel:
    """Load a model for ``request``, and for others unless it is the last one."""
    from clowder_aimage import generate
    from clowder_aimage.engine import machine
    from clowder_aimage.model.flow.memory_budget import AUTO as BY_MEMORY

    model = generate.load(
        fetched.aimage.files,
        fetched.aimage.stored,
        backend=options.backend,
        dtype=options.dtype,
        tuning=options.tuning,
        request=request,
        end=fetched.aimage.end,
        finder=finder,
    )
    memory = options.memory
    total = model.device_memory or machine.read_memory_limit()
    # Each tile uses all networks.
    is_last = is_last and not request.input.upscale
    model.pipeline.set_memory(BY_MEMORY, memory or total, total, limit=memory, is_last=is_last)
    model.check(request)
    fetched.say_loading()
    plan = model.preload(request)
    if is_verbose():
        note(f"memory: {plan}")
    if model.warning:
        note(f"warning: {model.warning}")
    return model


def show_steps(events: Iterable[PipelineEvent], request: GenerateRequest) -> Iterator[Image]:
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
                # Fewer with an image, more in tiles.
                progress.begin(event.total * request.output.n)
            progress.advance(1)
            if isinstance(event, Step) and event.index == event.total:
                progress.rename("decoding")
