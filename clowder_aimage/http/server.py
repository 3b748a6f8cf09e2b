"""Where a worker listens, and its life from the first connection to the last."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog
from aiohttp import web

from clowder_aimage.api import health
from clowder_aimage.api.service import Service
from clowder_aimage.distribution.registry_server import is_loopback
from clowder_aimage.engine.engine import Engine, EngineLimits
from clowder_aimage.engine.event_log import EventLog
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.preload import want
from clowder_aimage.engine.settings import Listening, Settings
from clowder_aimage.engine.transfer_queue import TransferQueue
from clowder_aimage.errors import AccessError
from clowder_aimage.http import systemd
from clowder_aimage.http.access import LOOPBACK_HOSTS, check_address, listen_unix, read_tokens
from clowder_aimage.http.app import all_routes, build_app, store_routes
from clowder_aimage.http.idle_timeout import IdleTimeout
from clowder_aimage.http.shutdown import Signals, beside, drain
from clowder_aimage.http.write_timeout import WriteTimeout
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.daemon import Daemon
from clowder_aimage.node.node_settings import NodeSettings
from clowder_aimage.registry import ClientOptions

HEAD = 16 * 1024  # bytes of a request's line, and of each of its header fields
EXPIRY = 1.0  # seconds between two looks for idle models
LEAVE = 1.0  # seconds that connections get to end in when all work is done

_log = structlog.get_logger("aimage.worker")


@dataclass(slots=True)
class ListenAddresses:
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
    settings: Listening,
    store: ImageLayout,
    connection: ClientOptions,
    *,
    node: NodeSettings | None = None,
    on_ready: Callable[[list[str]], None],
) -> None:
    """Serve until SIGINT or SIGTERM: pictures where ``settings`` are a worker's, and be a ``node``
    where that is set up.

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
        service = make_service(settings, store, connection)
        daemon = Daemon(service, node, tokens, ca_file=connection.ca_file) if node else None
        loop.run_until_complete(_run(settings, service, daemon, tokens, places, on_ready))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
        places.close()


def listen(settings: Listening, *, has_tokens: bool) -> ListenAddresses:
    """The sockets that the settings ask for, or else those that systemd gave. Raises as serve."""
    places = ListenAddresses()
    try:
        for each in systemd.given():
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


def _add(places: ListenAddresses, listening: socket.socket, has_tokens: bool) -> None:
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
    settings: Listening,
    service: Service,
    daemon: Daemon | None,
    tokens: Mapping[str, str],
    places: ListenAddresses,
    on_ready: Callable[[list[str]], None],
) -> None:
    hosts = None if places.hosts is None else frozenset(places.hosts)
    is_worker = isinstance(settings, Settings)
    routes = all_routes(service) if is_worker else store_routes(service)
    app = build_app(
        service,
        hosts=hosts,
        tokens=tokens,
        routes=[*routes, *(daemon.routes() if daemon else [])],
    )
    wanted = settings.wanted if isinstance(settings, Settings) else ()
    app[health.WANTED] = wanted
    if daemon is not None:
        app[health.MISSING] = daemon.node.missing
        app[health.AGAINST], app[health.WARNINGS] = daemon.node.against, daemon.node.warnings
    app[health.CLOSING] = asyncio.Event()
    signals = Signals()
    signals.watch()
    async with (
        _listening(app, places),
        daemon.running() if daemon else contextlib.nullcontext(),
        beside(_expire(service), _beat(), want(service.transfers, wanted), _heed(signals, daemon)),
    ):
        on_ready(places.names)
        systemd.notify("READY=1")
        await service.news.tell("ready")
        _log.info("ready", urls=places.names)
        await signals.first.wait()
        systemd.notify("STOPPING=1")
        await service.news.tell("drain", grace=settings.grace)
        _log.info("draining", grace=settings.grace, waiting=service.engine.waiting)
        await drain(service.engine, settings.grace, signals.second)
        app[health.CLOSING].set()
    _log.info("stopped")


def make_service(settings: Listening, store: ImageLayout, connection: ClientOptions) -> Service:
    """What the routes stand on."""
    metrics, news = Metrics(), EventLog()
    transfers = TransferQueue(store, connection, metrics, news)
    limits = settings.limits if isinstance(settings, Settings) else EngineLimits()
    service = Service(
        engine=Engine(store, transfers, limits, metrics, news=news),
        transfers=transfers,
        store=store,
        connection=connection,
        metrics=metrics,
        news=news,
    )
    if not isinstance(settings, Settings):
        return service
    return replace(
        service,
        aliases=settings.aliases,
        default=settings.default_model,
        pull=settings.pull,
        stream_format=settings.stream_format,
        facts=settings.png_facts,
        public_url=settings.public_url,
    )


@contextlib.asynccontextmanager
async def _listening(app: web.Application, places: ListenAddresses) -> AsyncIterator[None]:
    """Answer requests; on leaving, connections get a moment to end."""
    clock = asyncio.get_running_loop().time
    idle, stalled = IdleTimeout(clock), WriteTimeout(clock)
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
        async with beside(idle.watch(runner.server), stalled.watch(runner.server)):
            yield
    finally:
        await runner.cleanup()


async def _expire(service: Service) -> None:
    """Let idle models go when their time is over."""
    while True:
        await asyncio.sleep(EXPIRY)
        try:
            await service.engine.expire()
            service.transfers.look()
        except Exception:
            _log.exception("cannot let a model go")


async def _beat() -> None:
    """Tell systemd that the loop turns, where it wants to know."""
    period = systemd.watchdog()
    while period is not None:
        systemd.notify("WATCHDOG=1")
        await asyncio.sleep(period)


async def _heed(signals: Signals, daemon: Daemon | None) -> None:
    """Read again what can be read again, whenever that is asked for."""
    while True:
        await signals.reload.wait()
        signals.reload.clear()
        if daemon is not None:
            _log.info("reading the desired state again")
            daemon.node.wake(reload=True)
        else:
            _log.info("nothing is read again: a worker's settings count from its start on")
