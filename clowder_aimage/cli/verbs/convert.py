"""The verb ``convert``."""

from __future__ import annotations

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.lora_option import find_uses
from clowder_aimage.cli.console.option import get_settings, tag_reference, verb
from clowder_aimage.cli.console.output import remark
from clowder_aimage.cli.console.progress import Progress, build_callbacks, build_write_callbacks
from clowder_aimage.cli.console.stored_name import stored_argument
from clowder_aimage.cli.create.option import recipe_options
from clowder_aimage.cli.create.result import print_packed
from clowder_aimage.create import convert as convert_aimage
from clowder_aimage.errors import UsageError
from clowder_aimage.importer import Recipe
from clowder_aimage.importer.recipe import AUTO
from clowder_aimage.oci import Reference


@examples(
    "aimage convert shapes shapes:int8 --quantize int8",
    "aimage convert shapes shapes:bf16 --dtype bf16",
)
@verb
@stored_argument()
@click.argument("new", type=tag_reference)
@recipe_options
@click.option(
    "--lora",
    "loras",
    multiple=True,
    metavar="REF|FILE[:STRENGTH]",
    help="Add this adapter to the weights. May be repeated.",
)
@click.option(
    "--attach",
    is_flag=True,
    help="Attach NEW to REF as a variant, so that 'run --first' finds it in their registry.",
)
def convert(
    reference: Reference, new: Reference, loras: tuple[str, ...], attach: bool, recipe: Recipe
) -> None:
    """Convert the weights of REF in the store to other types, as the AImage NEW.

    With --lora, adapters are added to the weights instead, whose types stay the same.

    Tensors that do not change keep their blobs, which are neither stored nor sent twice.
    """
    chosen = get_settings()
    if loras:
        if attach or recipe.changes:
            option = "--attach" if attach else "--dtype" if recipe.dtype else "--quantize"
            raise UsageError(
                f"--lora cannot be combined with {option}",
                hint="add the adapters to the unquantized model, then convert the result",
            )
        _fuse(reference, new, loras)
        return
    if attach and recipe.precision in (None, AUTO):
        raise UsageError("--attach requires --quantize, or --dtype f16 or bf16")
    with Progress("converting", new) as progress:
        packed = convert_aimage(
            chosen.layout,
            reference,
            new,
            recipe,
            is_attached=attach,
            threads=chosen.jobs,
            **build_callbacks(progress),
        )
    print_packed(new, packed, recipe)


def _fuse(reference: Reference, new: Reference, loras: tuple[str, ...]) -> None:
    from clowder_aimage.adapt import fuse

    uses = find_uses(loras)
    with Progress("fusing", new) as progress:
        fused = fuse(
            get_settings().layout,
            reference,
            new,
            uses,
            threads=get_settings().jobs,
            **build_write_callbacks(progress),
        )
    if fused.remark:
        remark(fused.remark)
    print_packed(new, fused.packed, Recipe())
