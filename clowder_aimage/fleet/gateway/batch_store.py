"""Files and batches of gateways: records in a bucket of NATS, chunks in a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterator

from nats.js.errors import (
    APIError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
)
from nats.js.errors import Error as JetStreamError
from nats.js.kv import KeyValue

from clowder_aimage.api.batch.store import (
    NOBODY,
    ChangedRecordError,
    Record,
    RecordKey,
    build_space_error,
    is_id,
)
from clowder_aimage.engine.batch_line import OVER
from clowder_aimage.errors import FormatError, NotFoundError
from clowder_aimage.fleet.field import is_id as is_part
from clowder_aimage.fleet.frame import CHUNK
from clowder_aimage.fleet.gateway.batch_record import read_record
from clowder_aimage.fleet.link import (
    FULL,
    LOST,
    MESSAGE_ID,
    FleetLink,
    FullStoreError,
    build_unavailable_error,
)
from clowder_aimage.http.api_error import ApiError

# The key of an entry whose time is that of the server.
_CLOCK = "clock"
# Seconds after which the server's time is asked for again.
_FRESH = 600.0
# Records that are read at once, and those that are remembered, of some 2 kB each
_AT_ONCE, _MAX_RECORDS = 16, 20_000
# Records that are logged as left out
_MAX_LOGGED = 1000
_log = logging.getLogger("aimage.fleet")


def _format_key(owner: str, name: str) -> str:
    return f"{owner or NOBODY}.{name}"


def _parse_key(key: str) -> RecordKey:
    owner, _, name = key.partition(".")
    return "" if owner == NOBODY else owner, name


def _is_valid(key: RecordKey) -> bool:
    """Return True if a key can be asked for: it becomes part of a subject."""
    return is_part(key[0] or NOBODY) and is_id(key[1])


class FleetBatchStore:
    """A store that all gateways of a fleet share (``api.batch.batch_store.BatchStore``)."""

    def __init__(self, link: FleetLink) -> None:
        self._link, self._names = link, link.names
        # Ids of records that were logged.
        self._rejected: set[RecordKey] = set()
        # Records of files and of batches that have ended, which nobody changes
        self._final: dict[RecordKey, Record] = {}
        self._reading = asyncio.Semaphore(_AT_ONCE)
        # The server's time, and ours without epoch.
        self._clock: tuple[float, float] | None = None

    async def read_clock(self) -> float:
        """Return the time of the NATS server: the clocks of gateways may be hours apart."""
        reading = self._clock
        if reading is None or time.monotonic() - reading[1] > _FRESH:
            with self._converting_errors():
                # A stored message has the time of the server.
                await (await self._open_bucket()).put(_CLOCK, b"")
                subject = self._build_subject(_CLOCK)
                stream = f"KV_{self._names.batches}"
                message = await self._link.streams.get_msg(stream, subject=subject)
                assert message.time is not None  # noqa: S101 - every message has one
                self._clock = reading = message.time.timestamp(), time.monotonic()
        return reading[0] + time.monotonic() - reading[1]

    async def _open_bucket(self) -> KeyValue:
        return await self._link.streams.key_value(self._names.batches)

    async def check_space(self) -> None:
        """Raise ApiError while the stream of files has less space than its reserve."""
        if self._link.is_almost_full(self._names.files):
            raise build_space_error("the fleet's store of files")

    async def read(self, owner: str, id: str) -> tuple[Record, int] | None:  # noqa: A002
        """Return a record and its revision, or None; one that is not valid is left out."""
        with self._converting_errors():
            try:
                entry = await (await self._open_bucket()).get(_format_key(owner, id))
            except KeyNotFoundError:
                return None
        record = self._parse(entry, (owner, id))
        return None if record is None else (record, entry.revision or 0)

    def _parse(self, entry: KeyValue.Entry, key: RecordKey) -> Record | None:
        try:
            return read_record(entry.value or b"", *key)
        except FormatError as error:
            if key not in self._rejected and len(self._rejected) < _MAX_LOGGED:
                self._rejected.add(key)
                _log.warning("a record is left out", extra={"id": key[1], "reason": error.message})
            return None

    async def write(self, id: str, value: Record, revision: int) -> int:  # noqa: A002
        """Replace a record with that revision. Raises ChangedRecordError."""
        raw = json.dumps(value, separators=(",", ":")).encode()
        with self._converting_errors():
            bucket, key = await self._open_bucket(), _format_key(value["owner"], id)
            try:
                if not revision:
                    return await bucket.create(key, raw)
                return await bucket.update(key, raw, last=revision)
            except KeyWrongLastSequenceError:
                raise ChangedRecordError(f"{id} was changed by another gateway") from None

    async def remove(self, owner: str, id: str) -> None:  # noqa: A002
        """Remove a record; unlike a deletion of NATS's buckets, nothing remains in its place."""
        with self._converting_errors():
            subject = self._build_subject(_format_key(owner, id))
            await self._link.remove(f"KV_{self._names.batches}", subject)

    async def list_records(self, owner: str) -> list[Record]:
        """Return the records of an owner by id; those that cannot change are read once."""
        keys = await self._list_keys(owner or NOBODY)
        # A task for each record would take longer than all else.
        records = {key: self._final.get(key) for key in keys}
        unknown = [key for key, record in records.items() if record is None]
        read = await asyncio.gather(*map(self._read_again, unknown))
        records.update(zip(unknown, read, strict=True))
        return [record for record in records.values() if record is not None]

    async def _read_again(self, key: RecordKey) -> Record | None:
        async with self._reading:
            stored = await self.read(*key)
        if stored is None:
            return None
        entry = stored[0]["object"]
        if entry["object"] == "file" or entry["status"] in OVER:
            if len(self._final) >= _MAX_RECORDS:
                self._final.clear()
            self._final[key] = stored[0]
        return stored[0]

    async def list_keys(self) -> list[RecordKey]:
        """Return the keys of all records by id."""
        return await self._list_keys("*")

    async def _list_keys(self, owner: str) -> list[RecordKey]:
        """Return the keys of an owner by id. The server counts the messages of each subject."""
        start = self._build_subject("")
        with self._converting_errors():
            stream = await self._link.streams.stream_info(
                f"KV_{self._names.batches}", subjects_filter=f"{start}{owner}.*"
            )
        keys = [_parse_key(name.removeprefix(start)) for name in stream.state.subjects or ()]
        return sorted(filter(_is_valid, keys), key=lambda key: key[1])

    def _build_subject(self, key: str) -> str:
        return f"$KV.{self._names.batches}.{key}"

    async def put(self, name: str, data: bytes) -> None:
        """Store a chunk as messages."""
        with self._converting_errors():
            for offset in range(0, len(data), CHUNK):
                headers = {MESSAGE_ID: f"{name}-{offset}"}
                await self._link.store(
                    self._names.build_file_subject(name), data[offset : offset + CHUNK], headers
                )

    async def get(self, name: str) -> bytes:
        """Return a chunk. Raises NotFoundError."""
        with self._converting_errors():
            messages = self._link.read_messages(
                self._names.build_file_subject(name), 0, self._names.files
            )
            chunks = [message.data or b"" async for _, message in messages]
        if not chunks:
            raise NotFoundError("a part of the file has expired")
        return b"".join(chunks)

    async def drop(self, name: str) -> None:
        """Remove a chunk; it may be missing."""
        with self._converting_errors():
            await self._link.remove(self._names.files, self._names.build_file_subject(name))

    @contextlib.contextmanager
    def _converting_errors(self) -> Iterator[None]:
        """Convert errors of NATS to responses. Raises ApiError."""
        self._link.check()
        try:
            yield
        except (APIError, FullStoreError) as error:
            if isinstance(error, FullStoreError) or error.err_code in FULL:
                message = "the fleet's store of files is full; delete files, or try again later"
                raise ApiError(507, message, code="insufficient_storage") from None
            raise build_unavailable_error(
                f"NATS refuses: {error.description}; try again later"
            ) from None
        except (*LOST, JetStreamError):
            raise build_unavailable_error("NATS does not answer; try again later") from None
