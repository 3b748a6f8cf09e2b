"""``aimage tag``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import click

from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.option import (
    connection_options,
    get_settings,
    tag_reference,
    verb,
)
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.cli.console.stored_name import stored_argument
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference, mediatype
from clowder_aimage.oci.descriptor import to_plain


@examples(f"aimage tag shapes {NAME}")
@verb
@stored_argument("src", None)
@click.argument("names", metavar="DST...", nargs=-1, required=True)
@click.option("--remote", is_flag=True, is_eager=True, help="Add tags in the registry of SRC.")
@connection_options
def tag(src: Reference, names: tuple[str, ...], remote: bool) -> None:
    """Give the AImage SRC the names DST as well. No blob is copied.

    With --remote SRC is a name in a registry, and each DST is a tag of its repository.
    """
    chosen = get_settings()
    if remote:
        _tag_remotely(src, names)
        return
    if chosen.has_connection:
        raise UsageError("options for registries require --remote")
    targets = [tag_reference(name) for name in names]
    layout = chosen.layout
    # Before a missing store is created.
    layout.resolve(src)
    with layout.keep():
        descriptor = layout.resolve(src)
        is_partial = descriptor.annotations.get(mediatype.PARTIAL) == "true"
        for target in targets:
            layout.tag(descriptor, target, is_partial=is_partial)
            print_result({"reference": str(target), **to_plain(descriptor)}, str(descriptor.digest))


def _tag_remotely(src: Reference, names: tuple[str, ...]) -> None:
    from clowder_aimage.registry import Repository

    connection = get_settings().build_client_options()
    src = connection.expand(src)
    targets = [_resolve_target(src, connection.expand, name) for name in names]
    with Repository(src, connection) as repository:
        content = repository.resolve(src)
        for target in targets:
            repository.tag(content, target)
            print_result(
                {"reference": str(target), **to_plain(content)}, f"{target} {content.digest}"
            )


def _resolve_target(
    src: Reference, expand: Callable[[Reference], Reference], name: str
) -> Reference:
    """Return the name for a tag of the repository of ``src``. Raises UsageError."""
    if src.registry is None:
        raise UsageError(
            f"{src} has no registry host", hint=f"to tag it in the store: aimage tag {src} {name}"
        )
    if re.fullmatch(r"[^/:@]+", name):
        return tag_reference(f"{src.name}:{name}")
    target = expand(tag_reference(name))
    if replace(target, tag=None) != replace(src, tag=None, digest=None):
        raise UsageError(
            f"{name} is not in the repository {src.name}",
            hint=f"a DST is a tag, such as v2; to another repository: aimage copy {src} {name}",
        )
    return target
