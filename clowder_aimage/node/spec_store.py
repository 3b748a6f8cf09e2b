"""What a node remembers of what it was told to keep, over its end: small files in the store.

For each name, whose list ever had it (only such a name may be let go when that list has it no
more), and what its API was told of it; for each directory of files, what they said when they could
last be read. Several nodes on one store share all of it: there is one list of the API, and one of
each directory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from clowder_aimage.errors import AImageError
from clowder_aimage.layout.lock import PRIVATE
from clowder_aimage.layout.metadata import MetadataFiles, file_name
from clowder_aimage.layout.os_error import store_errors
from clowder_aimage.node.model_spec import API, ModelSpec, wants_of

_KIND = "wanted"
_EVER, _API, _LAST = "ever ", "api ", "last "  # no name has a space in it


class SpecStore:
    """The memory in the store at ``root``, of a node that reads the files of ``directory``, if of
    any. What writes raises StoreError or NoSpaceError, what reads StoreError."""

    def __init__(self, root: Path, directory: Path | None = None) -> None:
        self._root = root
        self.owner = _owner(directory)  # whose list the files are
        self._records = MetadataFiles(root, _KIND)

    # -- what the API was told

    def put_api(self, want: ModelSpec) -> None:
        """Keep what the API was told, durably, instead of what it was told of this name before."""
        self.remember(want.name, by_api=True)
        self._records.put(_API + want.name, {"want": want.to_json()}, durable=True)

    def replace_api(self, wants: Iterable[ModelSpec]) -> None:
        """Let these be all that the API was told. The old ones go last: whatever ends it midway,
        nothing is missing."""
        wants = tuple(wants)
        for want in wants:
            self.put_api(want)
        names = {want.name for want in wants}
        for name in [name for name, _ in self._told() if name not in names]:
            self.drop_api(name)
        for path in self.damaged():  # whatever they said of the API's wants counts no more
            with store_errors(self._root):
                path.unlink(missing_ok=True)

    def drop_api(self, name: str) -> bool:
        """Forget what the API was told of a name; whether there was anything."""
        is_there = os.path.lexists(self.file(name))  # though it may be damaged
        self._records.remove(_API + name)
        return is_there

    def api(self) -> list[ModelSpec]:
        """What the API was told, by name. ``damaged`` says what can be read no more."""
        found = (_want(name, value) for name, value in self._told())
        return sorted((want for want in found if want is not None), key=lambda want: want.name)

    def file(self, name: str) -> Path:
        """Where it stands what the API was told of a name."""
        return self._root / PRIVATE / _KIND / file_name(_API + name)

    # -- what the files said last

    def put_last(self, directory: Path, wants: Iterable[ModelSpec]) -> None:
        """Keep what the files of a directory said when they could last be read, durably."""
        key = f"{_LAST}{directory.absolute()}"
        value = {"wants": [want.to_json() for want in wants]}
        known = self._records.get(key)
        if known is None or known.get("wants") != value["wants"]:
            self._records.put(key, value, durable=True)

    def last(self, directory: Path) -> tuple[ModelSpec, ...] | None:
        """What they said then; None where they were never read, or nobody knows any more."""
        try:
            known = self._records.get(f"{_LAST}{directory.absolute()}")
            if known is None:
                return None
            return wants_of(known.get("wants"), "when the files could last be read")
        except AImageError:
            return None

    def stamp(self) -> int:
        """Another number where anything of this may be different."""
        try:
            return (self._root / PRIVATE / _KIND).stat().st_mtime_ns
        except OSError:
            return 0

    # -- what anybody ever wanted

    def remember(self, name: str, stored: str = "", *, by_api: bool = False) -> None:
        """Let it be known, durably, that the files, or the API, wanted this name, and what the
        store calls it where that is another name: the digest of an index is none of a manifest."""
        key = _ever(API if by_api else self.owner, name)
        known = self._records.get(key)
        fact = {"stored": stored} if stored else {}
        if known is None or (stored and known.get("stored") != stored):
            self._records.put(key, fact, durable=True)

    def stored(self, name: str) -> str:
        """What the store calls it, where that is known to be another name; else an empty text."""
        for owner in (self.owner, API):
            found = (self._records.get(_ever(owner, name)) or {}).get("stored")
            if found and isinstance(found, str):
                return found
        return ""

    def ours(self) -> dict[str, str]:
        """The names that the files or the API wanted at any time, and that were not forgotten; and
        what the store calls them."""
        return {name: stored for owner, name, stored in self._ever() if self._is_ours(owner)}

    def others(self) -> dict[str, str]:
        """The same, of other nodes' files."""
        return {name: stored for owner, name, stored in self._ever() if not self._is_ours(owner)}

    def forget(self, name: str) -> None:
        """Let it not be known any more that the files or the API wanted it."""
        for owner in (self.owner, API):
            self._records.remove(_ever(owner, name))

    def _is_ours(self, owner: str) -> bool:
        return owner in (self.owner, API)

    def _ever(self) -> Iterator[tuple[str, str, str]]:
        for key, value in self._records.items():
            if key.startswith(_EVER):
                owner, _, name = key.removeprefix(_EVER).partition(" ")
                stored = value.get("stored")
                yield owner, name, stored if stored and isinstance(stored, str) else name

    def damaged(self) -> list[Path]:
        """The files that say nothing any more. As long as there are any, nobody knows all that the
        API was told: then nothing may be removed for not being wanted."""
        directory = self._root / PRIVATE / _KIND
        lost = [name for name in self._records.names() if self._records.read(name) is None]
        lost += [file_name(_API + n) for n, value in self._told() if _want(n, value) is None]
        return sorted(path for path in map(directory.joinpath, lost) if os.path.lexists(path))

    def _told(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The API's records, by name."""
        for key, value in self._records.items():
            if key.startswith(_API):
                yield key.removeprefix(_API), value


def _ever(owner: str, name: str) -> str:
    return f"{_EVER}{owner} {name}"


def _owner(directory: Path | None) -> str:
    """A word for a directory's list; those who name the same directory have the same list."""
    if directory is None:
        return "nobody"
    return hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:32]


def _want(name: str, value: dict[str, Any]) -> ModelSpec | None:
    """What a record says; None where a later version, or nobody, wrote it."""
    try:
        (want,) = wants_of([value.get("want")], API)
    except (AImageError, ValueError):
        return None
    return want if want.name == name else None
