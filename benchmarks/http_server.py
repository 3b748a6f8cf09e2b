"""Measure candidate HTTP servers for the registry and the worker API.

Run `python -m benchmarks.http_server` (about two minutes, 2 GiB of disk in --directory). Each
round restarts every candidate, so that cold start and peak memory are measured as often as
throughput, and rounds are interleaved, so that load on the machine affects all candidates alike.
Candidates whose packages are not installed are skipped, and so is docker-registry if its program
is missing. The table on stdout has medians. Linux only: memory is read from /proc.
"""

import argparse
import asyncio
import hashlib
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

SMALL = 256 * 1024
SMALL_REQUESTS = 400
CONNECTIONS = 8
PIECE = 1024 * 1024

# candidate -> the distributions to list in pyproject.toml
CANDIDATES = {
    "aiohttp": ["aiohttp"],
    "starlette-granian": ["starlette", "granian"],
    "starlette-uvicorn": ["starlette", "uvicorn"],
    "starlette-uvicorn-httptools": ["starlette", "uvicorn", "httptools", "uvloop"],
}


# ---------------------------------------------------------------- the same service, three times


class Sink:
    """Hash an upload and write it to disk, a MiB at a time, off the event loop."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb", buffering=0)
        self.hash = hashlib.sha256()
        self.pieces: list[bytes] = []
        self.held = 0

    async def feed(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.held += len(piece)
        if self.held >= PIECE:
            await self.flush()

    async def flush(self) -> None:
        data = b"".join(self.pieces)
        self.pieces, self.held = [], 0
        await asyncio.to_thread(self._write, data)

    def _write(self, data: bytes) -> None:
        self.hash.update(data)
        self.file.write(data)

    async def close(self) -> str:
        await self.flush()
        self.file.close()
        return self.hash.hexdigest()


class Ticks:
    """An endless event stream that counts how often clients disconnect."""

    def __init__(self) -> None:
        self.closed = 0

    async def events(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: tick\n\n"
                await asyncio.sleep(0.01)
        finally:
            self.closed += 1


def serve_aiohttp(root: Path, port: int) -> None:
    from aiohttp import web

    ticks = Ticks()

    async def ping(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def get(request: web.Request) -> web.FileResponse:
        return web.FileResponse(root / request.match_info["name"])

    async def put(request: web.Request) -> web.Response:
        sink = Sink(root / request.match_info["name"])
        async for piece in request.content.iter_any():
            await sink.feed(piece)
        return web.Response(text=await sink.close())

    async def sse(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events = ticks.events()
        try:
            async for event in events:
                await response.write(event)
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        return response

    async def closed(_: web.Request) -> web.Response:
        return web.Response(text=str(ticks.closed))

    app = web.Application(client_max_size=0)
    app.add_routes(
        [
            web.get("/", ping),
            web.get("/sse", sse),
            web.get("/closed", closed),
            web.get("/b/{name}", get),
            web.put("/b/{name}", put),
        ]
    )
    asyncio.run(
        _run_aiohttp(
            web.AppRunner(
                app,
                access_log=None,
                handler_cancellation=True,
                read_bufsize=PIECE // 4,
                handle_signals=True,
            ),
            port,
        )
    )


async def _run_aiohttp(runner: Any, port: int) -> None:
    from aiohttp import web

    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        await asyncio.Event().wait()
    except web.GracefulExit:
        await runner.cleanup()


def starlette_app(root: Path | None = None) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import FileResponse, PlainTextResponse, StreamingResponse
    from starlette.routing import Route

    directory = root or Path(os.environ["BENCHMARK_ROOT"])
    ticks = Ticks()

    async def ping(_: Request) -> PlainTextResponse:
        return PlainTextResponse("ok")

    async def get(request: Request) -> FileResponse:
        return FileResponse(directory / request.path_params["name"])

    async def put(request: Request) -> PlainTextResponse:
        sink = Sink(directory / request.path_params["name"])
        async for piece in request.stream():
            await sink.feed(piece)
        return PlainTextResponse(await sink.close())

    async def sse(_: Request) -> StreamingResponse:
        return StreamingResponse(ticks.events(), media_type="text/event-stream")

    async def closed(_: Request) -> PlainTextResponse:
        return PlainTextResponse(str(ticks.closed))

    return Starlette(
        routes=[
            Route("/", ping),
            Route("/sse", sse),
            Route("/closed", closed),
            Route("/b/{name}", get, methods=["GET"]),
            Route("/b/{name}", put, methods=["PUT"]),
        ]
    )


def serve_granian(root: Path, port: int) -> None:
    from granian import Granian
    from granian.constants import Interfaces

    os.environ["BENCHMARK_ROOT"] = str(root)
    Granian(
        "benchmarks.http_server:starlette_app",
        port=port,
        interface=Interfaces.ASGI,
        factory=True,
        log_enabled=False,
        websockets=False,
        working_dir=Path(__file__).parents[1],
    ).serve()


def serve_uvicorn(root: Path, port: int, http: str = "h11", loop: str = "asyncio") -> None:
    import uvicorn

    uvicorn.run(
        starlette_app(root), port=port, log_level="error", access_log=False, http=http, loop=loop
    )


def serve(candidate: str, root: Path, port: int) -> None:
    if candidate == "aiohttp":
        serve_aiohttp(root, port)
    elif candidate == "starlette-granian":
        serve_granian(root, port)
    elif candidate == "starlette-uvicorn":
        serve_uvicorn(root, port)
    else:
        serve_uvicorn(root, port, "httptools", "uvloop")


# ---------------------------------------------------------------- a lightweight client


class Client:
    """One keep-alive connection; bodies are received into a reused buffer."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.buffer = memoryview(bytearray(PIECE))

    def request(self, method: str, path: str, body_size: int = 0) -> tuple[int, dict[str, str]]:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {body_size}\r\n\r\n"
        self.socket.sendall(head.encode())
        for offset in range(0, body_size, PIECE):
            self.socket.sendall(self.buffer[: min(PIECE, body_size - offset)])
        return self._head()

    def _head(self) -> tuple[int, dict[str, str]]:
        self.received = b""
        while b"\r\n\r\n" not in self.received:
            piece = self.socket.recv(PIECE)
            if not piece:
                raise ConnectionError("closed before the head of a response")
            self.received += piece
        head, _, self.received = self.received.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        return int(lines[0].split(" ")[1]), headers

    def read(self, size: int) -> bytes:
        """Read `size` bytes of the body; return only those received with the headers."""
        left = size - len(self.received)
        while left:
            count = self.socket.recv_into(self.buffer, min(left, PIECE))
            if not count:
                raise ConnectionError("closed inside a body")
            left -= count
        return self.received

    def get(self, path: str) -> int:
        status, headers = self.request("GET", path)
        if status != 200:
            raise ConnectionError(f"GET {path}: {status}")
        size = int(headers["content-length"])
        self.read(size)
        return size


