"""``aimage du``."""

from __future__ import annotations

from typing import Any

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import settings, verb
from clowder_aimage.cli.console.output import plural, result, size, table
from clowder_aimage.cli.console.stored_name import stored_arguments
from clowder_aimage.oci import Reference
from clowder_aimage.usage import NameUsage, UsageReport, usage


@examples("aimage du", "aimage du shapes shapes:int8")
@verb
@stored_arguments(required=False)
def du(references: tuple[Reference, ...]) -> None:
    """Show the disk usage of REF..., else of all names in the store.

    UNIQUE is the size that no other manifest needs: rm and gc would free it. Several names of one
    manifest are one line and count once.
    """
    chosen = settings()
    layout = chosen.layout
    only = [layout.resolve(reference).digest for reference in references]
    found = usage(layout, chosen.stores, only)
    lines = _table(found)
    if references:
        lines.append(f"freed if all of these were removed: {size(found.freed)}")
    shares = [_plain_share(share) for share in found.shares]
    total = {
        "blobs": found.blobs,
        "size": found.size,
        "unique": found.unique,
        "shared": found.size - found.unique,
        "freed": found.freed,
    }
    result({"manifests": shares, "total": total}, lines)


def _table(found: UsageReport) -> list[str]:
    rows = [("NAME", "SIZE", "UNIQUE", "SHARED", "MISSING")]
    for share in found.shares:
        unnamed = f"(no name) {share.digest.short}"
        first, *others = (" ".join(name.split()) or unnamed for name in share.names)
        gap = (
            f"{plural(share.missing, 'blob')}, {size(share.missing_size)}" if share.missing else ""
        )
        rows.append((first, size(share.size), size(share.unique), size(share.shared), gap))
        rows += [(f"  and {name}", "", "", "", "") for name in others]
    shared = found.size - found.unique
    rows.append(("total", size(found.size), size(found.unique), size(shared), ""))
    if not any(share.missing for share in found.shares):
        return table([row[:-1] for row in rows])
    return table(rows)


def _plain_share(share: NameUsage) -> dict[str, Any]:
    return {
        "references": [name for name in share.names if name],
        "unnamed": "" in share.names,
        "digest": str(share.digest),
        "size": share.size,
        "unique": share.unique,
        "shared": share.shared,
        "missing": {"blobs": share.missing, "size": share.missing_size},
    }
