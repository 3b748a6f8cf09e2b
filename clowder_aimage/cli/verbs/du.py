"""``aimage du``."""

from __future__ import annotations

from typing import Any

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import get_settings, verb
from clowder_aimage.cli.console.output import (
    format_count,
    format_size,
    format_table,
    print_result,
    wants_value,
)
from clowder_aimage.cli.console.stored_name import stored_arguments
from clowder_aimage.oci import Reference
from clowder_aimage.usage import NameUsage, UsageReport, measure_usage


@examples("aimage du", "aimage du shapes shapes:int8")
@verb
@stored_arguments(required=False)
def du(references: tuple[Reference, ...]) -> None:
    """Show the disk usage of REF..., else of all names in the store.

    UNIQUE is the size of blobs that only this manifest needs: rm and gc would free it. SHARED is
    that of blobs that others need too; MISSING are those that the store lacks. Several names of
    one manifest are one line and count once.
    """
    chosen = get_settings()
    layout = chosen.layout
    only = [layout.resolve(reference).digest for reference in references]
    report = measure_usage(layout, chosen.stores, only)
    lines = _format_table(report)
    if references:
        lines.append(f"freed if all of these were removed: {format_size(report.freed)}")
    # Thousands of rows take time that a table does not need
    shares = [_encode_share(share) for share in report.shares] if wants_value() else []
    total = {
        "blobs": report.blobs,
        "size": report.size,
        "unique": report.unique,
        "shared": report.size - report.unique,
        "freed": report.freed,
    }
    print_result({"manifests": shares, "total": total}, lines)


def _format_table(report: UsageReport) -> list[str]:
    rows = [("NAME", "SIZE", "UNIQUE", "SHARED", "MISSING")]
    for share in report.shares:
        unnamed = f"(no name) {share.digest.short}"
        label, *more_names = (" ".join(name.split()) or unnamed for name in share.names)
        gap = (
            f"{format_count(share.missing, 'blob')}, {format_size(share.missing_size)}"
            if share.missing
            else ""
        )
        rows.append(
            (
                label,
                format_size(share.size),
                format_size(share.unique),
                format_size(share.shared),
                gap,
            )
        )
        rows += [(f"  and {name}", "", "", "", "") for name in more_names]
    shared = report.size - report.unique
    rows.append(
        ("total", format_size(report.size), format_size(report.unique), format_size(shared), "")
    )
    if not any(share.missing for share in report.shares):
        return format_table([row[:-1] for row in rows])
    return format_table(rows)


def _encode_share(share: NameUsage) -> dict[str, Any]:
    return {
        "references": [name for name in share.names if name],
        "unnamed": "" in share.names,
        "digest": str(share.digest),
        "size": share.size,
        "unique": share.unique,
        "shared": share.shared,
        "missing": {"blobs": share.missing, "size": share.missing_size},
    }
