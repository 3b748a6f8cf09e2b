"""Where a worker listens, and its life from the first connection to the last."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from aiohttp import web

from clowder_aimage.errors import AccessError, AImageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.registry import Connection
from clowder_aimage.server.idle import Idle
from clowder_aimage.server.serve import is_loopback
from clowder_aimage.worker import notify
from clowder_aimage.worker.access import LOOPBACK_HOSTS, check_address, listen_unix, read_tokens
from clowder_aimage.worker.api import health
from clowder_aimage.worker.app import build_app
from clowder_aimage.worker.engine import Engine
from clowder_aimage.worker.metric import Metrics
from clowder_aimage.worker.news import News
from clowder_aimage.worker.service import Service
from clowder_aimage.worker.settings import Settings
from clowder_aimage.worker.stall import Stalled

HEAD = 16 * 1024  # bytes of a request's line, and of each of its header fields
EXPIRY = 1.0  # seconds between two looks for idle models
LEAVE = 1.0  # seconds that connections get to end in when all work is done

_log = structlog.get_logger("aimage.worker")


@dataclass(slots=True)
class Places:
    """Where the worker listens: the sockets, what clients call them, the hosts they may name."""

    sockets: list[socket.socket] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    hosts: set[str] | None = field(default_factory=lambda: set(LOOPBACK_HOSTS))
    unix: Path | None = None

    def close(self) -> None:
        for each in self.sockets:
            each.close()
        if self.unix is not None:
            self.unix.unlink(missing_ok=True)


def serve(
    settings: Settings,
    store: ImageLayout,
    connection: Connection,
    *,
    on_ready: Callable[[list[str]], None],
) -> None:
    """Serve pictures until SIGINT or SIGTERM.

    ``on_ready`` gets the URLs once connections are accepted (``unix://PATH`` for a socket); port 0
    becomes a free one. What still runs in threads at the end, a download, is not waited for: the
    caller is to leave the process.

    Raises:
        UsageError: an address cannot be meant, or others would reach it unasked.
        AccessError: it cannot be listened on.
    """
    tokens = read_tokens(settings.token_file) if settings.token_file else {}
    places = listen(settings, has_tokens=bool(tokens))
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(_run(settings, store, connection, tokens, places, on_ready))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
        places.close()


def listen(settings: Settings, *, has_tokens: bool) -> Places:
    """The sockets that the settings ask for, or else those that systemd gave. Raises as serve."""
    places = Places()
    try:
        for each in notify.given():
            _add(places, each, has_tokens)
        if not places.sockets and settings.socket:
            places.sockets.append(listen_unix(settings.socket))
            places.names.append(f"unix://{settings.socket}")
            places.unix = settings.socket
        if settings.address and (not places.sockets or settings.addr):
            host, port = check_address(settings.address, has_tokens=has_tokens)
            _add(places, _listen_tcp(host, port), has_tokens)
    except BaseException:
        places.close()
        raise
    if settings.allow_hosts:
        places.hosts = (places.hosts or set(LOOPBACK_HOSTS)) | set(settings.allow_hosts)
    return places


def _add(places: Places, listening: socket.socket, has_tokens: bool) -> None:
    """Take a listening socket in, after a look at who reaches it."""
    places.sockets.append(listening)
    if listening.family == socket.AF_UNIX:
        places.names.append(f"unix://{listening.getsockname()}")
        return
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    check_address(shown, has_tokens=has_tokens)
    places.names.append(f"http://{shown}")
    if not is_loopback(host):
        places.hosts = None
    elif places.hosts is not None:
        places.hosts.add(host)


def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=kind, backlog=128)
    except OSError as error:
        raise AccessError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="is another worker, or ollama, running? --addr names another place",
        ) from None


async def _run(
    settings: Settings,
    store: ImageLayout,
    connection: Connection,
    tokens: Mapping[str, str],
    places: Places,
    on_ready: Callable[[list[str]], None],
) -> None:
    service = make_service(settings, store, connection)
    hosts = None if places.hosts is None else frozenset(places.hosts)
    app = build_app(service, hosts=hosts, tokens=tokens)
    app[health.WANTED], app[health.CLOSING] = settings.wanted, asyncio.Event()
    signals = Signals()
    signals.watch()
    async with (
        _listening(app, places),
        _beside(_expire(service), _beat(), _want(service, settings)),
    ):
        on_ready(places.names)
        notify.notify("READY=1")
        await service.news.tell("ready")
        _log.info("ready", urls=places.names)
        await signals.first.wait()
        notify.notify("STOPPING=1")
        await service.news.tell("drain", grace=settings.grace)
        _log.info("draining", grace=settings.grace, waiting=service.engine.waiting)
        await drain(service.engine, settings.grace, signals.second)
        app[health.CLOSING].set()
    _log.info("stopped")


def make_service(settings: Settings, store: ImageLayout, connection: Connection) -> Service:
    """What the routes stand on."""
    metrics, news = Metrics(), News()
    return Service(
        engine=Engine(store, connection, settings.limits, metrics, news=news),
        store=store,
        connection=connection,
        metrics=metrics,
        news=news,
        aliases=settings.aliases,
        default=settings.default_model,
    )


class Signals:
    """The first wish to end, and the second."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()

    def watch(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.hear)

    def hear(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def drain(engine: Engine, grace: float, now: asyncio.Event) -> None:
    """Take nothing more; let what runs end within ``grace`` seconds, or until ``now``."""
    closing = asyncio.create_task(engine.close(grace))
    hurry = asyncio.create_task(now.wait())
    await asyncio.wait({closing, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not closing.done():
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await engine.close(0)
        return
    closing.result()


@contextlib.asynccontextmanager
async def _listening(app: web.Application, places: Places) -> AsyncIterator[None]:
    """Answer requests; on leaving, connections get a moment to end."""
    clock = asyncio.get_running_loop().time
    idle, stalled = Idle(clock), Stalled(clock)
    app.middlewares.insert(0, idle.middleware)
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,  # a client that leaves ends its request
        shutdown_timeout=LEAVE,
        lingering_time=LEAVE,  # for the rest of a body that was refused
        max_line_size=HEAD,
        max_field_size=HEAD,
    )
    await runner.setup()
    try:
        for each in places.sockets:
            await web.SockSite(runner, each).start()
        assert runner.server is not None  # noqa: S101 - it was set up
        async with _beside(idle.watch(runner.server), stalled.watch(runner.server)):
            yield
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _beside(*works: object) -> AsyncIterator[None]:
    """Have coroutines run meanwhile."""
    tasks = [asyncio.ensure_future(work) for work in works]  # type: ignore[call-overload]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _expire(service: Service) -> None:
    """Let idle models go when their time is over."""
    while True:
        await asyncio.sleep(EXPIRY)
        try:
            await service.engine.expire()
        except Exception:
            _log.exception("cannot let a model go")


async def _beat() -> None:
    """Tell systemd that the loop turns, where it wants to know."""
    period = notify.watchdog()
    while period is not None:
        notify.notify("WATCHDOG=1")
        await asyncio.sleep(period)


async def _want(service: Service, settings: Settings) -> None:
    """Fetch the models that are to be here. What cannot be fetched is said, and readyz says it."""
    for name in settings.wanted:
        reference = Reference.parse(name)
        if reference.registry is None:
            continue
        try:
            async with contextlib.aclosing(service.engine.pull(reference)) as events:
                async for _ in events:
                    pass
        except AImageError as error:
            _log.warning("cannot fetch a wanted model", model=name, reason=error.message)
