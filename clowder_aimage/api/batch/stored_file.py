"""Files of clients and of batches: a record with OpenAI's file object, and chunks."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from clowder_aimage.api.batch.store import (
    BatchStore,
    ChangedRecordError,
    Record,
    is_id,
    make_id,
)
from clowder_aimage.engine.executor import run_io
from clowder_aimage.http.api_error import ApiError

# Bytes of a chunk, unless one line is larger
CHUNK_SIZE = 4 << 20
# Seconds that files are kept
LIFETIME = 30 * 86400
INPUT: Final = "batch"
OUTPUT: Final = "batch_output"

Purpose = Literal["batch", "batch_output"]
# Pairs of a mark and a number of chunks, which keep a record short
Chunks = list[Any]


Owner = Annotated[
    str,
    Field(description="Only in a response to an administrator: the opaque name of another owner."),
]


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
    owner: NotRequired[Owner]


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
    id: str = "",  # noqa: A002
) -> FileObject:
    """Make the record of a file with stored chunks; return the file object.

    A record with its ``id`` is that of an earlier attempt.
    """
    timestamp = await store.read_clock()
    file: FileObject = {
        "id": id or make_id("file-", timestamp),
        "object": "file",
        "bytes": size,
        "created_at": int(timestamp),
        "expires_at": int(timestamp) + keep,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }
    with contextlib.suppress(ChangedRecordError):
        await store.write(file["id"], {"owner": owner, "object": file, "pieces": chunks}, 0)
    return file


async def read_record(
    store: BatchStore,
    id: str,  # noqa: A002
    owner: str,
    kind: str = "file",
    param: str = "id",
    *,
    is_admin: bool = False,
) -> tuple[Record, int]:
    """Return the record of a "file" or a "batch" of an owner, and its revision.

    An administrator reads those of all owners. Raises ApiError (404).
    """
    stored = await store.read(owner, id) if is_id(id) else None
    if stored is None and is_admin:
        keys = [key for key in await store.list_keys() if key[1] == id]
        stored = await store.read(*keys[0]) if keys else None
    if stored is None or stored[0]["object"]["object"] != kind:
        message = f"no such {kind}: {id[:60]!a}"
        raise ApiError(404, message, code=f"{kind}_not_found", param=param)
    return stored


async def iter_records(
    store: BatchStore, prefix: str, owner: str | None, *, is_reversed: bool = True
) -> AsyncIterator[Record]:
    """Yield the records of an owner, or of all, whose ids have a prefix; the latest first."""
    step = -1 if is_reversed else 1
    if owner is not None:
        for record in (await store.list_records(owner))[::step]:
            if record["object"]["id"].startswith(prefix):
                yield record
        return
    for key in (await store.list_keys())[::step]:
        if key[1].startswith(prefix) and (stored := await store.read(*key)) is not None:
            yield stored[0]


async def delete_file(store: BatchStore, record: Record) -> None:
    """Remove a file and its chunks."""
    await store.remove(record["owner"], record["object"]["id"])
    for name in iter_chunk_names(record["pieces"]):
        await store.drop(name)


async def remove_unreadable(store: BatchStore, id: str, owner: str | None) -> bool:  # noqa: A002
    """Remove a record of an owner, or of anyone, that cannot be read; return True if there was one.

    Nothing is known of its chunks.
    """
    for key in await store.list_keys() if is_id(id) else ():
        if key[1] == id and owner in (None, key[0]) and await store.read(*key) is None:
            await store.remove(*key)
            return True
    return False


async def iter_lines(store: BatchStore, chunks: Chunks, limit: int) -> AsyncIterator[bytes]:
    """Yield the lines of a file, as ``iter_groups``."""
    async for lines in iter_groups(store, chunks, limit):
        for line in lines:
            yield line


async def iter_groups(store: BatchStore, chunks: Chunks, limit: int) -> AsyncIterator[list[bytes]]:
    """Yield the lines of each chunk of a file that are not empty, without their ends.

    Of a line with more bytes than ``limit`` there is a part that has more, too.
    """
    rest = b""
    for name in iter_chunk_names(chunks):
        lines, rest = await run_io(_split_lines, rest, await store.get(name), limit)
        yield lines
    if rest.strip():
        yield [rest]


def _split_lines(rest: bytes, chunk: bytes, limit: int) -> tuple[list[bytes], bytes]:
    *lines, rest = (rest + chunk).split(b"\n")
    return [line for line in lines if line.strip()], rest[: limit + 1]


async def remove_expired(store: BatchStore) -> None:
    """Remove files whose time is over, and batches that ended as long ago."""
    timestamp = await store.read_clock()
    async for record in iter_records(store, "", None):
        entry = record["object"]
        with contextlib.suppress(KeyError):
            if entry["object"] == "file" and entry["expires_at"] <= timestamp:
                await delete_file(store, record)
            elif entry["object"] == "batch" and entry["created_at"] + 2 * LIFETIME <= timestamp:
                await store.remove(record["owner"], entry["id"])
