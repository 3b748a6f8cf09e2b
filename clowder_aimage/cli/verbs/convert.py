"""The verb ``convert``."""

from __future__ import annotations

from typing import Any

import click

from clowder_aimage.cli.console.option import settings, tag_reference, verb
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.console.stored_name import stored_argument
from clowder_aimage.cli.verbs.create import callbacks, print_packed, recipe_options
from clowder_aimage.create import convert as convert_aimage
from clowder_aimage.errors import UsageError
from clowder_aimage.importer import Recipe
from clowder_aimage.importer.recipe import AUTO
from clowder_aimage.oci import Reference


@verb
@stored_argument()
@click.argument("new", type=tag_reference)
@recipe_options
@click.option(
    "--attach",
    is_flag=True,
    help="Make NEW a variant of REF, which 'run --first' finds in the registry of both.",
)
def convert(reference: Reference, new: Reference, attach: bool, **changes: Any) -> None:
    """Convert the weights of REF in the store to other types, as the AImage NEW.

    Tensors that do not change keep their blobs, which are neither stored nor sent twice.
    """
    chosen = settings()
    recipe = Recipe.parse(**changes)
    if attach and recipe.precision in (None, AUTO):
        raise UsageError("--attach requires --quantize, or --dtype f16 or bf16")
    with Progress("converting", new) as progress:
        made = convert_aimage(
            chosen.layout,
            reference,
            new,
            recipe,
            is_attached=attach,
            jobs=chosen.jobs,
            **callbacks(progress),
        )
    print_packed(new, made, recipe)
