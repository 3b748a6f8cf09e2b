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
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.content import CopyPlan
    from clowder_aimage.content.choose import Wish


@click.command(short_help="Fetch an AImage from the registry in its name.")
@click.argument("ref")
@click.option("--platform", metavar="OS/ARCH", help="Of an index, what is for this platform.")
@click.option("--variant", metavar="NAME", help="Of an index, what is called so.")
@click.option("--whole", is_flag=True, help="Of an index, all of it.")
@click.option("--dry-run", is_flag=True, help="Say what would be fetched, and fetch nothing.")
@limit_option
@jobs_option
@connection_options
@common_options
def pull(
    ref: str,
    platform: str | None,
    variant: str | None,
    whole: bool,
    dry_run: bool,
    limit: int | None,
    jobs: int | None,
    plain_http: bool,
    insecure: bool,
    ca_file: Path | None,
) -> None:
    """Fetch the AImage REF from the registry in its name; print its digest.

    Every byte is verified before it gets its name in the store. Blobs that are there already are
    not fetched. Of an index, the one AImage is fetched that the options choose, or that is for
    this machine.
    """
    from clowder_aimage.content import Rate
    from clowder_aimage.pull import plan_pull, stored_name
    from clowder_aimage.pull import pull as pull_aimage

    chosen = settings()
    reference = Reference.parse(ref)
    wish = _wish(platform, variant, whole)
    reach = connection(plain_http, insecure, ca_file, jobs)
    if dry_run:
        plan = plan_pull(reference, reach, wish=wish)
        _say(stored_name(reference, plan.root), plan, chosen)
        return
    with Progress("pulling", reference, quiet=chosen.quiet) as progress:
        descriptor = pull_aimage(
            reference,
            chosen.layout,
            reach,
            wish=wish,
            on_event=progress.on_event,
            rate=Rate(limit) if limit else None,
        )
    progress.say("pulled")
    value = {"reference": str(stored_name(reference, descriptor)), **plain(descriptor)}
    result(value, str(descriptor.digest), as_json=chosen.as_json)


def _wish(platform: str | None, variant: str | None, whole: bool) -> Wish | None:
    """What to choose from an index; None is all of it. Raises UsageError."""
    from clowder_aimage.content.choose import Platform, Wish

    if whole and (platform is not None or variant is not None):
        raise UsageError("--whole leaves nothing for --platform or --variant to choose")
    if whole:
        return None
    return Wish(variant, None if platform is None else Platform.parse(platform))


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
