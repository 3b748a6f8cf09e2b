"""The verb ``tags``."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from clowder_aimage.cli.console.example import REPOSITORY, examples
from clowder_aimage.cli.console.option import connection_options, get_settings, verb
from clowder_aimage.cli.console.output import (
    format_table,
    note,
    print_result,
    wants_value,
)
from clowder_aimage.content.parallel import run_parallel
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.oci.descriptor import to_plain


@examples(f"aimage tags {REPOSITORY}", f"aimage tags --long {REPOSITORY}")
@verb
@click.argument("repo")
@click.option("--long", "-l", "is_long", is_flag=True, help="Show digests and types.")
@click.option(
    "--all", "-a", "lists_generated", is_flag=True, help="List generated tags (sha256-...) too."
)
@connection_options
def tags(repo: str, is_long: bool, lists_generated: bool) -> None:
    """List the tags of the repository REPO, one per line, in the registry's order.

    Tags that tools generate for referrers and signatures (sha256-...) are left out.
    """
    from clowder_aimage.registry import Repository, is_generated

    chosen = get_settings()
    connection, reference = chosen.build_client_options(), Reference.parse(repo)
    if connection.expand(reference).registry is None:
        hint = "'aimage ls' lists the names in the store"
        if set(".:") & set(repo) or repo == "localhost":
            hint = f"'aimage repo ls {repo}' lists the repositories of a registry"
        raise UsageError(f"expected HOST/REPOSITORY, not {repo}", hint=hint)
    if reference.name != repo:
        raise UsageError(
            f"expected HOST/REPOSITORY without a tag or digest, not {repo}",
            hint=f"use: aimage tags {reference.name}",
        )
    descriptors: dict[str, Descriptor] = {}
    with Repository(reference, connection) as repository:
        names = [
            tag for tag in repository.list_tag_names() if lists_generated or not is_generated(tag)
        ]

        def describe(tag: str) -> None:
            descriptors[tag] = repository.describe(Reference.parse(f"{repo}:{tag}"))

        if is_long:
            jobs = connection.compute_connections(reference.registry)
            run_parallel([partial(describe, tag) for tag in names], jobs, lambda: None)
    value: dict[str, Any] = {"repository": reference.name, "tags": names}
    if is_long:
        value["manifests"] = [{"tag": tag, **to_plain(descriptors[tag])} for tag in names]
    if not names and not wants_value():
        if not chosen.quiet:
            note(f"{reference.name} has no tags")
        return
    rows = [("TAG", "DIGEST", "TYPE")]
    rows += [
        (tag, str(descriptors[tag].digest), descriptors[tag].media_type) for tag in names if is_long
    ]
    print_result(value, format_table(rows) if is_long else names)
