"""The store of files and batches: records (small JSON objects), and chunks of bytes.

A record is replaced only if it still has the expected revision: several servers may share a store.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import time
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Protocol

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from clowder_aimage.content.atomic_file import write_file
from clowder_aimage.content.file_system import measure_space
from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.errors import AImageError, FormatError, NotFoundError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.layout.lock import PRIVATE, hold_lock, make_directory, translate_store_errors
from clowder_aimage.oci import read_json

DIRECTORY = "batches"
_LOCK = "batches.lock"
_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")
# The folder of records without an owner
NOBODY = "anyone"
# Bytes of the disk that are kept free
RESERVE = 1 << 30
# Seconds until there may be more space
FULL_RETRY = 60
# Records that are remembered, of some 2 kB each
_MAX_RECORDS = 20_000
# Records that are logged as left out
_MAX_LOGGED = 1000
_log = logging.getLogger("aimage.batch")
Record = dict[str, Any]
# An owner and an id
RecordKey = tuple[str, str]


_Count = Annotated[int, Field(ge=0, le=1 << 53)]


class _FileEntry(TypedDict):
    id: str
    object: Literal["file"]
    purpose: str
    bytes: _Count
    created_at: _Count
    expires_at: _Count


class _BatchEntry(TypedDict):
    id: str
    object: Literal["batch"]
    status: str
    input_file_id: str
    created_at: _Count
    expires_at: _Count


class _Record(TypedDict):
    owner: str
    object: Annotated[_FileEntry | _BatchEntry, Field(discriminator="object")]
    pieces: list[tuple[str, _Count]]
    sizes: NotRequired[dict[str, _Count]]


class _Stored(TypedDict):
    """The fields of a record that lists, accounts and the removal of old files read."""

    revision: _Count
    value: _Record


_STORED = TypeAdapter(_Stored)


class ChangedRecordError(AImageError):
    """Another server has replaced a record in the meantime."""


def make_id(prefix: str, timestamp: float) -> str:
    """Return a new id for a record that is created at a time; ids are in the order of time."""
    return f"{prefix}{int(timestamp * 1000):012x}{secrets.token_hex(6)}"


def build_space_error(place: str) -> ApiError:
    """Return the response while a store has only its reserve."""
    message = f"{place} is almost full; try again later"
    headers = {"Retry-After": str(FULL_RETRY)}
    return ApiError(507, message, code="insufficient_storage", headers=headers)


def is_almost_full(directory: Path, reserve: int) -> bool:
    """Return True if a disk has less space than its reserve, at most a twentieth of it."""
    space = measure_space(directory)
    return space is not None and space.free < min(reserve, space.total // 20)


def _parse_record(raw: bytes, path: Path) -> tuple[Record, int]:
    """Return a record and its revision. Raises FormatError or ValidationError."""
    stored = read_json(raw, "a record of a batch", 1 << 30)
    _STORED.validate_json(raw, strict=True)
    record: Record = stored["value"]
    if (record["owner"] or NOBODY, record["object"]["id"]) != (path.parent.name, path.stem):
        raise FormatError("a record of a batch has the place of another one")
    return record, stored["revision"]


def _list_names(directory: Path) -> list[str]:
    """Return the names in a directory; none if it is missing."""
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries]
    except FileNotFoundError:
        return []


def is_id(text: str) -> bool:
    """Return True if a text has the form of a record's id."""
    return _ID.fullmatch(text) is not None


class BatchStore(Protocol):
    """Stores records by owner and id, and chunks by name.

    Ids are in the order of creation. A record that cannot be read is logged once and left out,
    except from the keys. Methods raise AImageError if the store cannot be used.
    """

    async def read_clock(self) -> float:
        """Return the seconds since the epoch, by the clock of all servers that share the store."""

    async def check_space(self) -> None:
        """Raise ApiError while the store has less space than it keeps in reserve."""

    async def read(self, owner: str, id: str) -> tuple[Record, int] | None:  # noqa: A002
        """Return a record and its revision, or None."""

    async def write(self, id: str, value: Record, revision: int) -> int:  # noqa: A002
        """Replace a record with that revision, 0 for none; return the new one.

        Raises ChangedRecordError.
        """

    async def remove(self, owner: str, id: str) -> None:  # noqa: A002
        """Remove a record."""

    async def list_records(self, owner: str) -> list[Record]:
        """Return the records of an owner by id. They are not to be changed."""

    async def list_keys(self) -> list[RecordKey]:
        """Return the keys of all records by id."""

    async def put(self, name: str, data: bytes) -> None:
        """Store a chunk."""

    async def get(self, name: str) -> bytes:
        """Return a chunk. Raises NotFoundError."""

    async def drop(self, name: str) -> None:
        """Remove a chunk, if it exists."""


