"""Jobs as requests to the worker of this process, over a socket that only its user can open."""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from clowder_aimage.api.picture.picture_source import NAMES, type_of
from clowder_aimage.fleet.fleet_job import FleetJob
from clowder_aimage.http.app import build_app
from clowder_aimage.http.listening_socket import Listeners, listen_unix
from clowder_aimage.http.route import ADMIN, INFER, Role
from clowder_aimage.http.server import accepting

# Headers of a client that change the response, and those of tracing (W3C, "Trace Context")
FORWARDED = ("Accept", "Host", "Traceparent", "Tracestate", "X-Request-Id", "X-Stainless-Lang")
# Headers of a response that concern one connection (RFC 9110, 7.6.1), or that each server sets
OWN = frozenset(
    "connection content-length date keep-alive server transfer-encoding x-request-id".split()
)


class LocalWorker:
    """The interfaces of a worker, for its jobs: a job has the scope of its client's token."""

    def __init__(self, *roles: Role) -> None:
        self._roles = roles
        self._tokens = {secrets.token_hex(16): scope for scope in (ADMIN, INFER)}
        self._session: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Accept requests of ``send``."""
        place = Path(tempfile.mkdtemp(prefix="aimage-"))
        path = place / "jobs"
        listening = Listeners([listen_unix(path)], hosts=None, path=path)
        app = build_app(*self._roles, hosts=None, tokens=self._tokens)
        try:
            async with accepting(app, listening):
                connector = aiohttp.UnixConnector(str(path), limit=0)
                none = aiohttp.ClientTimeout(total=None)
                async with aiohttp.ClientSession(
                    connector=connector, timeout=none, auto_decompress=False
                ) as self._session:
                    yield
        finally:
            listening.close()
            shutil.rmtree(place, ignore_errors=True)

    @contextlib.asynccontextmanager
    async def send(self, job: FleetJob) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response to a job. Raises aiohttp.ClientError."""
        assert self._session is not None  # noqa: S101 - open
        token = next(token for token, scope in self._tokens.items() if scope == job.scope)
        headers = {**job.headers, "Authorization": f"Bearer {token}"}
        body: dict[str, Any] = {}
        if job.is_form:
            body["data"] = _form(job)
        elif job.fields is not None:
            body["data"] = io.BytesIO(json.dumps(job.fields).encode())
            headers["Content-Type"] = "application/json"
        url = f"http://localhost{job.path}"
        async with self._session.request(job.method, url, headers=headers, **body) as response:
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
