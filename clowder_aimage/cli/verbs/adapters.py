"""The verb ``adapters``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.option import connection_options, get_settings, verb
from clowder_aimage.cli.console.output import (
    format_table,
    note,
    print_result,
    remark,
    wants_value,
)
from clowder_aimage.cli.console.stored_name import stored_argument
from clowder_aimage.content.platform import format_cell
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.find_adapters import FoundAdapter


@examples("aimage adapters shapes", f"aimage adapters {NAME} --json")
@verb
@stored_argument()
@connection_options
def adapters(reference: Reference) -> None:
    """List the adapters (LoRA) of the model REF, in the store and in the registry in its name.

    These are AImages whose subject is REF, as 'aimage create --base REF' makes them. Of a registry
    the repository of REF is read, and the other repositories that the registry lists.
    """
    from clowder_aimage.find_adapters import find_adapters

    settings = get_settings()
    entries = find_adapters(
        settings.layout, reference, cache(settings.build_client_options), on_skip=note
    )
    if entries or wants_value():
        print_result([entry.to_json() for entry in entries], _format_table(entries))
    else:
        remark(f"{reference} has no adapters; 'aimage create --base {reference}' makes one")


def _format_table(entries: Sequence[FoundAdapter]) -> list[str]:
    rows = [("NAME", "TYPE", "TRIGGER WORDS", "STRENGTH", "IN")]
    for entry in entries:
        words = entry.facts.get("triggerWords")
        kind = " ".join(str(entry.facts.get(key, "")) for key in ("type", "rank"))
        rows.append((
            str(entry.reference),
            format_cell(kind),
            format_cell(", ".join(map(str, words[:5])) if isinstance(words, list) else ""),
            format_cell(str(entry.facts.get("weight", ""))),
            ", ".join(entry.places),
        ))  # fmt: skip
    return format_table(rows)
