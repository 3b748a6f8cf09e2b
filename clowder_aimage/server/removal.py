"""Several names of the layout given up in one step.

Clients see a manifest with all of its tags or with none of them (the index is replaced once).
"""

from __future__ import annotations

from collections.abc import Collection

from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.index import edit_index, entry_name
from clowder_aimage.layout.record import Records


def forget(layout: ImageLayout, names: Collection[str]) -> int:
    """Give up what stands in the index by ``names``.

    Returns:
        how many there were.

    Raises:
        StoreError, NoSpaceError: the index cannot be written.
    """
    records = Records(layout.root, "names")
    with edit_index(layout.root) as index:
        gone = [
            entry
            for entry in index["manifests"]
            if isinstance(entry, dict) and entry_name(entry.get("annotations")) in names
        ]
        for entry in gone:
            records.remove(entry_name(entry["annotations"]))  # first: else it would come back
        index["manifests"] = [entry for entry in index["manifests"] if entry not in gone]
    return len(gone)
