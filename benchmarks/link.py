"""A simulated link on loopback between a client and a server: limits the rate, or only counts.

    python -m benchmarks.link HOST:PORT [--rate MIB_PER_S] [--round-trip MS] [--shared]

A TCP proxy in a separate process, so that its CPU time is not the client's; ``link()`` starts it.
It prints the host:port that it listens on. On SIGUSR1, and at exit (SIGTERM, SIGINT), it prints a
line of JSON with ``connections``, ``up`` (bytes to the server) and ``down`` (bytes from the server,
including response headers).

Each connection is a separate link, or all share one with ``--shared``. Each direction of a link is
limited to ``--rate``; excess bytes are queued. Bytes are delivered half a round trip later,
regardless of the number in flight (the link is a pipe, not stop-and-wait). A new connection takes a
round trip before its first byte, like a TCP handshake; TCP slow start is not simulated. Buffers are
bounded: a slow reader slows the writer. A rate of 0, the default, is unlimited.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MIB = 1024 * 1024
PIECE = 64 * 1024
AHEAD = 0.010  # seconds of data that a direction may queue: covers a late wake-up
KERNEL_BUFFER = 256 * 1024
BUFFER = memoryview(bytearray(PIECE))  # shared: received data are copied before the next read


@dataclass
class Link:
    """The link between all clients and ``host``:``port``, with counters."""

    host: str
    port: int
    rate: float = math.inf  # bytes a second, per direction and connection
    round_trip: float = 0.0  # seconds
    is_shared: bool = False  # by all connections
    free: dict[bool, float] = field(default_factory=dict)  # by direction: when it will be idle
    connections: int = 0
    up: int = 0
    down: int = 0

    @property
    def delay(self) -> float:
        return self.round_trip / 2

    @property
    def most(self) -> int:
        """Return the maximum bytes buffered per direction: those in flight, and some more."""
        return MIB + (0 if math.isinf(self.rate) else int(self.rate * self.delay))

    def count(self, size: int, up: bool) -> None:
        if up:
            self.up += size
        else:
            self.down += size

    def report(self) -> None:
        names = ("connections", "up", "down")
        print(json.dumps({name: getattr(self, name) for name in names}), flush=True)


@dataclass
class Through:
    """A running link, reached at ``host`` (host:port)."""

    host: str
    process: subprocess.Popen[str]

    def sent(self) -> int:
        """Return the bytes sent by the server so far."""
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGUSR1)
        return int(json.loads(self.process.stdout.readline())["down"])


@contextlib.contextmanager
def link(
    upstream: str, rate: float = 0, delay: float = 0, *, shared: bool = False
) -> Iterator[Through]:
    """Run a link to ``upstream``: bytes a second (0: unlimited), seconds in each direction."""
    limits = ["--rate", str(rate / MIB), "--round-trip", str(delay * 2000)]
    limits += ["--shared"] if shared else []
    with subprocess.Popen(
        [sys.executable, __file__, upstream, *limits], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield Through(process.stdout.readline().strip(), process)
        finally:
            process.terminate()
            process.wait()  # before its stdout is closed, where it prints the last line


class End(asyncio.BufferedProtocol):
    """One end of a connection; received data are written to ``other``, delayed and limited."""

    def __init__(self, link: Link, other: End | None = None) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._is_client = other is None
        self.other = other or End(link, self)
        self.transport: asyncio.Transport | None = None
        self._queue: deque[tuple[float, bytes]] = deque()  # due time and data; b"" is the end
        self._held = 0
        self._free = 0.0  # time at which the direction will be idle
        self._blocked = False  # the other end is not reading for now
        self._ended = False  # all data and the end were written to the other end
        self._reads = True
        self._over = False  # no more data will be received
        self._wakes: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=0)
        kernel = transport.get_extra_info("socket")
        kernel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BUFFER)
        kernel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BUFFER)
        if self._is_client:
            self._link.connections += 1
            self._free = self._loop.time() + self._link.round_trip
            transport.pause_reading()
            self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        assert self.transport is not None
        try:
            link = self._link
            await self._loop.create_connection(lambda: self.other, link.host, link.port)
        except OSError:
            self.transport.abort()
        else:
            self.transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self._link.count(nbytes, self._is_client)
        self._held += nbytes
        free = self._link.free if self._link.is_shared else {}
        self._free = max(self._loop.time(), self._free, free.get(self._is_client, 0.0))
        self._free += nbytes / self._link.rate
        free[self._is_client] = self._free
        self._queue.append((self._free + self._link.delay, bytes(BUFFER[:nbytes])))
        self._go_on()

    def eof_received(self) -> bool:
        self._over = True
        self._free = max(self._loop.time(), self._free)
        self._queue.append((self._free + self._link.delay, b""))
        self._go_on()
        return True  # the other direction may continue

    def pause_writing(self) -> None:
        self.other._blocked = True

    def resume_writing(self) -> None:
        self.other._blocked = False
        self.other._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._wakes is not None:
            self._wakes.cancel()
        self._queue.clear()
        if self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.abort()

    def _go_on(self) -> None:
        """Write the data that are due, and schedule the next wake-up."""
        assert self.transport is not None
        if self._wakes is not None:
            self._wakes.cancel()
            self._wakes = None
        now = self._loop.time()
        while self._queue and not self._blocked and self._queue[0][0] <= now:
            self._write(self._queue.popleft()[1])
        busy = self._free - now > AHEAD
        self._read(not busy and self._held < self._link.most)
        times = [self._queue[0][0]] if self._queue and not self._blocked else []
        if busy:
            times.append(self._free - AHEAD / 2)
        if times and not self.transport.is_closing():
            self._wakes = self._loop.call_at(min(times), self._go_on)

    def _read(self, wanted: bool) -> None:
        assert self.transport is not None
        if wanted != self._reads and not self._over and not self.transport.is_closing():
            self._reads = wanted
            (self.transport.resume_reading if wanted else self.transport.pause_reading)()

    def _write(self, data: bytes) -> None:
        there = self.other.transport
        assert there is not None and self.transport is not None
        self._held -= len(data)
        if data:
            there.write(data)
        elif self.other._ended:
            there.close()
            self.transport.close()
        else:
            self._ended = True
            there.write_eof()


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignore asyncio's reports of reset connections: both ends have handled them."""
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)


async def serve(link: Link) -> None:
    """Forward connections until terminated."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(_complain)
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, link.report)
    server = await loop.create_server(lambda: End(link), "127.0.0.1", 0, backlog=256)
    print(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await stop.wait()
    server.close()
    link.report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", metavar="HOST:PORT")
    parser.add_argument("--rate", type=float, default=0.0, help="MiB/s of each connection")
    parser.add_argument("--round-trip", type=float, default=0.0, help="milliseconds")
    parser.add_argument("--shared", action="store_true", help="by all connections")
    options = parser.parse_args()
    host, _, port = options.server.rpartition(":")
    rate = options.rate * MIB or math.inf
    asyncio.run(serve(Link(host, int(port), rate, options.round_trip / 1000, options.shared)))


if __name__ == "__main__":
    main()
