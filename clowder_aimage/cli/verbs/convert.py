"""The verb ``convert``."""

from __future__ import annotations

import click

from clowder_aimage.cli.console.option import common_options, jobs_option, settings
from clowder_aimage.cli.console.output import note, result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.verbs.create import recipe_options, summary, text
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference


@click.command()
@click.argument("ref")
@click.argument("new")
@recipe_options
@jobs_option
@common_options
def convert(
    ref: str,
    new: str,
    dtype: str | None,
    quantize: str | None,
    group_size: int | None,
    jobs: int | None,
) -> None:
    """Make the AImage NEW of REF, which is in the store: quantized, or in another precision.

    Tensors that stay what they are stay the same blobs: they are neither stored nor sent twice.
    """
    from clowder_aimage.convert import convert as convert_aimage
    from clowder_aimage.importer import Recipe

    chosen = settings()
    recipe = Recipe.parse(dtype, quantize, group_size)
    target = Reference.parse(new)
    if target.digest is not None:
        raise UsageError(f"{new} names a digest, which only content can decide")
    with Progress("converting", target, quiet=chosen.quiet) as progress:
        made = convert_aimage(
            chosen.layout,
            Reference.parse(ref),
            target,
            recipe,
            jobs=jobs,
            on_survey=progress.begin,
            on_surveyed=progress.advance,
            on_plan=lambda plan: progress.begin(plan.size),
            on_written=lambda written: progress.advance(written.layer.descriptor.size),
        )
    value = summary(target, made)
    if not chosen.quiet:
        note(text(value, made, recipe))
    result(value, str(made.descriptor.digest), as_json=chosen.as_json)
