"""The verb ``run``."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.option import (
    connection_options,
    needs,
    reference_argument,
    settings,
    verb,
)
from clowder_aimage.cli.console.output import note, remark, result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.console.remote_worker import (
    RemotePicture,
    pictures,
    refuse_options,
    worker,
    worker_host,
)
from clowder_aimage.content.atomic_file import DISK_FULL, write_file
from clowder_aimage.errors import NoSpaceError, StoreError, UsageError
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.generate import RunnableModel
    from clowder_aimage.layout.stored_aimage import StoredAImage
    from clowder_aimage.model.pipeline import GenerateRequest, Image, PipelineEvent

# The value of an option is None if it was not given; the AImage has the default.


@verb
@reference_argument
@click.argument("prompt")
@click.option(
    "--width", type=int, help="Pixels, for most models a multiple of 16. [default: the model's]"
)
@click.option(
    "--height", type=int, help="Pixels, for most models a multiple of 16. [default: the model's]"
)
@click.option("--steps", type=int, help="Denoising steps. [default: 8]")
@click.option("--seed", type=int, help="The same seed gives the same picture. [default: random]")
@click.option("--negative", metavar="TEXT", help="What to avoid; requires --guidance.")
@click.option("--guidance", type=float, help="Guidance scale. [default: 0]")
@click.option("--shift", type=float, help="Shift of the noise schedule. [default: the model's]")
@click.option(
    "--dtype", help="Type to compute in: float32 (f32) or bfloat16 (bf16). [default: by device]"
)
@click.option(
    "-n",
    "count",
    type=int,
    default=1,
    show_default=True,
    help="Number of pictures, with increasing seeds.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="A file or a directory. [default: ./NAME-SEED.png]",
)
@click.option("--open/--no-open", "show", default=None, help="Show the picture. [macOS: open]")
@connection_options
def run(
    reference: Reference,
    output: Path | None,
    show: bool | None,
    dtype: str | None,
    count: int,
    **options: Any,
) -> None:
    """Generate a picture of PROMPT with the AImage REF; print the path of the PNG file.

    REF is pulled first if the store lacks it. If AIMAGE_HOST names a worker, the worker generates
    the picture from its own store.
    """
    if options["negative"] is not None and not options["guidance"]:
        raise UsageError("--negative requires --guidance above 0")
    _check_output(output)
    is_drawn = options["seed"] is None
    if is_drawn:
        options["seed"] = secrets.randbits(32)

    def announce(text: str) -> None:
        if is_drawn:
            note(f"seed {options['seed']}")
        remark(text)

    if worker_host():
        refuse_options(
            "omit it, or unset AIMAGE_HOST to generate the picture in this process",
            but=(*options, "count", "output", "show"),
        )
        made = _by_worker(reference, options, count, announce)
    else:
        made = _here(reference, options | {"n": count}, dtype, announce)
    written, facts = [], dict[str, Any]()
    with contextlib.closing(made):
        for picture in made:
            path = _path(output, reference, picture.seed, picture.index, count)
            _write(path, picture.data)
            facts = facts or {**picture.facts}
            written.append({"path": str(path), "seed": picture.seed})
            if show if show is not None else (sys.platform == "darwin" and sys.stdout.isatty()):
                click.launch(str(path))
    value = facts | {"pictures": written}
    result(value, "\n".join(str(item["path"]) for item in written))


def _here(
    reference: Reference,
    options: Mapping[str, Any],
    dtype: str | None,
    announce: Callable[[str], None],
) -> Generator[RemotePicture, None, None]:
    """Generate the pictures in this process."""
    stored = fetch_model(reference)
    from clowder_aimage.generate import describe_picture
    from clowder_aimage.model.picture import encode_picture
    from clowder_aimage.model.pipeline import GenerateRequest

    request = GenerateRequest.for_model(stored.aimage, **options)
    model = load_model(stored, dtype)
    events = model.generate(request)
    announce(f"rendering on {model.backend}")
    facts = describe_picture(reference, model, request)
    for picture in render(events, request):
        own = facts | {"seed": picture.seed}
        yield RemotePicture(encode_picture(picture.pixels, own), picture.seed, picture.picture, own)


def _by_worker(
    reference: Reference, options: Mapping[str, Any], count: int, announce: Callable[[str], None]
) -> Generator[RemotePicture, None, None]:
    """Generate the pictures in the worker in AIMAGE_HOST."""
    client, seed = worker(), options["seed"]
    if not 1 <= count <= 1024:
        raise UsageError(f"n must be a whole number from 1 to 1024, not {count}")
    if not 0 <= seed <= (1 << 64) - count:
        raise UsageError(f"seed must be a whole number from 0 to 2^64 - n, not {seed}")
    yield from pictures(
        client,
        reference,
        {**options, "png_facts": True},  # so that the picture can be replayed
        count,
        on_accepted=lambda: announce(f"rendering on the worker at {client.endpoint}"),
    )


def fetch_model(reference: Reference) -> StoredAImage:
    """Return an AImage, pulled where the store lacks it; the lease is held until the verb ends.

    Raises:
        UsageError: The extra [mlx] is not installed.
    """
    with needs("running a model", "mlx"):
        from clowder_aimage import generate
    chosen = settings()
    layout, connection = chosen.layout, chosen.connection()
    with Progress("pulling", reference) as progress:
        lease = click.get_current_context().with_resource(layout.lease())
        return generate.fetch(layout, reference, connection, lease, on_event=progress.on_event)


def load_model(stored: StoredAImage, dtype: str | None) -> RunnableModel:
    """Load a model with all the memory of the machine."""
    from clowder_aimage import generate
    from clowder_aimage.engine import machine
    from clowder_aimage.model.memory_budget import KEEP, device_memory

    model = generate.load(settings().layout, stored, dtype=dtype)
    model.pipeline.set_memory(KEEP, None, device_memory() or machine.memory())
    return model


def render(events: Iterable[PipelineEvent], request: GenerateRequest) -> Iterator[Image]:
    """Yield the pictures of a run as they are completed; show a bar of its steps."""
    from clowder_aimage.model.pipeline import Image

    with Progress("rendering", unit="steps") as progress:
        progress.begin(request.steps * request.n)
        for event in events:
            if isinstance(event, Image):
                yield event
            else:
                progress.advance(1)


def _write(path: Path, data: bytes) -> None:
    """Write a picture atomically. Raises NoSpaceError, StoreError."""
    try:
        write_file(path, data, durable=False)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise NoSpaceError(
                f"no space left for the picture {path}", hint="free some space, or use -o"
            ) from None
        raise StoreError(
            f"cannot write the picture {path}: {error.strerror or error}",
            hint="choose another path with -o",
        ) from None


def _check_output(output: Path | None) -> None:
    """Reject an output path that is not writable before the picture is generated."""
    directory = output or Path()
    if output is not None and not output.is_dir():
        directory = output.parent
        if output.suffix.lower() not in ("", ".png"):
            raise UsageError(f"only .png output is supported, not {output.name}")
    if not directory.is_dir():
        raise StoreError(
            f"cannot write a picture: directory not found: {directory}",
            hint="create the directory, or choose another path with -o",
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StoreError(
            f"cannot write a picture to {directory}: Permission denied",
            hint="choose another path with -o",
        )


def _path(output: Path | None, reference: Reference, seed: int, index: int, count: int) -> Path:
    """Return a picture's path. A name chosen here never overwrites another picture."""
    if output is None or output.is_dir():
        stem = f"{reference.repository.rpartition('/')[2]}-{seed}"
        names = (f"{stem}-{number}.png" for number in itertools.count(2))
        paths = ((output or Path()) / name for name in itertools.chain((f"{stem}.png",), names))
        return next(path for path in paths if not path.exists())
    output = output if output.suffix else output.with_suffix(".png")
    return output if count == 1 else output.with_stem(f"{output.stem}-{index + 1}")
