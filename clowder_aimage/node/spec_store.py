"""Records of the desired state that outlive the node's process: small files in the store.

For each name, the directories whose files ever listed it: only such a name is pruned. For each
directory, its specs when the files were last valid. Nodes that share a store share these records.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from clowder_aimage.errors import AImageError
from clowder_aimage.layout.lock import PRIVATE
from clowder_aimage.layout.metadata import MetadataFiles
from clowder_aimage.node.model_spec import ModelSpec, parse_specs

_KIND = "wanted"
_EVER, _LAST = "ever ", "last "  # no name has a space in it


class SpecStore:
    """The records in the store at ``root``, for a node that reads the files of ``directory``.

    Methods that write raise StoreError or NoSpaceError, methods that read StoreError.
    """

    def __init__(self, root: Path, directory: Path | None = None) -> None:
        self._root = root
        self.owner = "nobody"
        if directory is not None:
            self.owner = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:32]
        self._records = MetadataFiles(root, _KIND)

    def put_last(self, directory: Path, specs: Iterable[ModelSpec]) -> None:
        """Record the specs of a directory whose files are valid, durably."""
        key = f"{_LAST}{directory.absolute()}"
        value = {"wants": [spec.to_json() for spec in specs]}
        known = self._records.get(key)
        if known is None or known.get("wants") != value["wants"]:
            self._records.put(key, value, durable=True)

    def last(self, directory: Path) -> tuple[ModelSpec, ...] | None:
        """Return the last valid specs of a directory; None where there is no readable record."""
        try:
            known = self._records.get(f"{_LAST}{directory.absolute()}")
            return None if known is None else parse_specs(known.get("wants"), str(directory))
        except AImageError:
            return None

    def stamp(self) -> int:
        """Return a number that changes when any record may have changed."""
        try:
            return (self._root / PRIVATE / _KIND).stat().st_mtime_ns
        except OSError:
            return 0

    def remember(self, name: str, stored: str = "") -> None:
        """Record durably that the files list ``name``.

        ``stored`` is its name in the store where that differs: a name with an index's digest is
        stored with the digest of the chosen manifest.
        """
        key = _ever(self.owner, name)
        known = self._records.get(key)
        fact = {"stored": stored} if stored else {}
        if known is None or (stored and known.get("stored") != stored):
            self._records.put(key, fact, durable=True)

    def stored(self, name: str) -> str:
        """Return the name in the store where it is recorded as another; else an empty text."""
        return str((self._records.get(_ever(self.owner, name)) or {}).get("stored", ""))

    def ours(self) -> dict[str, str]:
        """Return the names that this directory ever listed, with their names in the store."""
        return {name: stored for owner, name, stored in self._ever() if owner == self.owner}

    def others(self) -> dict[str, str]:
        """Return the names that the directories of other nodes ever listed, as ``ours``."""
        return {name: stored for owner, name, stored in self._ever() if owner != self.owner}

    def forget(self, name: str) -> None:
        """Remove the record that this directory ever listed ``name``."""
        self._records.remove(_ever(self.owner, name))

    def is_damaged(self) -> bool:
        """Return whether a record cannot be parsed: another node may list any name then."""
        directory = self._root / PRIVATE / _KIND
        lost = (name for name in self._records.names() if self._records.read(name) is None)
        return any(os.path.lexists(directory / name) for name in lost)

    def _ever(self) -> Iterator[tuple[str, str, str]]:
        for key, value in self._records.items():
            if key.startswith(_EVER):
                owner, _, name = key.removeprefix(_EVER).partition(" ")
                yield owner, name, str(value.get("stored", name))


def _ever(owner: str, name: str) -> str:
    return f"{_EVER}{owner} {name}"
