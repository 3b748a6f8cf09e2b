"""The requests of a server to itself, over a socket that only its user can open."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from clowder_aimage.http.app import build_app
from clowder_aimage.http.listening_socket import Listeners, listen_unix
from clowder_aimage.http.route import ADMIN, INFER, Role
from clowder_aimage.http.server import accepting

_CALLER = "Aimage-Caller"
_MARK = "is_private"


class PrivateApp:
    """The routes of ``roles``; each request has the scope and the caller that its sender names."""

    def __init__(self, *roles: Role) -> None:
        self._roles = roles
        self._tokens = {secrets.token_hex(16): scope for scope in (ADMIN, INFER)}
        self._session: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Accept requests of ``send``."""
        place = Path(tempfile.mkdtemp(prefix="aimage-"))
        path = place / "requests"
        listening = Listeners([listen_unix(path)], hosts=None, path=path)
        app = build_app(*self._roles, hosts=None, tokens=self._tokens)
        app[_MARK] = True
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
    async def send(
        self,
        method: str,
        path: str,
        *,
        scope: str,
        headers: Mapping[str, str],
        data: Any = None,
        caller: str = "",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response to a request. Raises aiohttp.ClientError."""
        assert self._session is not None  # noqa: S101 - open
        token = next(token for token, its in self._tokens.items() if its == scope)
        own = {**headers, "Authorization": f"Bearer {token}", _CALLER: caller}
        url = f"http://localhost{path}"
        async with self._session.request(method, url, headers=own, data=data) as response:
            yield response


def private_caller(request: web.Request) -> str | None:
    """Return the caller of a request of the server to itself; None for another request."""
    return request.headers.get(_CALLER, "") if request.app.get(_MARK) else None