class DirectoryBatchStore:
    """Records and chunks in the private directory of a worker's store.

    Each owner has a directory of records. ``reserve`` are the bytes of the disk that are kept free,
    a twentieth of it if that is less.
    """

    def __init__(self, root: Path, reserve: int = RESERVE) -> None:
        self._root, self._directory, self._reserve = root, root / PRIVATE / DIRECTORY, reserve
        # The records of lists, with the files that they were read from
        self._records: dict[RecordKey, tuple[tuple[int, int], Record]] = {}
        # The records that were logged as left out
        self._rejected: set[str] = set()

    async def read_clock(self) -> float:
        """Return the seconds since the epoch."""
        return time.time()

    async def check_space(self) -> None:
        """Raise ApiError while the disk has less space than its reserve."""
        if await run_io(is_almost_full, self._directory, self._reserve):
            raise build_space_error("the disk of the store")

    def _locate(self, owner: str, name: str) -> Path:
        return self._directory / (owner or NOBODY) / f"{name}.json"

    async def read(self, owner: str, id: str) -> tuple[Record, int] | None:  # noqa: A002
        """Return a record and its revision, or None."""
        return await run_io(self._read, self._locate(owner, id))

    def _read(self, path: Path) -> tuple[Record, int] | None:
        with translate_store_errors(self._root):
            try:
                raw = path.read_bytes()
            except FileNotFoundError:
                return None
        try:
            return _parse_record(raw, path)
        except (FormatError, ValidationError):
            # Its text may be that of a client
            if path.stem not in self._rejected and len(self._rejected) < _MAX_LOGGED:
                self._rejected.add(path.stem)
                _log.warning("a record is left out", extra={"id": path.stem})
            return None

    async def write(self, id: str, value: Record, revision: int) -> int:  # noqa: A002
        """Replace a record with that revision. Raises ChangedRecordError."""
        return await run_locking(self._write, id, value, revision)

    def _write(self, name: str, value: Record, revision: int) -> int:
        path = self._locate(value["owner"], name)
        with hold_lock(self._root, _LOCK), translate_store_errors(self._root):
            stored = self._read(path)
            if (stored[1] if stored else 0) != revision:
                raise ChangedRecordError(f"{name} was changed by another server")
            make_directory(self._root, PRIVATE, DIRECTORY, path.parent.name)
            raw = json.dumps({"revision": revision + 1, "value": value}).encode()
            write_file(path, raw, mode=0o600)
        return revision + 1

    async def remove(self, owner: str, id: str) -> None:  # noqa: A002
        """Remove a record."""
        await run_locking(self._remove, self._locate(owner, id))

    def _remove(self, path: Path) -> None:
        with (
            translate_store_errors(self._root),
            contextlib.suppress(FileNotFoundError),
            OpenDirectory(path.parent) as directory,
        ):
            directory.remove(path.name)

    async def list_records(self, owner: str) -> list[Record]:
        """Return the records of an owner by id; those that have not changed are not read again."""
        return await run_io(self._list_records, owner)

    def _list_records(self, owner: str) -> list[Record]:
        keys = self._list_keys(owner or NOBODY)
        return [record for key in keys if (record := self._read_again(key)) is not None]

    def _read_again(self, key: RecordKey) -> Record | None:
        path = self._locate(*key)
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        version = status.st_ino, status.st_mtime_ns
        previous = self._records.get(key)
        if previous is not None and previous[0] == version:
            return previous[1]
        if len(self._records) >= _MAX_RECORDS:
            self._records.clear()
        if (stored := self._read(path)) is None:
            return None
        self._records[key] = version, stored[0]
        return stored[0]

    async def list_keys(self) -> list[RecordKey]:
        """Return the keys of all records by id."""
        return await run_io(self._list_keys)

    def _list_keys(self, *folders: str) -> list[RecordKey]:
        with translate_store_errors(self._root):
            keys = [
                ("" if folder == NOBODY else folder, name.removesuffix(".json"))
                for folder in folders or _list_names(self._directory)
                # The others are chunks
                if "." not in folder
                for name in _list_names(self._directory / folder)
            ]
        return sorted((key for key in keys if is_id(key[1])), key=lambda key: key[1])

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
        await run_io(self._remove, self._directory / f"{name}.piece")
