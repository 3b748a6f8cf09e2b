"""Files and batches of gateways: records in a bucket of NATS, pieces in a stream."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator

from nats.js.errors import (
    APIError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NoKeysError,
)
from nats.js.errors import Error as JetStreamError
from nats.js.kv import KeyValue

from clowder_aimage.api.batch.store import ChangedRecordError, Record, is_id
from clowder_aimage.errors import NotFoundError
from clowder_aimage.fleet.frame import PIECE
from clowder_aimage.fleet.link import (
    FULL,
    LOST,
    MESSAGE_ID,
    FleetLink,
    FullStoreError,
    unavailable,
)
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.oci import read_json

_CLOCK = "clock"  # the key of an entry whose time is that of the server
_FRESH = 600.0  # seconds after which the server's time is asked for again


class FleetBatchStore:
    """A store that all gateways of a fleet share (``api.batch.batch_store.BatchStore``)."""

    def __init__(self, link: FleetLink) -> None:
        self._link, self._names = link, link.names
        self._clock: tuple[float, float] | None = None  # the server's time, and ours without epoch

    async def now(self) -> float:
        """Return the time of the NATS server: the clocks of gateways may be hours apart."""
        known = self._clock
        if known is None or time.monotonic() - known[1] > _FRESH:
            with self._answers():
                await (await self._bucket()).put(_CLOCK, b"")
                subject = f"$KV.{self._names.batches}.{_CLOCK}"
                stream = f"KV_{self._names.batches}"
                found = await self._link.streams.get_msg(stream, subject=subject)
                assert found.time is not None  # noqa: S101 - every message has one
                self._clock = known = found.time.timestamp(), time.monotonic()
        return known[0] + time.monotonic() - known[1]

    async def _bucket(self) -> KeyValue:
        return await self._link.streams.key_value(self._names.batches)

    async def read(self, id: str) -> tuple[Record, int] | None:  # noqa: A002
        """Return a record and its revision, or None."""
        with self._answers():
            try:
                entry = await (await self._bucket()).get(id)
            except KeyNotFoundError:
                return None
        return read_json(entry.value or b"", "a record of a batch"), entry.revision or 0

    async def write(self, id: str, value: Record, revision: int) -> int:  # noqa: A002
        """Replace a record with that revision. Raises ChangedRecordError."""
        raw = json.dumps(value, separators=(",", ":")).encode()
        with self._answers():
            bucket = await self._bucket()
            try:
                if not revision:
                    return await bucket.create(id, raw)
                return await bucket.update(id, raw, last=revision)
            except KeyWrongLastSequenceError:
                raise ChangedRecordError(f"{id} was changed by another gateway") from None

    async def remove(self, id: str) -> None:  # noqa: A002
        """Remove a record."""
        with self._answers():
            await (await self._bucket()).purge(id)

    async def ids(self) -> list[str]:
        """Return the ids of all records."""
        with self._answers():
            try:
                return sorted(filter(is_id, await (await self._bucket()).keys()))
            except NoKeysError:
                return []

    async def put(self, name: str, data: bytes) -> None:
        """Keep a piece, in messages."""
        with self._answers():
            for at in range(0, len(data), PIECE):
                mark = {MESSAGE_ID: f"{name}-{at}"}
                await self._link.store(self._names.file(name), data[at : at + PIECE], mark)

    async def get(self, name: str) -> bytes:
        """Return a piece. Raises NotFoundError."""
        with self._answers():
            found = self._link.stored(self._names.file(name), 0, self._names.files)
            parts = [one.data or b"" async for _, one in found]
        if not parts:
            raise NotFoundError("a part of the file has expired")
        return b"".join(parts)

    async def drop(self, name: str) -> None:
        """Remove a piece, which may be missing."""
        with self._answers():
            await self._link.streams.purge_stream(self._names.files, subject=self._names.file(name))

    @contextlib.contextmanager
    def _answers(self) -> Iterator[None]:
        """Convert errors of NATS to responses. Raises ApiError."""
        self._link.check()
        try:
            yield
        except (APIError, FullStoreError) as error:
            if isinstance(error, FullStoreError) or error.err_code in FULL:
                message = "the fleet's store of files is full; delete files, or try again later"
                raise ApiError(507, message, code="insufficient_storage") from None
            raise unavailable(f"NATS refuses: {error.description}; try again later") from None
        except (*LOST, JetStreamError):
            raise unavailable("NATS does not answer; try again later") from None
