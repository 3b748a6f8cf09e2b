"""Files of clients and of batches: a record with OpenAI's file object, and pieces."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from typing_extensions import TypedDict

from clowder_aimage.api.batch.store import BatchStore, Record, is_id
from clowder_aimage.http.api_error import ApiError

PIECE = 4 << 20  # bytes of a piece, unless one line is larger
MAX_FILES = 1000  # of one owner
KEPT = 30 * 86400  # seconds that files are kept
INPUT: Final = "batch"
OUTPUT: Final = "batch_output"

Purpose = Literal["batch", "batch_output"]
Pieces = list[Any]  # pairs of a mark and a number of pieces: so a record stays short


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


def names(pieces: Pieces) -> Iterator[str]:
    """Yield the names of pieces in order."""
    for mark, count in pieces:
        yield from (f"{mark}-{number}" for number in range(count))


async def add_piece(store: BatchStore, pieces: Pieces, mark: str, data: bytes) -> None:
    """Store a piece and add it to ``pieces``. After a failure the writer needs another mark."""
    if not pieces or pieces[-1][0] != mark:
        pieces.append([mark, 0])
    await store.put(f"{mark}-{pieces[-1][1]}", data)
    pieces[-1][1] += 1


@dataclass(slots=True)
class FileWriter:
    """Writes a file; ``pieces`` are those that are stored."""

    store: BatchStore
    size: int = 0
    pieces: Pieces = field(default_factory=list)
    _mark: str = field(default_factory=lambda: secrets.token_hex(16))
    _rest: bytearray = field(default_factory=bytearray)

    async def write(self, data: bytes) -> None:
        """Add bytes."""
        self.size += len(data)
        self._rest += data
        while len(self._rest) >= PIECE:
            await add_piece(self.store, self.pieces, self._mark, bytes(self._rest[:PIECE]))
            del self._rest[:PIECE]

    async def end(
        self, name: str, owner: str, purpose: Purpose = INPUT, keep: int = KEPT
    ) -> FileObject:
        """Make the record, and return the file object."""
        if self._rest:
            await add_piece(self.store, self.pieces, self._mark, bytes(self._rest))
        return await add_file(
            self.store, self.pieces, self.size, name=name, owner=owner, purpose=purpose, keep=keep
        )

    async def abandon(self) -> None:
        """Remove what was stored."""
        for name in names(self.pieces):
            await self.store.drop(name)


async def add_file(
    store: BatchStore,
    pieces: Pieces,
    size: int,
    *,
    name: str,
    owner: str,
    purpose: Purpose,
    keep: int = KEPT,
) -> FileObject:
    """Make the record of a file, whose pieces are stored; return the file object."""
    now = int(await store.now())
    found: FileObject = {
        "id": f"file-{secrets.token_hex(12)}",
        "object": "file",
        "bytes": size,
        "created_at": now,
        "expires_at": now + keep,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }
    await store.write(found["id"], {"owner": owner, "object": found, "pieces": pieces}, 0)
    return found


async def read_own(
    store: BatchStore,
    id: str,  # noqa: A002
    owner: str,
    kind: str = "file",
    param: str = "id",
) -> tuple[Record, int]:
    """Return the record of a "file" or a "batch" of an owner, and its revision.

    Raises ApiError (404).
    """
    found = await store.read(id) if is_id(id) else None
    if found is None or found[0]["owner"] != owner or found[0]["object"]["object"] != kind:
        message = f"no such {kind}: {id[:60]!a}"
        raise ApiError(404, message, code=f"{kind}_not_found", param=param)
    return found


async def records(store: BatchStore, prefix: str, owner: str | None = None) -> list[Record]:
    """Return the records of an owner, or of all, the latest first."""
    found = [await store.read(each) for each in await store.ids() if each.startswith(prefix)]
    own = [one[0] for one in found if one and owner in (None, one[0]["owner"])]
    return sorted(own, key=lambda one: (-one["object"]["created_at"], one["object"]["id"]))


async def delete_file(store: BatchStore, record: Record) -> None:
    """Remove a file and its pieces."""
    await store.remove(record["object"]["id"])
    for name in names(record["pieces"]):
        await store.drop(name)


async def lines(store: BatchStore, pieces: Pieces) -> AsyncIterator[bytes]:
    """Yield the lines of a file that are not empty, without their ends."""
    rest = b""
    for name in names(pieces):
        *whole, rest = (rest + await store.get(name)).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
    if rest.strip():
        yield rest


async def remove_expired(store: BatchStore) -> None:
    """Remove files whose time is over, and batches that ended as long ago."""
    now = await store.now()
    for record in await records(store, ""):
        one = record["object"]
        with contextlib.suppress(KeyError):
            if one["object"] == "file" and one["expires_at"] <= now:
                await delete_file(store, record)
            elif one["object"] == "batch" and one["created_at"] + 2 * KEPT <= now:
                await store.remove(one["id"])
