"""Jobs as requests to the routes of this process, with the scope of their clients' tokens.

Those that a gateway did not queue are requests to this worker alone, which is answered directly.
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
from clowder_aimage.fleet.frame import PIECE
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.http.background import background_tasks
from clowder_aimage.http.local_call import LocalCalls, body_of
from clowder_aimage.http.local_request import LocalRequest, Sink
from clowder_aimage.oci import read_json

# Headers of a client that change the response, and those of tracing (W3C, "Trace Context")
FORWARDED = ("Accept", "Host", "Traceparent", "Tracestate", "X-Request-Id", "X-Stainless-Lang")
# A direct response has one or more messages. The last one has the header ANSWER: status, headers,
# and the size of the body. The others have PART: a line of a transfer, a status, a part of the body
PART, ANSWER = "Aimage-Part", "Aimage-Answer"
LINE, STATUS, BODY, ALIVE = "line", "status", "body", "alive"
SIGN = 1.0  # seconds between two signs of life
_EVERY = 0.25  # seconds between two lines for the same blob of a transfer


def request_of(job: FleetJob, sink: Sink) -> LocalRequest:
    """Return the request of a job, whose fields are checked by its route."""
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
    change of the store ``renew`` returns the status of this worker, which is sent before it.
    """
    facts: dict[str, Any] = {"status": 500, "headers": []}
    async with background_tasks(_show_life(link, message.reply)):
        try:
            job, lines = FleetJob.decode(message.data), _TransferLines(link, message.reply)
            response = await calls.send(request_of(job, lines))
            facts["status"] = lines.status or response.status
            facts["headers"] = [*response.headers.items()]
            body = lines.last or body_of(response)
            if job.method not in ("GET", "HEAD"):
                with contextlib.suppress(AImageError):  # the store cannot be read
                    await link.tell(message.reply, await renew(), {PART: STATUS})
        except (AImageError, ConnectionError) as error:
            body = str(error).encode()
    facts["size"] = len(body)
    while len(body) > PIECE:
        await link.tell(message.reply, body[:PIECE], {PART: BODY})
        body = body[PIECE:]
    await link.tell(message.reply, body, {ANSWER: json.dumps(facts)})


async def _show_life(link: FleetLink, reply: str) -> None:
    while True:
        await asyncio.sleep(SIGN)
        await link.tell(reply, b"", {PART: ALIVE})


class _TransferLines:
    """Publishes the lines of a transfer. ``status`` is that of an error among them, else 0."""

    def __init__(self, link: FleetLink, reply: str) -> None:
        self._link, self._reply = link, reply
        self._told = dict[str, float]()
        self.last, self.status = b"", 0

    async def begin(self, response: web.StreamResponse) -> None:
        pass

    async def write(self, data: bytes) -> None:
        for self.last in data.splitlines(keepends=True):
            value = read_json(self.last, "a line of a transfer")
            name, now = str(value.get("status")), time.monotonic()
            is_whole = value.get("completed") == value.get("total")
            if "error" in value:
                self.status = value.get("status", 500)
            elif is_whole or now - self._told.get(name, 0.0) >= _EVERY:
                self._told[name] = now
                await self._link.tell(self._reply, self.last, {PART: LINE})
