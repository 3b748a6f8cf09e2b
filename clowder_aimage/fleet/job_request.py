"""Jobs as requests to the worker of this process, with the scope of their clients' tokens.

Those that a gateway did not queue are requests to this worker alone, which is answered directly.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from nats.aio.msg import Msg

from clowder_aimage.api.picture.picture_source import NAMES, type_of
from clowder_aimage.errors import AImageError
from clowder_aimage.fleet.continuation import NDJSON
from clowder_aimage.fleet.fleet_job import FleetJob
from clowder_aimage.fleet.fleet_link import LOST, FleetLink
from clowder_aimage.fleet.job_frame import PIECE
from clowder_aimage.http.private_app import PrivateApp
from clowder_aimage.oci import read_json

# Headers of a client that change the response, and those of tracing (W3C, "Trace Context")
FORWARDED = ("Accept", "Host", "Traceparent", "Tracestate", "X-Request-Id", "X-Stainless-Lang")
# Headers of a response that concern one connection (RFC 9110, 7.6.1), or that each server sets
OWN = frozenset(
    "connection content-length date keep-alive server transfer-encoding x-request-id".split()
)
ANSWER = "Aimage-Answer"  # the header with status and headers of a direct response
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


async def answer_call(link: FleetLink, local: PrivateApp, message: Msg) -> bool:
    """Respond to a request by the routes of this process; return whether it may change the store.

    The lines of a transfer are published as they arrive, and the last one is the response.
    """
    facts: dict[str, Any] = {"status": 500, "headers": []}
    is_change = False
    try:
        job = FleetJob.decode(message.data)
        is_change = job.method not in ("GET", "HEAD")
        async with send_job(local, job) as response:
            facts["status"] = response.status
            known = [(name, text) for name, text in response.headers.items()]
            facts["headers"] = [one for one in known if one[0].lower() not in OWN]
            if response.content_type == NDJSON:
                body = await _pass_lines(link, message.reply, response, facts)
            else:
                body = await response.read()
    except (AImageError, aiohttp.ClientError) as error:
        body = str(error).encode()
    if len(body) > link.client.max_payload - PIECE:
        body, facts = b"the response is too large", {"status": 507, "headers": []}
    with contextlib.suppress(*LOST):
        await link.client.publish(message.reply, body, headers={ANSWER: json.dumps(facts)})
    return is_change


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
            await link.tell(reply, last)
    return last
