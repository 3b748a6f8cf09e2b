"""Options for adapters, and the adapters that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from clowder_aimage.cli.console.option import complete_name, get_settings, options
from clowder_aimage.cli.console.output import remark
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import AImageError, NotFoundError, UsageError, needs
from clowder_aimage.generation.request import GenerateRequest, LoraUse
from clowder_aimage.model.lora_text import list_missing_words, parse_use, take_tags

if TYPE_CHECKING:
    from clowder_aimage.engine.worker_client import WorkerClient
    from clowder_aimage.layout.stored_aimage import StoredAImage
    from clowder_aimage.model.adapter_source import AdapterEntry, AdapterFinder
    from clowder_aimage.oci import Reference
    from clowder_aimage.registry import ClientOptions

lora_options = options(
    click.option(
        "--lora",
        "loras",
        multiple=True,
        metavar="REF|FILE[:STRENGTH]",
        shell_complete=complete_name,
        help="Use this adapter (LoRA) with a strength, such as style:v1:0.8. May be repeated.",
    ),
    click.option(
        "--lora-dir",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="DIR",
        help="A directory of adapters: 'styles/ink' is styles/ink.safetensors in it.",
    ),
)


def read_uses(texts: Iterable[str], directory: Path | None) -> tuple[LoraUse, ...]:
    """Return the adapters of the option. Raises UsageError."""
    return tuple(parse_use(text, lambda name: is_file(name, directory)) for text in texts)


def with_tags(
    prompt: str, texts: Iterable[str], directory: Path | None
) -> tuple[str, tuple[LoraUse, ...]]:
    """Return a prompt without tags, and the adapters of the option and of the tags."""
    text, tagged = take_tags(prompt)
    if tagged and not text:
        raise UsageError("the prompt has only tags of adapters", hint="add what to draw")
    return text, (*read_uses(texts, directory), *tagged)


def is_file(name: str, directory: Path | None = None) -> bool:
    """Return True if a name is that of a file here, and not of an AImage."""
    from clowder_aimage.model.adapter_source import find_in_directory, is_path

    return is_path(name) or (
        directory is not None and find_in_directory(directory, name) is not None
    )


def create_adapter_finder(
    directory: Path | None, connect: Callable[[], ClientOptions]
) -> AdapterFinder:
    """Return a finder of adapters: files, and AImages. Missing AImages are pulled.

    They are leased until the verb ends.
    """
    from clowder_aimage.model.adapter_source import AdapterFinder
    from clowder_aimage.model.runnable import open_runnable

    layout = get_settings().layout
    lease = click.get_current_context().with_resource(layout.lease())

    def open_stored(reference: Reference) -> StoredAImage:
        try:
            return open_runnable(layout, reference, lease)
        except NotFoundError:
            if connect().expand(reference).registry is None:
                raise
        from clowder_aimage.pull import PullOptions, pull

        with Progress("pulling", reference) as progress:
            options = PullOptions(on_event=progress.on_event)
            name = pull(reference, layout, connect(), options).name
        return open_runnable(layout, name, lease)

    return AdapterFinder(layout, open_stored, directory, has_files=True)


def find_uses(texts: Iterable[str]) -> list[tuple[AdapterEntry, float]]:
    """Return the adapters of the option and their strengths. Raises as ``AdapterFinder.find``."""
    request = GenerateRequest.of("", loras=read_uses(texts, None))
    with needs("adapters", "mlx"):
        adapters = create_adapter_finder(None, cache(get_settings().build_client_options)).find_all(
            request
        )
    pairs = zip(adapters, request.adapters.loras, strict=True)
    return [(adapter, adapter.resolve_strength(use.strength)) for adapter, use in pairs]


def offer(words: Sequence[str]) -> None:
    """Print the trigger words that a prompt lacks."""
    if words:
        remark(f"trigger words of the adapters: {', '.join(words)} (--trigger adds them)")


def to_worker(client: WorkerClient, uses: Sequence[LoraUse], prompt: str | None) -> dict[str, Any]:
    """Return the fields of a request for adapters that a worker has.

    Their trigger words are offered for a ``prompt``, if it is not None.

    Raises UsageError: one is a file here.
    """
    from clowder_aimage.engine.remote.image_generation import build_lora_fields

    hint = "use --local, or pack it with 'aimage create' for the worker"
    fields = build_lora_fields(uses, hint)
    words: list[str] = []
    for use in uses if prompt is not None else ():
        words += _fetch_trigger_words(client, use.model)
    offer(list_missing_words(prompt or "", words))
    return fields


def _fetch_trigger_words(client: WorkerClient, name: str) -> list[str]:
    """Return the trigger words of a worker's adapter; none if the worker does not send them."""
    try:
        answer = client.ask("GET", f"/v1/models/{quote(name, safe='/:@')}")
    except AImageError:
        return []
    adapter = answer.get("adapter") if isinstance(answer, dict) else None
    words = adapter.get("triggerWords") if isinstance(adapter, dict) else None
    return [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
