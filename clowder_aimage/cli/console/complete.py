"""Completion of names, tags and paths in a shell (click, "Shell Completion")."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import click

from clowder_aimage.errors import AImageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_TIMEOUT = 2.0  # seconds for the tags of a registry


def complete_name(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names in the store, and the tags of a repository in a registry."""
    from click.shell_completion import CompletionItem

    names: set[str] = set()
    with ctx, contextlib.suppress(AImageError, OSError):
        from clowder_aimage.cli.console.option import settings

        chosen = settings()
        if any(root.is_dir() for root in chosen.stores):
            names.update(name for name, _ in chosen.layout.tags())
        if ":" in incomplete.rpartition("/")[2] and "/" in incomplete:
            names.update(_tags(incomplete.rpartition(":")[0]))
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def complete_path(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete a file."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def _tags(repository: str) -> list[str]:
    """Return the tags of a repository with its name; empty if they do not arrive in time."""
    from clowder_aimage.cli.console.option import settings
    from clowder_aimage.oci import Reference
    from clowder_aimage.registry import Repository, is_generated

    reference = Reference.parse(repository)
    if reference.registry is None:
        return []
    connection, found = settings().connection(), list[str]()

    def fetch() -> None:
        with contextlib.suppress(AImageError), Repository(reference, connection) as remote:
            tags = [tag for tag in remote.tag_names() if not is_generated(tag)]
            found.extend(f"{reference.name}:{tag}" for tag in tags)

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(_TIMEOUT)
    return found
