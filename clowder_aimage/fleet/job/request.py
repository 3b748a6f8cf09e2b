"""Jobs as requests to the routes of this process, with the scope of their clients' tokens.

Requests to this worker alone are not queued, and are answered directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from nats.aio.msg import Msg

from clowder_aimage.errors import AImageError
from clowder_aimage.fleet.frame import CHUNK
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.http.background import run_in_background
from clowder_aimage.http.local_call import LocalCalls, get_body
from clowder_aimage.http.local_request import LocalRequest, Sink
from clowder_aimage.oci import read_json

# Headers of a client that change the response, and those of tracing (W3C, "Trace Context").
FORWARDED = ("Accept", "Host", "Traceparent", "Tracestate", "X-Request-Id", "X-Stainless-Lang")
# A direct response has one or more messages. The last one has the header ANSWER: status, headers,
# and the size of the body. The others have PART: a line of a transfer, a status, a part of the body
PART, ANSWER = "Aimage-Part", "Aimage-Answer"
LINE, STATUS, BODY, ALIVE = "line", "status", "body", "alive"
# Seconds between two signs of life.
SIGN = 1.0
# Seconds between two lines for the same blob of a transfer.
_EVERY = 0.25


def request_of(job: FleetJob, sink: Sink) -> LocalRequest:
    """Return the request of a job. Its route checks the fields."""
    return LocalRequest(
        job.method,
        job.path,
        scope=job.scope,
        caller=job.caller,
        headers=job.headers,
        fields=job.fields,
        is_form=job.is_form,
        size=job.size,
        sink=sink,
    )


async def answer_call(
    link: FleetLink, calls: LocalCalls, message: Msg, renew: Callable[[], Awaitable[bytes]]
) -> None:
    """Respond to a request by the routes of this process.

    The lines of a transfer are published as they arrive, and the last one is the response. After a
    change of the store, the status of this worker, returned by ``renew``, is sent before it.
    """
    facts: dict[str, Any] = {"status": 500, "headers": []}
    async with run_in_background(_show_life(link, message.reply)):
        try:
            job, lines = FleetJob.decode(message.data), _TransferLines(link, message.reply)
            response = await calls.send(request_of(job, lines))
            facts["status"] = lines.status or response.status
            facts["headers"] = [*response.headers.items()]
            body = lines.last or get_body(response)
            if job.method not in ("GET", "HEAD"):
                # The store cannot be read.
                with contextlib.suppress(AImageError):
                    await link.publish(message.reply, await renew(), {PART: STATUS})
        except (AImageError, ConnectionError) as error:
            body = str(error).encode()
    facts["size"] = len(body)
    while len(body) > CHUNK:
        await link.publish(message.reply, body[:CHUNK], {PART: BODY})
        body = body[CHUNK:]
    await link.publish(message.reply, body, {ANSWER: json.dumps(facts)})


async def _show_life(link: FleetLink, reply: str) -> None:
    while True:
        await asyncio.sleep(SIGN)
        await link.publish(reply, b"", {PART: ALIVE})


class _TransferLines:
    """Publishes the lines of a transfer. ``status`` is that of an error among them, else 0."""

    def __init__(self, link: FleetLink, reply: str) -> None:
        self._link, self._reply = link, reply
        self._published = dict[str, float]()
        self.last, self.status = b"", 0

    async def begin(self, response: web.StreamResponse) -> None:
        pass

    async def write(self, data: bytes) -> None:
        for self.last in data.splitlines(keepends=True):
            value = read_json(self.last, "a line of a transfer")
            name, timestamp = str(value.get("status")), time.monotonic()
            is_whole = value.get("completed") == value.get("total")
            if "error" in value:
                self.status = value.get("status", 500)
            elif is_whole or timestamp - self._published.get(name, 0.0) >= _EVERY:
                self._published[name] = timestamp
                await self._link.publish(self._reply, self.last, {PART: LINE})
