"""``aimage pull``"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clowder_aimage.cli.option import (
    Settings,
    common_options,
    connection,
    connection_options,
    jobs_option,
    limit_option,
    settings,
)
from clowder_aimage.cli.output import plain, plural, result, size
from clowder_aimage.cli.progress import Progress
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.content import CopyPlan


@click.command(short_help="Fetch an AImage from the registry in its name.")
@click.argument("ref")
@click.option("--dry-run", is_flag=True, help="Say what would be fetched, and fetch nothing.")
@limit_option
@jobs_option
@connection_options
@common_options
def pull(
    ref: str,
    dry_run: bool,
    limit: int | None,
    jobs: int,
    plain_http: bool,
    insecure: bool,
    ca_file: Path | None,
) -> None:
    """Fetch the AImage REF from the registry in its name; print its digest.

    Every byte is verified before it gets its name in the store. Blobs that are there already are
    not fetched.
    """
    from clowder_aimage.content import Rate
    from clowder_aimage.pull import plan_pull
    from clowder_aimage.pull import pull as pull_aimage

    chosen = settings()
    reference = Reference.parse(ref)
    reach = connection(plain_http, insecure, ca_file, jobs)
    if dry_run:
        _say(reference, plan_pull(reference, reach), chosen)
        return
    with Progress("pulling", reference, quiet=chosen.quiet) as progress:
        descriptor = pull_aimage(
            reference,
            chosen.layout,
            reach,
            jobs=jobs,
            on_event=progress.on_event,
            rate=Rate(limit) if limit else None,
        )
    progress.say("pulled")
    value = {"reference": str(reference), **plain(descriptor)}
    result(value, str(descriptor.digest), as_json=chosen.as_json)


def _say(reference: Reference, plan: CopyPlan, chosen: Settings) -> None:
    """The result of a dry run."""
    missing = plan.missing(chosen.layout)
    needed = sum(chosen.layout.lacking(blob) for blob in missing)
    here = sum(blob.size for blob in plan.blobs) - sum(blob.size for blob in missing)
    value = {
        "reference": str(reference),
        **plain(plan.root),
        "fetch": {"blobs": len(missing), "size": needed},
        "alreadyThere": {"blobs": len(plan.blobs) - len(missing), "size": here},
    }
    text = (
        f"{plan.root.digest}: {plural(len(missing), 'blob')} ({size(needed)}) to fetch, "
        f"{len(plan.blobs) - len(missing)} ({size(here)}) already there"
    )
    result(value, text, as_json=chosen.as_json)
