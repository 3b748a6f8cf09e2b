"""The store of files and batches: records (small JSON objects), and chunks of bytes.

A record is replaced only if it still has the expected revision: several servers may share a store.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path
from typing import Any, Protocol

from clowder_aimage.content.atomic_file import write_file
from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.layout.lock import PRIVATE, hold_lock, make_directory, translate_store_errors
from clowder_aimage.oci import read_json

DIRECTORY = "batches"
_LOCK = "batches.lock"
_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")
Record = dict[str, Any]


class ChangedRecordError(AImageError):
    """Another server has replaced a record in the meantime."""


def is_id(text: str) -> bool:
    """Return True if a text has the form of a record's id."""
    return _ID.fullmatch(text) is not None


class BatchStore(Protocol):
    """Stores records by id, and chunks by name. Methods raise AImageError if it cannot be used."""

    async def read_clock(self) -> float:
        """Return the seconds since the epoch, by the clock of all servers that share the store."""

    async def read(self, id: str) -> tuple[Record, int] | None:  # noqa: A002
        """Return a record and its revision, or None."""

    async def write(self, id: str, value: Record, revision: int) -> int:  # noqa: A002
        """Replace a record with that revision, 0 for none; return the new one.

        Raises ChangedRecordError.
        """

    async def remove(self, id: str) -> None:  # noqa: A002
        """Remove a record."""

    async def list_ids(self) -> list[str]:
        """Return the ids of all records."""

    async def put(self, name: str, data: bytes) -> None:
        """Store a chunk."""

    async def get(self, name: str) -> bytes:
        """Return a chunk. Raises NotFoundError."""

    async def drop(self, name: str) -> None:
        """Remove a chunk, if it exists."""


class DirectoryBatchStore:
    """Records and chunks in the private directory of a worker's store."""

    def __init__(self, root: Path) -> None:
        self._root, self._directory = root, root / PRIVATE / DIRECTORY

    async def read_clock(self) -> float:
        """Return the seconds since the epoch."""
        return time.time()

    async def read(self, id: str) -> tuple[Record, int] | None:  # noqa: A002
        """Return a record and its revision, or None."""
        return await run_io(self._read, id)

    def _read(self, name: str) -> tuple[Record, int] | None:
        with translate_store_errors(self._root):
            try:
                raw = (self._directory / f"{name}.json").read_bytes()
            except FileNotFoundError:
                return None
        value = read_json(raw, "a record of a batch", 1 << 30)
        return value["value"], value["revision"]

    async def write(self, id: str, value: Record, revision: int) -> int:  # noqa: A002
        """Replace a record with that revision. Raises ChangedRecordError."""
        return await run_locking(self._write, id, value, revision)

    def _write(self, name: str, value: Record, revision: int) -> int:
        with hold_lock(self._root, _LOCK), translate_store_errors(self._root):
            stored = self._read(name)
            if (stored[1] if stored else 0) != revision:
                raise ChangedRecordError(f"{name} was changed by another server")
            make_directory(self._root, PRIVATE, DIRECTORY)
            raw = json.dumps({"revision": revision + 1, "value": value}).encode()
            write_file(self._directory / f"{name}.json", raw, mode=0o600)
        return revision + 1

    async def remove(self, id: str) -> None:  # noqa: A002
        """Remove a record."""
        await run_locking(self._remove, f"{id}.json")

    def _remove(self, name: str) -> None:
        with (
            translate_store_errors(self._root),
            contextlib.suppress(FileNotFoundError),
            OpenDirectory(self._directory) as directory,
        ):
            directory.remove(name)

    async def list_ids(self) -> list[str]:
        """Return the ids of all records."""
        return await run_io(self._list_ids)

    def _list_ids(self) -> list[str]:
        with translate_store_errors(self._root):
            names = (path.stem for path in self._directory.glob("*.json"))
            return sorted(filter(is_id, names))

    async def put(self, name: str, data: bytes) -> None:
        """Store a chunk."""
        await run_io(self._put, name, data)

    def _put(self, name: str, data: bytes) -> None:
        with translate_store_errors(self._root):
            make_directory(self._root, PRIVATE, DIRECTORY)
            write_file(self._directory / f"{name}.piece", data, mode=0o600)

    async def get(self, name: str) -> bytes:
        """Return a chunk."""
        return await run_io(self._get, name)

    def _get(self, name: str) -> bytes:
        with translate_store_errors(self._root):
            try:
                return (self._directory / f"{name}.piece").read_bytes()
            except FileNotFoundError:
                raise NotFoundError("a part of the file is missing") from None

    async def drop(self, name: str) -> None:
        """Remove a chunk."""
        await run_io(self._remove, f"{name}.piece")
