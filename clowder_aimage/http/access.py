"""Who may ask what: hosts and origins, tokens and their scopes, and where the worker listens."""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from clowder_aimage.distribution.registry_server import SHORTEST_TOKEN, is_loopback, parse_address
from clowder_aimage.errors import AccessError, UsageError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.request_header import host_name, origin_host, shown_token
from clowder_aimage.http.route import ADMIN, INFER, NODE, OPEN

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_MAY = {
    INFER: "this token may make pictures and list models, and no more",
    NODE: "this token is one of a node, which may read what another one has, and no more",
}
_SOCKET_MODE, _DIRECTORY_MODE = 0o660, 0o750


def read_tokens(path: Path) -> dict[str, str]:
    """The tokens in a file, and the scope of each.

    A line is ``admin TOKEN``, ``infer TOKEN`` or ``node TOKEN``; a token alone is an admin's. Empty
    lines and those that begin with ``#`` say nothing.

    Raises:
        UsageError: it cannot be read, or a line holds no token that is worth the name.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the tokens in {path}: {error}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        scope, token = (words[0], words[1]) if len(words) == 2 else (ADMIN, words[0])
        if len(words) > 2 or scope not in (ADMIN, INFER, NODE) or not _is_token(token):
            raise UsageError(
                f"line {number} of {path} is no token",
                hint="a line is 'admin TOKEN', 'infer TOKEN' or 'node TOKEN'; a token has "
                f"{SHORTEST_TOKEN} or more letters and digits, for example: openssl rand -hex 32",
            )
        if found.setdefault(token, scope) != scope:
            raise UsageError(f"the token in line {number} of {path} has two scopes")
    if not found:
        raise UsageError(
            f"there is no token in {path}", hint="write a line 'admin TOKEN' or 'infer TOKEN'"
        )
    return found


def _is_token(text: str) -> bool:
    return len(text) >= SHORTEST_TOKEN and text.isascii() and text.isprintable()


def check_address(address: str, *, has_tokens: bool) -> tuple[str, int]:
    """The host and the port in ``address``.

    Raises:
        UsageError: it is no address, or others reach it and nobody would ask who they are.
    """
    host, port = parse_address(address)
    if not is_loopback(host) and not has_tokens:
        raise UsageError(
            f"{address} can be reached from other machines, and nobody is asked who they are: "
            "whoever reaches it makes pictures, and pulls and deletes models",
            hint="listen on 127.0.0.1, or name the tokens of those who may with --token-file",
        )
    return host, port


def check_host(allowed: frozenset[str] | None) -> Middleware:
    """Refuse what a web page in a browser could have been led to send.

    DNS rebinding (CVE-2024-28224): the ``Host`` must be one of ``allowed``; None stands for any.
    Cross-site requests: an ``Origin``, which only browsers send, must be the host itself; and one
    that changes something must not come from elsewhere (Fetch Metadata, ``Sec-Fetch-Site``).
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        if allowed is not None and host_name(host) not in allowed:
            raise ApiError(403, "this host is not served here", code="host_not_allowed")
        origin = request.headers.get("Origin")
        site = request.headers.get("Sec-Fetch-Site", "none")
        is_foreign = site not in ("none", "same-origin") and request.method not in ("GET", "HEAD")
        if is_foreign or (origin is not None and origin_host(origin) != host):
            raise ApiError(403, "cross-site request", code="origin_not_allowed")
        return await handler(request)

    return middleware


def check_scope(tokens: Mapping[str, str], scopes: Mapping[web.AbstractRoute, str]) -> Middleware:
    """Let only those pass who may. Where there are no ``tokens``, whoever gets here is an admin.

    What is no route needs a token too: nobody else learns what there is.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        needed = scopes.get(request.match_info.route, INFER)
        scope = _scope(request, tokens) if tokens else ADMIN
        if scope is not None:
            request["scope"] = scope
        elif needed != OPEN:
            headers = {"WWW-Authenticate": 'Bearer realm="aimage"'}
            raise ApiError(
                401, "this worker wants a token", code="invalid_api_key", headers=headers
            )
        if needed != OPEN and scope not in (needed, ADMIN):
            raise ApiError(403, _MAY[scope or INFER], code="insufficient_scope")
        return await handler(request)

    return middleware


def _scope(request: web.Request, tokens: Mapping[str, str]) -> str | None:
    """The scope of the token that a request shows: as a bearer token, or as the password of any
    user (RFC 6750, RFC 7617). All tokens are compared, each in constant time."""
    shown = shown_token(request.headers.get("Authorization", "")).encode("utf-8", "surrogateescape")
    found = None
    for token, scope in tokens.items():
        if hmac.compare_digest(shown, token.encode()):
            found = scope
    return found


def listen_unix(path: Path) -> socket.socket:
    """A listening unix socket that its owner and its group may use, and no one else.

    Its directory is made, for the same two; one that anybody may write to is no place for it.

    Raises:
        UsageError: the place cannot be meant.
        AccessError: it cannot be listened on, or another worker does.
    """
    try:
        path.parent.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        mode = path.parent.stat().st_mode
        if mode & stat.S_IWOTH:
            raise UsageError(
                f"anybody may write to {path.parent}",
                hint="name a socket in a directory of its own: it is made with mode 0750",
            )
        _remove_stale(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o777 & ~_SOCKET_MODE)  # so that it is never open to more, not once
            try:
                listening.bind(str(path))
            finally:
                os.umask(before)
            listening.listen(128)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise AccessError(f"cannot listen on {path}: {error.strerror or error}") from None
    return listening


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on: its worker was killed."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path} is there already, and is no socket")
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno not in (errno.ECONNREFUSED, errno.ENOENT):
                raise
        else:
            raise AccessError(f"another process listens on {path}")
    path.unlink(missing_ok=True)
