"""Pictures that are pushed to a registry as an artifact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clowder_aimage.cli.console.option import get_settings
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.pictures.generated_picture import GeneratedPicture
    from clowder_aimage.registry import ClientOptions


def check_push(target: Reference, prompt: str | None, model: Reference) -> None:
    """Reject a name that pictures cannot be pushed to, before they are generated.

    The registry is asked to accept an upload. Raises as ``check_replaceable``.
    """
    from clowder_aimage.pictures.artifact import check_replaceable, check_target

    if prompt is None:
        raise UsageError("--push requires PROMPT: each prompt would replace the last pictures")
    connection = _build_client_options(model, target)
    check_target(target, connection)
    check_replaceable(target, connection)


def push_made(pictures: Sequence[GeneratedPicture], target: Reference) -> dict[str, str]:
    """Push pictures as one artifact; return its name and digest."""
    from clowder_aimage.pictures.artifact import push_pictures

    metadata = pictures[0].facts
    model = Reference.parse(str(metadata["reference"])) if metadata else target
    connection = _build_client_options(model, target)
    with Progress("pushing", target) as progress:
        layout = get_settings().layout
        sent = push_pictures(pictures, target, layout, connection, on_event=progress.on_event)
    progress.summarize("pushed")
    digest = str(sent.digest)
    return {"reference": f"{connection.expand(target)}@{digest}", "digest": digest}


def _build_client_options(*names: Reference) -> ClientOptions:
    """Return the options for the registries of names. Raises UsageError."""
    return get_settings().build_client_options(
        *dict.fromkeys(filter(None, (name.registry for name in names)))
    )
