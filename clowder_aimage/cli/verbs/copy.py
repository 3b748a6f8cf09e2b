"""The verb ``copy``."""

from __future__ import annotations

import click

from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.option import (
    complete_name,
    get_settings,
    parse_reference,
    transfer_options,
    verb,
)
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.oci.descriptor import to_plain


@examples(
    f"aimage copy {NAME} registry.example.com/prod/shapes:v1",
    f"aimage copy -r {NAME} mirror.example.com/team/shapes:v1",
)
@verb
@click.argument("src", shell_complete=complete_name)
@click.argument("dst")
@click.option("-r", "--recursive", is_flag=True, help="Copy what is attached to SRC too.")
@click.option("-a", "--all-tags", is_flag=True, help="Copy all tags; SRC and DST are repositories.")
@transfer_options
def copy(src: str, dst: str, recursive: bool, all_tags: bool) -> None:
    """Copy SRC from its registry to the registry in DST; print its digest.

    The manifest is copied unchanged, and nothing is stored on this machine. Blobs that DST already
    has are not sent; within one registry blobs are mounted. Signatures of SRC are copied, too.

    With --recursive, all artifacts that are attached to SRC are copied first, with those attached
    to them.
    """
    from clowder_aimage.push import transfer

    source, target = parse_reference(src), parse_reference(dst)
    if all_tags:
        _copy_tags((src, source), (dst, target), recursive)
        return
    with Progress("copying", source) as progress:
        connection = get_settings().build_client_options(source.registry, target.registry)
        descriptor = transfer(
            source, target, connection, recursive=recursive, on_event=progress.on_event
        )
    progress.summarize("copied")
    value = {"source": str(source), "reference": str(target), **to_plain(descriptor)}
    print_result(value, str(descriptor.digest))


def _copy_tags(
    source: tuple[str, Reference], target: tuple[str, Reference], recursive: bool
) -> None:
    from clowder_aimage.push import transfer_tags

    for text, reference in (source, target):
        if text != reference.name:
            raise UsageError(f"--all-tags expects repositories without a tag or digest, not {text}")
    with Progress("copying", source[1]) as progress:
        copied = transfer_tags(
            source[1],
            target[1],
            get_settings().build_client_options(source[1].registry, target[1].registry),
            recursive=recursive,
            on_event=progress.on_event,
        )
    progress.summarize("copied")
    value = {
        "source": source[0],
        "repository": target[0],
        "tags": [{"tag": tag, **to_plain(descriptor)} for tag, descriptor in copied.items()],
    }
    print_result(
        value, (f"{target[0]}:{tag} {descriptor.digest}" for tag, descriptor in copied.items())
    )
