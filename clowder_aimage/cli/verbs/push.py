"""The verb ``push``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clowder_aimage.cli.console.option import (
    common_options,
    connection,
    connection_options,
    jobs_option,
    ladder,
    settings,
)
from clowder_aimage.cli.console.output import plain, result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.errors import AImageError


@click.command()
@click.argument("ref")
@click.option(
    "--dialect",
    type=click.Choice(["clowder", "ollama", "modelpack", "container"]),
    help="Rewrite the manifest. [default: as it is]",
)
@click.option(
    "--manifest-type",
    type=click.Choice(["oci", "custom"]),
    help="The manifest's own media type; with custom the push begins with Clowder's own.",
)
@click.option("--no-fallback", is_flag=True, help="Fail where the registry refuses the manifest.")
@jobs_option
@connection_options
@common_options
def push(
    ref: str,
    dialect: str | None,
    manifest_type: str | None,
    no_fallback: bool,
    jobs: int | None,
    plain_http: bool,
    insecure: bool,
    ca_file: Path | None,
) -> None:
    """Send the AImage REF to the registry in its name; print the digest the registry holds.

    Blobs that are there already are not sent. Where the registry refuses the kind of manifest, it
    is rewritten in the next dialect (clowder, ollama, container), which changes no blob; a push
    by digest never is.
    """
    from clowder_aimage.push import push as push_aimage

    chosen = settings()
    reference = Reference.parse(ref)
    if manifest_type is not None:
        if dialect not in (None, "clowder"):
            raise UsageError("--manifest-type is a form of the clowder dialect")
        dialect = "custom" if manifest_type == "custom" else "clowder"

    def on_fallback(name: str, error: AImageError) -> None:
        progress.note(f"{error.message}; trying the {name} dialect")

    def on_remembered(name: str, refused: str) -> None:
        anew = "--manifest-type custom" if refused == "custom" else f"--dialect {refused}"
        progress.note(
            f"{reference.registry} refused the {refused} dialect lately; beginning with the {name} "
            f"dialect ({anew} tries the other again)"
        )

    with Progress("pushing", reference, quiet=chosen.quiet) as progress:
        descriptor = push_aimage(
            chosen.layout,
            reference,
            connection(plain_http, insecure, ca_file, jobs),
            dialect=dialect,
            fallback=not no_fallback,
            on_event=progress.on_event,
            on_fallback=on_fallback,
            ladder=ladder(),
            on_remembered=on_remembered,
        )
    progress.say("pushed")
    value = {"reference": str(reference), **plain(descriptor)}
    result(value, str(descriptor.digest), as_json=chosen.as_json)
