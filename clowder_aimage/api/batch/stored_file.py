"""Files of clients and of batches: a record with OpenAI's file object, and chunks."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from typing_extensions import TypedDict

from clowder_aimage.api.batch.store import BatchStore, Record, is_id
from clowder_aimage.http.api_error import ApiError

# Bytes of a chunk, unless one line is larger
CHUNK_SIZE = 4 << 20
# Files of one owner
MAX_FILES = 1000
# Seconds that files are kept
LIFETIME = 30 * 86400
INPUT: Final = "batch"
OUTPUT: Final = "batch_output"

Purpose = Literal["batch", "batch_output"]
# Pairs of a mark and a number of chunks, which keep a record short
Chunks = list[Any]


class FileObject(TypedDict):
    """A file of a client, or the output of a batch."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"]
    status_details: None


def iter_chunk_names(chunks: Chunks) -> Iterator[str]:
    """Yield the names of chunks in order."""
    for mark, count in chunks:
        yield from (f"{mark}-{number}" for number in range(count))


async def add_chunk(store: BatchStore, chunks: Chunks, mark: str, data: bytes) -> None:
    """Store a chunk and add it to ``chunks``. After a failure the writer needs another mark."""
    if not chunks or chunks[-1][0] != mark:
        chunks.append([mark, 0])
    await store.put(f"{mark}-{chunks[-1][1]}", data)
    chunks[-1][1] += 1


@dataclass(slots=True)
class FileWriter:
    """Writes a file; ``chunks`` are the stored ones."""

    store: BatchStore
    size: int = 0
    chunks: Chunks = field(default_factory=list)
    _mark: str = field(default_factory=lambda: secrets.token_hex(16))
    _unsaved: bytearray = field(default_factory=bytearray)

    async def write(self, data: bytes) -> None:
        """Add bytes."""
        self.size += len(data)
        self._unsaved += data
        while len(self._unsaved) >= CHUNK_SIZE:
            await add_chunk(self.store, self.chunks, self._mark, bytes(self._unsaved[:CHUNK_SIZE]))
            del self._unsaved[:CHUNK_SIZE]

    async def end(
        self, name: str, owner: str, purpose: Purpose = INPUT, keep: int = LIFETIME
    ) -> FileObject:
        """Make the record, and return the file object."""
        if self._unsaved:
            await add_chunk(self.store, self.chunks, self._mark, bytes(self._unsaved))
        return await add_file(
            self.store, self.chunks, self.size, name=name, owner=owner, purpose=purpose, keep=keep
        )

    async def abandon(self) -> None:
        """Remove the stored chunks."""
        for name in iter_chunk_names(self.chunks):
            await self.store.drop(name)


async def add_file(
    store: BatchStore,
    chunks: Chunks,
    size: int,
    *,
    name: str,
    owner: str,
    purpose: Purpose,
    keep: int = LIFETIME,
) -> FileObject:
    """Make the record of a file with stored chunks; return the file object."""
    timestamp = int(await store.read_clock())
    file: FileObject = {
        "id": f"file-{secrets.token_hex(12)}",
        "object": "file",
        "bytes": size,
        "created_at": timestamp,
        "expires_at": timestamp + keep,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }
    await store.write(file["id"], {"owner": owner, "object": file, "pieces": chunks}, 0)
    return file


async def read_record(
    store: BatchStore,
    id: str,  # noqa: A002
    owner: str,
    kind: str = "file",
    param: str = "id",
) -> tuple[Record, int]:
    """Return the record of a "file" or a "batch" of an owner, and its revision.

    Raises ApiError (404).
    """
    stored = await store.read(id) if is_id(id) else None
    if stored is None or stored[0]["owner"] != owner or stored[0]["object"]["object"] != kind:
        message = f"no such {kind}: {id[:60]!a}"
        raise ApiError(404, message, code=f"{kind}_not_found", param=param)
    return stored


async def list_records(store: BatchStore, prefix: str, owner: str | None = None) -> list[Record]:
    """Return the records of an owner, or of all, the latest first."""
    stored = [await store.read(name) for name in await store.list_ids() if name.startswith(prefix)]
    matches = [entry[0] for entry in stored if entry and owner in (None, entry[0]["owner"])]
    return sorted(
        matches, key=lambda entry: (-entry["object"]["created_at"], entry["object"]["id"])
    )


async def delete_file(store: BatchStore, record: Record) -> None:
    """Remove a file and its chunks."""
    await store.remove(record["object"]["id"])
    for name in iter_chunk_names(record["pieces"]):
        await store.drop(name)


async def iter_lines(store: BatchStore, chunks: Chunks) -> AsyncIterator[bytes]:
    """Yield the lines of a file that are not empty, without their ends."""
    partial_line = b""
    for name in iter_chunk_names(chunks):
        *complete_lines, partial_line = (partial_line + await store.get(name)).split(b"\n")
        for line in complete_lines:
            if line.strip():
                yield line
    if partial_line.strip():
        yield partial_line


async def remove_expired(store: BatchStore) -> None:
    """Remove files whose time is over, and batches that ended as long ago."""
    timestamp = await store.read_clock()
    for record in await list_records(store, ""):
        entry = record["object"]
        with contextlib.suppress(KeyError):
            if entry["object"] == "file" and entry["expires_at"] <= timestamp:
                await delete_file(store, record)
            elif entry["object"] == "batch" and entry["created_at"] + 2 * LIFETIME <= timestamp:
                await store.remove(entry["id"])
