"""``aimage index``."""

from __future__ import annotations

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import get_settings, verb
from clowder_aimage.cli.console.output import format_count, print_result


@examples("aimage index")
@verb
def index() -> None:
    """Write the names that index.json of the store lacks, for other tools.

    With more than 1,000 names, aimage writes it some seconds after a change, or with a later one,
    and names that other tools dropped with the next change. All verbs know these names meanwhile.
    """
    layout = get_settings().layout
    count = layout.write_index()
    path = layout.root / "index.json"
    print_result(
        {"index": str(path), "written": count}, f"{path}: {format_count(count, 'name')} written"
    )
