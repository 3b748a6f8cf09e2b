"""The lifecycle of a server and the timeouts of its connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any

from aiohttp import web

from clowder_aimage.document.optional_file import report_warnings
from clowder_aimage.errors import AImageError
from clowder_aimage.http import systemd
from clowder_aimage.http.api_error import OPENAI
from clowder_aimage.http.app import build_app
from clowder_aimage.http.background import run_in_background
from clowder_aimage.http.connection import Connection, ConnectionLimit, IdleTimeout
from clowder_aimage.http.listening_socket import BACKLOG, Listeners
from clowder_aimage.http.process_group import Member
from clowder_aimage.http.route import Role
from clowder_aimage.layout.lock import ON_WAIT

# Bytes of a request line and of each header field
MAX_HEADER = 16 * 1024
# Seconds for connections to close after all work is done
LINGER = 1.0
# Seconds within which the client must receive a byte
WRITE = 60.0
# Seconds between two checks
INTERVAL = 1.0
# Seconds between two looks whether a server that started is ready, at first and at most
FIRST_LOOK, LAST_LOOK = 0.25, 4.0

_log = logging.getLogger("aimage.http")


class WriteTimeout:
    """Closes connections whose number of unsent bytes does not decrease."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[web.RequestHandler, tuple[int, float]] = {}

    def check(self, connections: list[web.RequestHandler]) -> None:
        """Close stalled ``connections``; this ends their requests."""
        timestamp, unsent_since = self._clock(), {}
        for connection in connections:
            transport = connection.transport
            unsent = transport.get_write_buffer_size() if transport is not None else 0
            if unsent:
                previous, since = self._since.get(connection, (unsent, timestamp))
                unsent_since[connection] = (unsent, since if previous == unsent else timestamp)
        self._since = unsent_since
        for connection, (_, since) in unsent_since.items():
            if timestamp - since > WRITE and connection.transport is not None:
                connection.transport.abort()


