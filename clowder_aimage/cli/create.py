"""``aimage create``"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clowder_aimage.cli.option import common_options, jobs_option, settings
from clowder_aimage.cli.output import note, number, plural, result, size
from clowder_aimage.cli.progress import Progress
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.create import Created


@click.command(short_help="Pack a model directory as an AImage.")
@click.argument("name")
@click.argument("directory", metavar="[DIR]", type=click.Path(path_type=Path), default=".")
@click.option(
    "--dialect",
    type=click.Choice(["clowder", "ollama", "container"]),
    default="clowder",
    show_default=True,
    help="How to write the manifest.",
)
@click.option(
    "--manifest-type",
    type=click.Choice(["oci", "custom"]),
    default="oci",
    show_default=True,
    help="The manifest's own media type; registries refuse the custom one.",
)
@click.option("--license", "license_", metavar="SPDX", help="Instead of the model card's.")
@click.option("--source", metavar="URL", help="Where the model came from.")
@click.option(
    "--created",
    metavar="TIME",
    help="RFC 3339. Recorded only when given. [env: SOURCE_DATE_EPOCH, in seconds]",
)
@click.option(
    "--digest",
    "algorithm",
    type=click.Choice(["sha256", "sha512"]),
    default="sha256",
    show_default=True,
    help="What the layers and the config are known by.",
)
@jobs_option
@common_options
def create(
    name: str,
    directory: Path,
    dialect: str,
    manifest_type: str,
    license_: str | None,
    source: str | None,
    created: str | None,
    algorithm: str,
    jobs: int | None,
) -> None:
    """Pack the diffusers model directory DIR (default: here) as the AImage NAME.

    Each tensor becomes a blob of its own, so models share what they have in common. The digest
    depends on the model alone: not on the machine, the time, or the packer.
    """
    from clowder_aimage.create import create as create_aimage
    from clowder_aimage.importer import Provenance

    chosen = settings()
    reference = Reference.parse(name)
    if reference.digest is not None:
        raise UsageError(f"{name} names a digest, which only content can decide")
    if manifest_type == "custom" and dialect != "clowder":
        raise UsageError("--manifest-type custom is a form of the clowder dialect")
    with Progress("packing", reference, quiet=chosen.quiet) as progress:
        made = create_aimage(
            chosen.layout,
            reference,
            directory,
            dialect="custom" if manifest_type == "custom" else dialect,
            algorithm=algorithm,
            provenance=Provenance(license_, source, _created(created)),
            jobs=jobs,
            on_plan=lambda plan: progress.begin(plan.size),
            on_written=lambda written: progress.advance(written.layer.descriptor.size),
        )
    value = _summary(reference, made)
    if not chosen.quiet:
        note(_text(value))
    result(value, str(made.descriptor.digest), as_json=chosen.as_json)


def _created(given: str | None) -> str | None:
    """The creation time: as given, or from SOURCE_DATE_EPOCH (reproducible-builds.org)."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if given is None and epoch:
        try:
            return datetime.fromtimestamp(int(epoch), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        except (ValueError, OverflowError, OSError):
            raise UsageError(f"SOURCE_DATE_EPOCH is not a number of seconds: {epoch!r}") from None
    if given is None:
        return None
    try:
        time = datetime.fromisoformat(given)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise UsageError(f"--created needs a time such as 2026-01-31T12:00:00Z, not {given!r}")
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _summary(reference: Reference, made: Created) -> dict[str, object]:
    layers = [written.layer for written in made.layers]
    shared = [written.layer for written in made.layers if written.was_there]
    tensors = [layer for layer in layers if layer.is_tensor]
    return {
        "reference": str(reference),
        "digest": str(made.descriptor.digest),
        "mediaType": made.descriptor.media_type,
        "tensors": len(tensors),
        "files": len(layers) - len(tensors),
        "parameters": sum(_elements(layer.shape) for layer in tensors),
        "size": sum(layer.descriptor.size for layer in layers),
        "alreadyThere": {
            "layers": len(shared),
            "size": sum(layer.descriptor.size for layer in shared),
        },
    }


def _elements(shape: tuple[int, ...] | None) -> int:
    count = 1
    for dimension in shape or ():
        count *= dimension
    return count


def _text(value: dict[str, object]) -> str:
    there = value["alreadyThere"]
    assert isinstance(there, dict)  # noqa: S101
    tensors, files = int(str(value["tensors"])), int(str(value["files"]))
    return (
        f"{value['reference']}: {plural(tensors, 'tensor')} "
        f"({number(int(str(value['parameters'])))} parameters) and {plural(files, 'file')}, "
        f"{size(int(str(value['size'])))}; {there['layers']} of {tensors + files} blobs "
        f"({size(there['size'])}) were in the store already"
    )