def text_of(port: int, path: str) -> str:
    from urllib.request import urlopen

    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
        return str(response.read().decode())


# ---------------------------------------------------------------- measurements


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def small_gets(port: int, path: str) -> None:
    def take() -> None:
        client = Client(port)
        for _ in range(SMALL_REQUESTS // CONNECTIONS):
            client.get(path)

    threads = [threading.Thread(target=take) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def put_large(port: int, size: int) -> None:
    client = Client(port)
    status, headers = client.request("PUT", "/b/upload", size)
    if status != 200:
        raise ConnectionError(f"PUT: {status}")
    client.read(int(headers["content-length"]))


def cancel_seconds(port: int) -> float:
    """Close an event stream; return the seconds until its generator was closed (inf: over 5 s)."""
    before = int(text_of(port, "/closed"))
    client = Client(port)
    client.request("GET", "/sse")
    client.socket.recv(100)
    client.socket.close()
    start = time.perf_counter()
    while time.perf_counter() - start < 5:
        if int(text_of(port, "/closed")) > before:
            return time.perf_counter() - start
        time.sleep(0.002)
    return float("inf")


def process_tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid] + [each for child in children for each in process_tree(int(child))]


def peak_mib(pid: int) -> float:
    total = 0
    for each in process_tree(pid):
        match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{each}/status").read_text())
        total += int(match.group(1)) if match else 0
    return total / 1024


def wait_ready(port: int, process: subprocess.Popen[bytes], path: str = "/") -> None:
    for _ in range(4000):
        try:
            if Client(port).request("GET", path)[0] == 200:
                return
        except OSError:
            if process.poll() is not None:
                raise
            time.sleep(0.005)
    raise TimeoutError(f"nothing answers on port {port}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measure(candidate: str, root: Path, mib: int) -> dict[str, float]:
    port = free_port()
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.http_server", "--serve", candidate]
    command += [str(root), str(port)]
    process = subprocess.Popen(command)
    try:
        wait_ready(port, process)
        figures = {"cold start s": time.perf_counter() - start}
        figures["idle RSS MiB"] = peak_mib(process.pid)
        figures[f"GET {mib} MiB s"] = timed(lambda: Client(port).get("/b/large"))
        figures["400 GET 256 KiB s"] = timed(lambda: small_gets(port, "/b/small"))
        figures["peak RSS after GET MiB"] = peak_mib(process.pid)
        figures[f"PUT {mib} MiB s"] = timed(lambda: put_large(port, mib * PIECE))
        figures["SSE cancel ms"] = cancel_seconds(port) * 1000
        figures["peak RSS MiB"] = peak_mib(process.pid)
        return figures
    finally:
        stop(process)
        (root / "upload").unlink(missing_ok=True)


def measure_peer(root: Path, blobs: dict[str, str], mib: int) -> dict[str, float]:
    """Measure the same GETs from docker-registry, with the blobs written to its tree beforehand."""
    port = free_port()
    config = root / "registry.yml"
    config.write_text(
        "version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\n"
        f"storage: {{filesystem: {{rootdirectory: {root}/registry}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    start = time.perf_counter()
    process = subprocess.Popen(
        ["docker-registry", "serve", str(config)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_ready(port, process, "/v2/")
        figures = {"cold start s": time.perf_counter() - start}
        figures["idle RSS MiB"] = peak_mib(process.pid)
        large, small = (f"/v2/b/blobs/sha256:{blobs[name]}" for name in ("large", "small"))
        figures[f"GET {mib} MiB s"] = timed(lambda: Client(port).get(large))
        figures["400 GET 256 KiB s"] = timed(lambda: small_gets(port, small))
        figures["peak RSS after GET MiB"] = peak_mib(process.pid)
        return figures
    finally:
        stop(process)


def lay_down(root: Path, mib: int) -> dict[str, str]:
    """Write the two blobs, and link them into a docker-registry tree."""
    digests = {}
    for name, size in (("large", mib * PIECE), ("small", SMALL)):
        hasher = hashlib.sha256()
        with (root / name).open("wb") as file:
            for _ in range(max(1, size // PIECE)):
                piece = os.urandom(min(size, PIECE))
                hasher.update(piece)
                file.write(piece)
        digest = digests[name] = hasher.hexdigest()
        tree = root / "registry/docker/registry/v2"
        blob = tree / "blobs/sha256" / digest[:2] / digest / "data"
        link = tree / "repositories/b/_layers/sha256" / digest / "link"
        for path in (blob, link):
            path.parent.mkdir(parents=True)
        os.link(root / name, blob)
        link.write_text(f"sha256:{digest}")
    return digests


# ---------------------------------------------------------------- the cost of an install


def requirements(names: list[str]) -> set[str]:
    """Return the distributions that installing `names` requires, including themselves."""
    found: set[str] = set()
    queue = list(names)
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or []:
            if _applies(line):
                queue.append(re.split(r"[\s<>=!~;\[(]", line, maxsplit=1)[0])
    return found


def _applies(line: str) -> bool:
    marker = line.partition(";")[2]
    if "extra ==" in marker:
        return False
    try:
        metadata.distribution(re.split(r"[\s<>=!~;\[(]", line, maxsplit=1)[0])
    except metadata.PackageNotFoundError:
        return False
    return True


def install_mib(names: set[str]) -> float:
    files = [file for name in names for file in metadata.files(name) or []]
    sources = (Path(str(file.locate())) for file in files if not str(file).endswith(".pyc"))
    return sum(path.stat().st_size for path in sources if path.is_file()) / 2**20


def import_seconds(modules: str) -> float:
    program = (
        f"import time; s = time.perf_counter(); import {modules}; print(time.perf_counter()-s)"
    )
    return float(subprocess.check_output([sys.executable, "-c", program]))


IMPORTS = {
    "aiohttp": "aiohttp.web",
    "starlette-granian": "granian, starlette.applications, starlette.responses",
    "starlette-uvicorn": "uvicorn, starlette.applications, starlette.responses",
    "starlette-uvicorn-httptools": "uvicorn, starlette.applications, starlette.responses",
}


# ---------------------------------------------------------------- the program


def run(rounds: int, mib: int, directory: Path) -> dict[str, dict[str, list[float]]]:
    results: dict[str, dict[str, list[float]]] = {}
    blobs = lay_down(directory, mib)
    names = [
        name for name, needs in CANDIDATES.items() if all(util.find_spec(each) for each in needs)
    ]
    for number in range(rounds):
        for name in names:
            print(f"round {number + 1}: {name}", file=sys.stderr)
            figures = measure(name, directory, mib)
            figures["import s"] = import_seconds(IMPORTS[name])
            record(results, name, figures)
        if shutil.which("docker-registry"):
            record(results, "docker-registry", measure_peer(directory, blobs, mib))
    for name in names:
        wanted = requirements(CANDIDATES[name])
        record(results, name, {"packages": len(wanted), "install MiB": install_mib(wanted)})
    return results


def record(
    results: dict[str, dict[str, list[float]]], name: str, figures: dict[str, float]
) -> None:
    for key, value in figures.items():
        results.setdefault(name, {}).setdefault(key, []).append(value)


def print_table(results: dict[str, dict[str, list[float]]]) -> None:
    rows = list(dict.fromkeys(key for figures in results.values() for key in figures))
    print("| |", " | ".join(results), "|")
    print("|---|" + "---|" * len(results))
    for row in rows:
        cells = [
            f"{statistics.median(figures[row]):.3g}" if row in figures else "-"
            for figures in results.values()
        ]
        print(f"| {row} |", " | ".join(cells), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512, help="of the large blob")
    parser.add_argument("--directory", type=Path, help="where the blobs are written")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        candidate, root, port = arguments.serve
        serve(candidate, Path(root), int(port))
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        print_table(run(arguments.rounds, arguments.mib, Path(scratch)))


if __name__ == "__main__":
    main()
