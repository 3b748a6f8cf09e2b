"""The verb ``push``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from clowder_aimage.cli.console.base_repository import advise_repository
from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.option import (
    get_settings,
    transfer_options,
    verb,
)
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.console.stored_name import resolve_unique_name, stored_arguments
from clowder_aimage.config.user_directory import open_dialect_cache
from clowder_aimage.errors import AImageError, UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.oci.descriptor import to_plain

if TYPE_CHECKING:
    from clowder_aimage.registry import ClientOptions


@examples(f"aimage push {NAME}", f"aimage push {NAME} --dialect container")
@verb
@stored_arguments(required=True, parse=resolve_unique_name)
@click.option(
    "--dialect",
    type=click.Choice(["clowder", "ollama", "modelpack", "container", "image"]),
    help="Write the manifest as these tools do; image: files that Kubernetes and Docker mount. "
    "[default: as it is]",
)
@click.option(
    "--manifest-type",
    type=click.Choice(["oci", "custom"]),
    help="Media type of the manifest; registries reject the custom one.",
)
@click.option(
    "--no-fallback",
    is_flag=True,
    help="Fail if the registry rejects the manifest, instead of trying the next dialect.",
)
@transfer_options
def push(
    references: tuple[Reference, ...],
    dialect: str | None,
    manifest_type: str | None,
    no_fallback: bool,
) -> None:
    """Push the AImages REF... to the registries in their names; print a digest for each.

    Only blobs that the registry lacks are sent. If it rejects the manifest, the manifest is
    rewritten in the next dialect (clowder, ollama, container); blobs never change. A push by digest
    is not rewritten. The first error ends the command.
    """
    if manifest_type is not None:
        if dialect not in (None, "clowder"):
            raise UsageError(f"--manifest-type cannot be combined with --dialect {dialect}")
        dialect = "custom" if manifest_type == "custom" else "clowder"
    connection = get_settings().build_client_options(
        *(reference.registry for reference in references)
    )
    for reference in references:
        _push(reference, connection, dialect, no_fallback)


def _push(
    reference: Reference, connection: ClientOptions, dialect: str | None, no_fallback: bool
) -> None:
    from clowder_aimage.push import push as push_aimage

    def on_fallback(name: str, error: AImageError) -> None:
        progress.note(f"{error.message}; trying the {name} dialect")

    def on_remembered(name: str, refused: str) -> None:
        anew = "--manifest-type custom" if refused == "custom" else f"--dialect {refused}"
        progress.note(
            f"{reference.registry} rejected the {refused} dialect recently; starting with the "
            f"{name} dialect ({anew} retries the {refused} dialect)"
        )

    with Progress("pushing", reference) as progress:
        descriptor = push_aimage(
            get_settings().layout,
            reference,
            connection,
            dialect=dialect,
            fallback=not no_fallback,
            on_event=progress.on_event,
            on_fallback=on_fallback,
            ladder=open_dialect_cache(),
            on_remembered=on_remembered,
        )
    progress.summarize("pushed")
    advise_repository(reference, is_pushed=True)
    print_result({"reference": str(reference), **to_plain(descriptor)}, str(descriptor.digest))
