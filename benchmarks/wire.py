"""Simulated links on loopback: each machine of a fleet has an uplink and a downlink of given rates.

A TCP proxy in a separate process, so that its CPU time is not counted for a node; ``wires()``
starts it. It listens on one port for each pair of machines, which identifies the links of a
connection: the uplink of the sender and the downlink of the receiver. All connections of a
machine share its two links piece by piece, in the order of arrival. Latency and loss are not
simulated. It requires no special privileges.

It prints its ports to stdout as JSON, and, for each line on stdin, the bytes transferred so far.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MIB = 1024 * 1024
PIECE = 64 * 1024
LATE = 0.02  # seconds by which a wake-up may be late without lowering the rate
KERNEL_BUFFER = 128 * 1024  # bytes that were sent and are not on a link yet


@dataclass(frozen=True)
class Pair:
    """Connections from one machine to another, which listens at ``port``."""

    client: str
    server: str
    port: int


@dataclass
class Wires:
    """A running proxy; ``ports`` has the port to connect to for each pair."""

    ports: dict[tuple[str, str], int]
    process: subprocess.Popen[str]

    def sent(self) -> dict[tuple[str, str], int]:
        """Return the bytes so far, by sender and receiver."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[tuple[str, str], int] = {}
        for sender, receiver, count in json.loads(self.process.stdout.readline()):
            found[sender, receiver] = found.get((sender, receiver), 0) + count
        return found


@contextlib.contextmanager
def wires(rates: dict[str, tuple[float, float]], pairs: Sequence[Pair]) -> Iterator[Wires]:
    """Run the proxy; ``rates`` are up and down, in bytes a second (0: unlimited)."""
    given = {"rates": rates, "pairs": [[one.client, one.server, one.port] for one in pairs]}
    with subprocess.Popen(
        [sys.executable, __file__, json.dumps(given)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            ports = json.loads(process.stdout.readline())
            yield Wires(
                {(one.client, one.server): at for one, at in zip(pairs, ports, strict=True)},
                process,
            )
        finally:
            process.terminate()


class Wire:
    """One direction of a machine's link."""

    def __init__(self, rate: float) -> None:
        self._rate = rate or math.inf
        self._free = 0.0  # time at which everything queued will have passed

    async def carry(self, count: int) -> None:
        """Wait until this many bytes have passed, after those queued before."""
        now = asyncio.get_running_loop().time()
        self._free = max(self._free, now - LATE) + count / self._rate
        if self._free > now:
            await asyncio.sleep(self._free - now)


class Carrier:
    """The connections of one pair."""

    def __init__(self, pair: Pair, client: tuple[Wire, Wire], server: tuple[Wire, Wire]) -> None:
        self.pair = pair
        self.up = self.down = 0  # bytes to the server, and from it
        self._up, self._down = (client[0], server[1]), (server[0], client[1])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it is closed."""
        try:
            there = await asyncio.open_connection("127.0.0.1", self.pair.port, limit=PIECE)
        except OSError:
            writer.transport.abort()
            return
        for each in (writer, there[1]):
            each.transport.set_write_buffer_limits(high=PIECE)
            _narrow(each.get_extra_info("socket"))
        ways = [self._pump(reader, there[1], True), self._pump(there[0], writer, False)]
        tasks = [asyncio.ensure_future(each) for each in ways]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            is_over = any(task.exception() for task in done)
        finally:
            for task in tasks:
                task.cancel()
        for each in (writer, there[1]):
            each.transport.abort() if is_over else each.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_up: bool
    ) -> None:
        while data := await reader.read(PIECE):
            for wire in self._up if is_up else self._down:
                await wire.carry(len(data))
            if is_up:
                self.up += len(data)
            else:
                self.down += len(data)
            writer.write(data)
            await writer.drain()
        writer.write_eof()


def _narrow(kernel: socket.socket) -> None:
    """Set small socket buffers, so that bytes wait at the sender and not in the kernel."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        kernel.setsockopt(socket.SOL_SOCKET, option, KERNEL_BUFFER)


def _listening() -> socket.socket:
    found = socket.socket()
    _narrow(found)  # before listening: the TCP window depends on it
    found.bind(("127.0.0.1", 0))
    return found


async def serve(rates: dict[str, tuple[float, float]], pairs: Sequence[Pair]) -> None:
    """Forward connections until stdin ends."""
    machines = {name: (Wire(up), Wire(down)) for name, (up, down) in rates.items()}
    carriers, ports, servers = [], [], []
    for pair in pairs:
        carrier = Carrier(pair, machines[pair.client], machines[pair.server])
        listening = _listening()
        servers.append(await asyncio.start_server(carrier.serve, sock=listening, limit=PIECE))
        carriers.append(carrier)
        ports.append(listening.getsockname()[1])
    print(json.dumps(ports), flush=True)
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin
    )
    while await stdin.readline():
        counts = [(one.pair.client, one.pair.server, one.up) for one in carriers]
        counts += [(one.pair.server, one.pair.client, one.down) for one in carriers]
        print(json.dumps(counts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("given", help="rates and pairs, as JSON")
    given = json.loads(parser.parse_args().given)
    asyncio.run(serve(given["rates"], [Pair(*each) for each in given["pairs"]]))


if __name__ == "__main__":
    main()
