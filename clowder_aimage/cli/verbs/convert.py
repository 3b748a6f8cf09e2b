"""The verb ``convert``."""

from __future__ import annotations

import click

from clowder_aimage.cli.console.option import common_options, settings, tag_reference
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.verbs.create import callbacks, recipe_options, say
from clowder_aimage.oci import Reference


@click.command()
@click.argument("ref")
@click.argument("new")
@recipe_options
@common_options
def convert(
    ref: str, new: str, dtype: str | None, quantize: str | None, group_size: int | None
) -> None:
    """Make the AImage NEW from REF in the store: quantized, or in another precision.

    Tensors that do not change keep their blobs, which are neither stored nor sent twice.
    """
    from clowder_aimage.convert import convert as convert_aimage
    from clowder_aimage.importer import Recipe

    chosen = settings()
    recipe = Recipe.parse(dtype, quantize, group_size)
    target = tag_reference(new)
    with Progress("converting", target) as progress:
        made = convert_aimage(
            chosen.layout,
            Reference.parse(ref),
            target,
            recipe,
            jobs=chosen.jobs,
            **callbacks(progress),
        )
    say(target, made, recipe)
