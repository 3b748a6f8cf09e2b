"""The verb ``convert``."""

from __future__ import annotations

import click

from clowder_aimage.cli.console.option import reference_argument, settings, tag_reference, verb
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.verbs.create import callbacks, recipe_options, say
from clowder_aimage.oci import Reference


@verb
@reference_argument
@click.argument("new", type=tag_reference)
@recipe_options
def convert(
    reference: Reference,
    new: Reference,
    dtype: str | None,
    quantize: str | None,
    group_size: int | None,
) -> None:
    """Make the AImage NEW from REF in the store: quantized, or in another precision.

    Tensors that do not change keep their blobs, which are neither stored nor sent twice.
    """
    from clowder_aimage.create import convert as convert_aimage
    from clowder_aimage.importer import Recipe

    chosen = settings()
    recipe = Recipe.parse(dtype, quantize, group_size)
    with Progress("converting", new) as progress:
        made = convert_aimage(
            chosen.layout, reference, new, recipe, jobs=chosen.jobs, **callbacks(progress)
        )
    say(new, made, recipe)
