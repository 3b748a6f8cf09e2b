"""Models of the store with adapters beside them."""

from __future__ import annotations

from clowder_aimage.cli.console.lora_option import find_uses
from clowder_aimage.cli.console.option import get_settings, list_explicit_options
from clowder_aimage.cli.console.progress import Progress, build_write_callbacks
from clowder_aimage.cli.create.result import print_packed
from clowder_aimage.errors import UsageError
from clowder_aimage.importer import Recipe
from clowder_aimage.oci import Reference


def pack_adapters(target: Reference, base: Reference | None, loras: tuple[str, ...]) -> None:
    """Pack adapters beside the model ``base``. Raises as ``combine``."""
    if base is None or not loras:
        raise UsageError("--from and --lora require each other")
    common = ("from_", "loras", "store", "jobs", "as_json", "template", "quiet")
    if conflicting := list_explicit_options(*common):
        raise UsageError(f"{conflicting[0]} cannot be combined with --from")
    from clowder_aimage.adapt import combine

    uses, chosen = find_uses(loras), get_settings()
    with Progress("packing", target) as progress:
        packed = combine(
            chosen.layout,
            base,
            target,
            uses,
            threads=chosen.jobs,
            **build_write_callbacks(progress),
        )
    print_packed(target, packed, Recipe())
