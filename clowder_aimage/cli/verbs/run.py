"""The verb ``run``."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.option import (
    VerbSettings,
    common_options,
    connection,
    connection_options,
    settings,
)
from clowder_aimage.cli.console.output import note, result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.console.remote_worker import (
    RemotePicture,
    has_worker,
    pictures,
    refuse_options,
    worker,
)
from clowder_aimage.content.atomic_file import DISK_FULL, write_file
from clowder_aimage.errors import NoSpaceError, StoreError, UsageError
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.model.pipeline import GenerateRequest, Image, Step
    from clowder_aimage.registry import ClientOptions

# An option's value is None when it was not given: then the AImage decides.


@click.command()
@click.argument("ref")
@click.argument("prompt")
@click.option(
    "--width", type=int, help="Pixels, for most models a multiple of 16. [default: the model's]"
)
@click.option(
    "--height", type=int, help="Pixels, for most models a multiple of 16. [default: the model's]"
)
@click.option("--steps", type=int, help="Denoising steps. [default: 8]")
@click.option("--seed", type=int, help="The same seed makes the same picture. [default: drawn]")
@click.option("--negative", metavar="TEXT", help="What to avoid; needs --guidance.")
@click.option("--guidance", type=float, help="Guidance scale. [default: 0]")
@click.option("--shift", type=float, help="Shift of the noise schedule. [default: the model's]")
@click.option(
    "--dtype",
    help="Type to compute in: float32 (f32) or bfloat16 (bf16). [default: by device]",
)
@click.option(
    "-n",
    "count",
    type=int,
    default=1,
    show_default=True,
    help="How many pictures, with rising seeds.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="A file or a directory. [default: NAME-SEED.png, here]",
)
@click.option("--open/--no-open", "show", default=None, help="Show the picture. [macOS: open]")
@connection_options
@common_options
def run(
    ref: str,
    prompt: str,
    output: Path | None,
    show: bool | None,
    dtype: str | None,
    count: int,
    plain_http: bool,
    insecure: bool,
    ca_file: Path | None,
    **wishes: Any,
) -> None:
    """Make a picture of PROMPT with the AImage REF; print the path of the PNG file.

    REF is pulled first if the store lacks it. Where AIMAGE_HOST names a worker, that makes the
    picture, with what its own store has.
    """
    chosen, reference = settings(), Reference.parse(ref)
    if wishes["negative"] is not None and not wishes["guidance"]:
        raise UsageError("--negative needs --guidance above 0: without it nothing is avoided")
    _check_output(output)
    job = _Job(reference, prompt, wishes, count, chosen)
    if has_worker():
        refuse_options(
            "leave it out, or unset AIMAGE_HOST to make the picture in this process",
            but=(*wishes, "count", "output", "show"),
        )
        made = _by_worker(job)
    else:
        made = _here(job, dtype, lambda: connection(plain_http, insecure, ca_file))
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
    result(value, "\n".join(str(item["path"]) for item in written), as_json=chosen.as_json)


@dataclass(frozen=True, slots=True)
class _Job:
    """Arguments of the command line."""

    reference: Reference
    prompt: str
    wishes: dict[str, Any]
    count: int
    chosen: VerbSettings

    def draw_seed(self) -> bool:
        """Decide on a seed where none is given; says whether it was so."""
        drawn = self.wishes["seed"] is None
        if drawn:
            self.wishes["seed"] = secrets.randbits(32)
        return drawn


def _here(
    job: _Job, dtype: str | None, reach: Callable[[], ClientOptions]
) -> Generator[RemotePicture, None, None]:
    """Generate the pictures in this process."""
    generate = needs_mlx()
    from clowder_aimage.engine import machine
    from clowder_aimage.model.memory_budget import KEEP, device_memory
    from clowder_aimage.model.picture import encode_picture
    from clowder_aimage.model.pipeline import GenerateRequest

    layout, quiet = job.chosen.layout, job.chosen.quiet
    with Progress("pulling", job.reference, quiet=quiet) as progress:
        lease = click.get_current_context().with_resource(layout.lease())
        stored = generate.fetch(layout, job.reference, reach(), lease, on_event=progress.on_event)
    drawn = job.draw_seed()
    request = GenerateRequest.for_model(stored.aimage, job.prompt, n=job.count, **job.wishes)
    model = generate.load(layout, stored, dtype=dtype)
    model.pipeline.set_memory(KEEP, None, device_memory() or machine.memory())
    events = model.generate(request)
    if drawn:
        note(f"seed {request.seed}")
    if not quiet:
        note(f"computing on {model.backend}")
    facts = generate.describe_picture(job.reference, model, request)
    for picture in render(events, request, quiet=quiet):
        own = facts | {"seed": picture.seed}
        yield RemotePicture(encode_picture(picture.pixels, own), picture.seed, picture.picture, own)


def _by_worker(job: _Job) -> Generator[RemotePicture, None, None]:
    """Generate the pictures in the worker in AIMAGE_HOST."""
    client, drawn = worker(), job.draw_seed()
    seed, quiet = job.wishes["seed"], job.chosen.quiet
    if not 1 <= job.count <= 1024:
        raise UsageError(f"n must be a whole number from 1 to 1024, not {job.count}")
    if not 0 <= seed <= (1 << 64) - job.count:
        raise UsageError(f"seed must be a whole number from 0 to 2^64 - n, not {seed}")

    def accepted() -> None:
        if drawn:
            note(f"seed {seed}")
        if not quiet:
            note(f"the worker at {client.endpoint} computes")

    yield from pictures(
        # whatever the worker does by itself: this picture can be replayed
        *(client, job.reference, job.prompt, job.wishes | {"png_facts": True}, job.count),
        quiet=quiet,
        on_accepted=accepted,
    )


def needs_mlx() -> Any:
    """Return the module ``generate``. Raises UsageError: the extra [mlx] is not installed."""
    try:
        from clowder_aimage import generate
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clowder_aimage"):
            raise
        raise UsageError(
            f"running a model needs {error.name}, which is not installed",
            hint="pip install 'clowder-aimage[mlx]'",
        ) from None
    return generate


def render(
    events: Iterable[Step | Image], request: GenerateRequest, *, quiet: bool
) -> Iterator[Image]:
    """Yield the pictures of a run as they are finished, with a bar of its steps."""
    from clowder_aimage.model.pipeline import Image

    with Progress("rendering", quiet=quiet, unit="steps") as progress:
        progress.begin(request.steps * request.n)
        for event in events:
            if isinstance(event, Image):
                yield event
            else:
                progress.advance(1)


def _write(path: Path, data: bytes) -> None:
    """Write a picture; it is there whole, or not at all. Raises NoSpaceError, StoreError."""
    try:
        write_file(path, data, durable=False)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise NoSpaceError(
                f"no space left for the picture {path}", hint="free some space, or use -o"
            ) from None
        raise StoreError(
            f"cannot write the picture {path}: {error.strerror or error}",
            hint="name another place with -o",
        ) from None


def _check_output(output: Path | None) -> None:
    """Refuse a place that a picture cannot go to before minutes are spent on the picture."""
    if output is None or output.is_dir():
        _check_directory(output or Path())
        return
    if output.suffix.lower() not in ("", ".png"):
        raise UsageError(f"pictures are PNG files; {output.name} is called something else")
    _check_directory(output.parent)


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise StoreError(
            f"cannot write a picture: there is no directory {directory}",
            hint="make the directory, or name another place with -o",
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StoreError(
            f"cannot write a picture into {directory}: Permission denied",
            hint="name another place with -o",
        )


def _path(output: Path | None, reference: Reference, seed: int, index: int, count: int) -> Path:
    """Return a picture's path. A name chosen here never overwrites another picture."""
    if output is None or output.is_dir():
        stem = f"{reference.repository.rpartition('/')[2]}-{seed}"
        directory, number = output or Path(), 2
        path = directory / f"{stem}.png"
        while path.exists():
            path = directory / f"{stem}-{number}.png"
            number += 1
        return path
    output = output if output.suffix else output.with_suffix(".png")
    return output if count == 1 else output.with_stem(f"{output.stem}-{index + 1}")
