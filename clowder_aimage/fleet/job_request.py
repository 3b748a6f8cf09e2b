"""Jobs as requests to the worker of this process, with the scope of their clients' tokens."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from clowder_aimage.api.picture.picture_source import NAMES, type_of
from clowder_aimage.fleet.fleet_job import FleetJob
from clowder_aimage.http.private_app import PrivateApp

# Headers of a client that change the response, and those of tracing (W3C, "Trace Context")
FORWARDED = ("Accept", "Host", "Traceparent", "Tracestate", "X-Request-Id", "X-Stainless-Lang")
# Headers of a response that concern one connection (RFC 9110, 7.6.1), or that each server sets
OWN = frozenset(
    "connection content-length date keep-alive server transfer-encoding x-request-id".split()
)


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
