"""Jobs as requests to the worker of this process, with the scope of their clients' tokens.

Those that a gateway did not queue are requests to this worker alone, which is answered directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
from nats.aio.msg import Msg

from clowder_aimage.api.picture.picture_source import NAMES, type_of
from clowder_aimage.errors import AImageError
from clowder_aimage.fleet.continuation import NDJSON
from clowder_aimage.fleet.fleet_job import FleetJob
from clowder_aimage.fleet.fleet_link import FleetLink
from clowder_aimage.fleet.job_frame import PIECE
from clowder_aimage.http.background import beside
from clowder_aimage.http.private_app import PrivateApp
from clowder_aimage.oci import read_json

# Headers of a client that change the response, and those of tracing (W3C, "Trace Context")
FORWARDED = ("Accept", "Host", "Traceparent", "Tracestate", "X-Request-Id", "X-Stainless-Lang")
# Headers of a response that concern one connection (RFC 9110, 7.6.1), or that each server sets
OWN = frozenset(
    "connection content-length date keep-alive server transfer-encoding x-request-id".split()
)
# A direct response has one or more messages. The last one has the header ANSWER: status, headers,
# and the size of the body. The others have PART: a line of a transfer, a card, a part of the body
PART, ANSWER = "Aimage-Part", "Aimage-Answer"
LINE, CARD, BODY, ALIVE = "line", "card", "body", "alive"
SIGN = 1.0  # seconds between two signs of life
_EVERY = 0.25  # seconds between two lines for the same blob of a transfer


@contextlib.asynccontextmanager
async def send_job(own: PrivateApp, job: FleetJob) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the response to a job. Raises aiohttp.ClientError."""
    headers = dict(job.headers)
    body: Any = None
    if job.is_form:
        body = _form(job)
    elif job.fields is not None:
        body = io.BytesIO(json.dumps(job.fields).encode())
        headers["Content-Type"] = "application/json"
    asked = own.send(job.method, job.path, scope=job.scope, headers=headers, data=body)
    async with asked as response:
        yield response


def _form(job: FleetJob) -> aiohttp.FormData:
    found = aiohttp.FormData(quote_fields=False, default_to_multipart=True)
    for name, value in (job.fields or {}).items():
        for one in value if name in NAMES and isinstance(value, list) else [value]:
            if isinstance(one, bytes):
                kind = type_of(one) or "image/png"
                data = io.BytesIO(one)  # of which aiohttp sends parts
                found.add_field(name, data, filename=name, content_type=kind)
            else:
                found.add_field(name, str(one))
    return found


async def answer_call(
    link: FleetLink, local: PrivateApp, message: Msg, renew: Callable[[], Awaitable[bytes]]
) -> None:
    """Respond to a request by the routes of this process.

    The lines of a transfer are published as they arrive, and the last one is the response. After a
    change of the store ``renew`` returns the card of this worker, which comes before the response.
    """
    facts: dict[str, Any] = {"status": 500, "headers": []}
    async with beside(_show_life(link, message.reply)):
        try:
            job = FleetJob.decode(message.data)
            async with send_job(local, job) as response:
                facts["status"] = response.status
                known = [(name, text) for name, text in response.headers.items()]
                facts["headers"] = [one for one in known if one[0].lower() not in OWN]
                if response.content_type == NDJSON:
                    body = await _pass_lines(link, message.reply, response, facts)
                else:
                    body = await response.read()
            if job.method not in ("GET", "HEAD"):
                with contextlib.suppress(AImageError):  # the store cannot be read
                    await link.tell(message.reply, await renew(), {PART: CARD})
        except (AImageError, aiohttp.ClientError) as error:
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


async def _pass_lines(
    link: FleetLink, reply: str, response: aiohttp.ClientResponse, facts: dict[str, Any]
) -> bytes:
    last, told = b"", dict[str, float]()
    async for last in response.content:
        value = read_json(last, "a line of a transfer")
        name, now = str(value.get("status")), time.monotonic()
        if "error" in value:
            facts["status"] = value.get("status", 500)
        elif now - told.get(name, 0.0) >= _EVERY or value.get("completed") == value.get("total"):
            told[name] = now
            await link.tell(reply, last, {PART: LINE})
    return last