class Signals:
    """Signals for shutdown, for immediate shutdown, and for a reload."""

    def __init__(self) -> None:
        self.first, self.second, self.reload = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def watch(self) -> None:
        """Handle SIGINT, SIGTERM and SIGHUP from now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.receive)
        loop.add_signal_handler(signal.SIGHUP, self.reload.set)

    def watch_parent(self, parent: int) -> None:
        """Request a shutdown once ``parent`` is readable."""
        loop = asyncio.get_running_loop()

        def receive_end() -> None:
            loop.remove_reader(parent)
            self.receive()

        loop.add_reader(parent, receive_end)

    def receive(self) -> None:
        """Record a shutdown request."""
        (self.second if self.first.is_set() else self.first).set()


def serve(
    listeners: Listeners,
    *roles: Role,
    tokens: Mapping[str, str] | None = None,
    grace: float = 0.0,
    interface: str = OPENAI,
    origins: Collection[str] | None = None,
    separate: tuple[Listeners, Role] | None = None,
    advice: Callable[[AImageError], str | None] | None = None,
    on_ready: Callable[[list[str]], object],
    member: Member | None = None,
    **options: Any,
) -> None:
    """Serve the ``roles`` until SIGINT or SIGTERM.

    Threads that are still running, such as downloads, are not joined: the caller must exit the
    process.

    Args:
        listeners: The sockets.
        roles: The roles of the server.
        tokens: The tokens with their scopes.
        grace: Seconds for requests to finish.
        interface: The form of errors outside of the interfaces.
        origins: Allowed origins besides loopback ones; None: only that of the server.
        advice: Return the advice on an error that is sent with it; None: its hint.
        separate: Further sockets, with a role of their own that requires no tokens.
        on_ready: Called with the URLs (``unix://PATH`` for a socket) once connections are accepted;
            the server may become ready later.
        member: The place of this process in a group, which shares the listeners.
        options: Further arguments of aiohttp's AppRunner.
    """
    loop = asyncio.new_event_loop()
    try:
        app = build_app(
            *roles,
            hosts=_list_hosts(listeners),
            tokens=tokens,
            interface=interface,
            origins=origins,
            advice=advice,
        )
        work = _run(app, listeners, roles, separate, grace, on_ready, member, options)
        loop.run_until_complete(work)
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _list_hosts(listeners: Listeners) -> frozenset[str] | None:
    return None if listeners.hosts is None else frozenset(listeners.hosts)


async def _run(
    app: web.Application,
    listeners: Listeners,
    roles: tuple[Role, ...],
    separate: tuple[Listeners, Role] | None,
    grace: float,
    on_ready: Callable[[list[str]], object],
    member: Member | None,
    options: Mapping[str, Any],
) -> None:
    signals = Signals()
    signals.watch()
    if member is not None:
        signals.watch_parent(member.parent)
    # In a server, waits for locks and warnings are logged, not printed for a person
    ON_WAIT.clear()
    report_warnings()
    async with contextlib.AsyncExitStack() as stack:
        # Entered before the listeners: roles end after the last request
        for role in roles:
            await stack.enter_async_context(role.running())
        facts = {"urls": listeners.urls}
        if separate is not None:
            separate_listeners, role = separate
            await stack.enter_async_context(
                accepting(
                    build_app(role, hosts=_list_hosts(separate_listeners)),
                    separate_listeners,
                    are_shared=member is not None,
                )
            )
            facts["apart"] = separate_listeners.urls
        # The other address first: its URL is logged with those of the server
        await stack.enter_async_context(
            accepting(app, listeners, are_shared=member is not None, **options)
        )
        on_ready(listeners.urls)
        await stack.enter_async_context(
            run_in_background(
                _announce_ready(roles, facts), _notify_watchdog(), _reload(signals, roles)
            )
        )
        await signals.first.wait()
        systemd.notify("STOPPING=1")
        for role in roles:
            await role.drain(grace, signals.second)
    _log.info("stopped")


@contextlib.asynccontextmanager
async def accepting(
    app: web.Application, listeners: Listeners, *, are_shared: bool = False, **options: Any
) -> AsyncIterator[None]:
    """Serve requests; on exit, let connections close within a short time.

    Of listeners that ``are_shared`` with other processes, a connection is accepted at a time, so
    that a process which is less busy takes the next one.
    """
    clock = asyncio.get_running_loop().time
    idle, stalled = IdleTimeout(clock), WriteTimeout(clock)
    limit = ConnectionLimit.of_process()
    app.middlewares.insert(0, idle.middleware)
    defaults: dict[str, Any] = {
        # Bodies with a Content-Encoding are refused
        "auto_decompress": False,
        # A disconnected client cancels its request
        "handler_cancellation": True,
        "shutdown_timeout": LINGER,
        # Time to receive and drop the rest of a rejected body
        "lingering_time": LINGER,
        "max_line_size": MAX_HEADER,
        "max_field_size": MAX_HEADER,
    }
    logging.getLogger("aiohttp.server").addFilter(_is_not_disconnect)
    runner = web.AppRunner(app, access_log=None, **(defaults | options))
    await runner.setup()
    server = runner.server
    assert server is not None  # noqa: S101 - it is made by setup
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        for listening in listeners.sockets:
            accepting_server = await asyncio.get_running_loop().create_server(
                lambda: Connection(server(), idle, limit),
                sock=listening,
                backlog=1 if are_shared else BACKLOG,
            )
            stack.callback(accepting_server.close)
            if are_shared:
                # The event loop accepts as many at once as it lets wait
                listening.listen(BACKLOG)
        async with run_in_background(_check_connections(server, idle, stalled)):
            yield


async def _check_connections(server: web.Server, *timeouts: IdleTimeout | WriteTimeout) -> None:
    while True:
        await asyncio.sleep(INTERVAL)
        for timeout in timeouts:
            timeout.check(server.connections)


def _is_not_disconnect(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], ConnectionError))


async def _announce_ready(roles: tuple[Role, ...], facts: Mapping[str, Any]) -> None:
    """Report that the server is ready once it is; until then, why it is not."""
    pause, reported = FIRST_LOOK, None
    while reasons := [reason for role in roles for reason in await role.list_reasons()]:
        # What is there in a moment is not reported
        if reasons != reported and pause > FIRST_LOOK:
            reported = reasons
            described = [" ".join(reason.values()) for reason in reasons]
            _log.info("not ready yet", extra={**facts, "reasons": described})
        systemd.notify(f"EXTEND_TIMEOUT_USEC={4 * LAST_LOOK * 1e6:.0f}")
        systemd.notify(f"STATUS=not ready: {reasons[0]['reason']}")
        await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_LOOK)
    systemd.notify("READY=1")
    if reported:
        systemd.notify("STATUS=ready")
    for role in roles:
        await role.signal_ready()
    _log.info("ready", extra=facts)


async def _notify_watchdog() -> None:
    """Send keep-alives to systemd's watchdog, if any, while the loop is running."""
    period = systemd.read_watchdog_interval()
    while period is not None:
        systemd.notify("WATCHDOG=1")
        await asyncio.sleep(period)


async def _reload(signals: Signals, roles: tuple[Role, ...]) -> None:
    while True:
        await signals.reload.wait()
        signals.reload.clear()
        if not any(role.reload() for role in roles):
            _log.info("reload ignored: settings are read only at startup")
