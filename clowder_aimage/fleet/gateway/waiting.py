"""The number of jobs that wait in gateways, which each gateway publishes."""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import asdict, dataclass
from itertools import islice

from nats.js.errors import NotFoundError
from pydantic import TypeAdapter

from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.field import STRICT, Count, read_fields
from clowder_aimage.fleet.link import FleetLink

# Gateways whose numbers are read.
MAX_GATEWAYS = 100


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """The number of jobs that wait in a gateway for their turn."""

    __pydantic_config__ = STRICT

    waiting: Count = 0


_LOAD = TypeAdapter(GatewayLoad)


class WaitingJobs:
    """Publishes the number of jobs that wait in one gateway, and adds up those of all gateways.

    The numbers are in the bucket of the workers, which removes what is not published again.
    """

    def __init__(self, link: FleetLink) -> None:
        self._link, self._id = link, secrets.token_hex(8)
        self._published = 0

    async def publish(self, waiting: int) -> None:
        """Publish a number, unless it is zero as before. Raises NatsError, TimeoutError."""
        if waiting or self._published:
            subject = self._link.names.build_load_subject(self._id)
            load = json.dumps(asdict(GatewayLoad(waiting))).encode()
            await self._link.streams.publish(subject, load)
            self._published = waiting

    async def count(self) -> int:
        """Return the number of all gateways. Raises NatsError, TimeoutError."""
        names = self._link.names
        subject = names.build_load_subject("*")
        bucket = await self._link.streams.stream_info(
            f"KV_{names.workers}", subjects_filter=subject
        )
        subjects = islice(bucket.state.subjects or (), MAX_GATEWAYS)
        return sum(await asyncio.gather(*map(self._read, subjects)))

    async def _read(self, subject: str) -> int:
        stream = f"KV_{self._link.names.workers}"
        try:
            message = await self._link.streams.get_msg(stream, subject=subject, direct=True)
            return read_fields(_LOAD, message.data or b"", "the load of a gateway").waiting
        except (NotFoundError, FormatError):
            return 0
