"""A listening socket for the registry, and its end: the only place that runs the HTTP server."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from clowder_aimage.distribution import request_guard
from clowder_aimage.distribution.registry_app import build_app
from clowder_aimage.errors import AccessError, UsageError
from clowder_aimage.http.idle_timeout import IdleTimeout
from clowder_aimage.layout import ImageLayout

if TYPE_CHECKING:
    from clowder_aimage.distribution.upstream import UpstreamRegistry

GRACE = 5.0  # seconds that requests under way get to end in
READ_BUFFER = 256 * 1024  # bytes of a request's body that may wait for the disk
SHORTEST_TOKEN = 16  # characters


def serve(
    layout: ImageLayout,
    address: str,
    *,
    readonly: bool = False,
    allow_remote: bool = False,
    token: str | None = None,
    upstream: UpstreamRegistry | None = None,
    on_ready: Callable[[str], None],
) -> None:
    """Serve ``layout`` on ``address`` (host:port) until SIGINT or SIGTERM.

    Clients must know ``token`` where there is one. With an ``upstream`` it is a cache of that.
    ``on_ready`` gets the URL once connections are accepted; port 0 becomes a free one.

    Raises:
        UsageError: the address cannot be meant, or is not on this machine.
        AccessError: it cannot be listened on.
    """
    host, port = parse_address(address)
    local = is_loopback(host)
    if not local and not allow_remote and token is None:
        reads = "reads" if readonly or upstream is not None else "reads and writes"
        raise UsageError(
            f"{address} can be reached from other machines, and there is no authentication: "
            f"whoever reaches it {reads} the whole store",
            hint="listen on 127.0.0.1, ask for a token with --token-file, or accept that with "
            "--allow-remote",
        )
    hosts = request_guard.LOOPBACK_HOSTS | {host} if local else None
    app = build_app(layout, readonly=readonly, hosts=hosts, token=token, upstream=upstream)
    asyncio.run(_run(app, host, port, on_ready))


def read_token(path: Path) -> str:
    """The token in a file: its first line.

    Raises:
        UsageError: it cannot be read, or holds no token that is worth the name.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the token in {path}: {error}") from None
    token = lines[0].strip() if lines else ""
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise UsageError(
            f"the first line of {path} is no token",
            hint=f"write {SHORTEST_TOKEN} or more letters and digits there that nobody guesses, "
            "for example: openssl rand -hex 32",
        )
    return token


async def _run(app: web.Application, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    # A body must reach the store as it was sent: content codings are not undone here.
    idle = IdleTimeout(loop.time)
    app.middlewares.insert(0, idle.middleware)
    runner = web.AppRunner(
        app,
        access_log=None,
        auto_decompress=False,
        read_bufsize=READ_BUFFER,
        shutdown_timeout=GRACE / 2,  # waited for twice: to end, then to be cancelled
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise AccessError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        assert runner.server is not None  # noqa: S101 - it was set up
        watch = asyncio.create_task(idle.watch(runner.server))
        on_ready(_url(host, runner.addresses[0][1]))
        await stop.wait()
        watch.cancel()
    finally:
        await runner.cleanup()


def parse_address(address: str) -> tuple[str, int]:
    """``host:port``, ``[v6]:port``; localhost is its IPv4 address, as one port is announced."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(
            f"{address!r} is not an address", hint="write HOST:PORT, such as 127.0.0.1:5000"
        )
    return ("127.0.0.1" if host == "localhost" else host), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. A name that must be looked up is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
