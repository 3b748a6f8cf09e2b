"""Compare pull and push with other tools, against docker-registry on loopback, in one run.

    python -m benchmarks.transfer [--pull] [--push] [--link] [--delta] [--quota 40]
        [--shapes SHAPE,...] [--rounds 5] [--peers skopeo,oras-py,oras,crane]
        [--server docker-registry|registry|static|aimage] [--tls] [--directory DIR]

Each option prints a table; the default is ``--pull``. ``shapes.py`` defines the shapes,
``peers.py`` the commands.

--pull   into an empty directory. The time of aimage includes its fsyncs; other tools do not sync
         their writes, so their time includes a ``sync -f`` of the target; the column "unsynced" is
         without it.
--link   the same through ``link.py``: 20 MiB/s per connection, a round trip of 40 ms.
--push   into an empty registry.
--delta  v1, then v2 into the same directory, through ``link.py`` without limits: all bytes that the
         registry sends for v2, including headers and the manifest, by the size of v2.
--quota  a push and a pull of aimage with the registry of ``quota.py``, which accepts that many
         requests a second: the time by the ideal one, accepted requests by the quota.

Rounds are interleaved; the tables show medians, and the ratios to the least of the other tools
(curl, which sends no manifest, counts only without another one). Needs docker-registry, skopeo and
curl, and a few GiB in ``--directory``, where the shapes are kept for the next run.
``--server registry`` is the program of distribution v3, and ``aimage`` is ``registry serve``.
``static`` is nginx with ``nginx.conf`` and the files of a layout, which costs the least: it is for
pulls only. With ``--tls`` docker-registry or distribution has a certificate, whose authority the
tools read from SSL_CERT_FILE (aimage: ``--ca-file``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import peers, quota, shapes
from benchmarks.link import link

LIMITS = (20 * shapes.MIB, 0.020)  # bytes a second, seconds in each direction
SHAPES = {"pull": "a,b,c", "link": "1g,c", "push": "a,b,c", "delta": "c"}


@dataclass
class Cost:
    """Wall and client CPU in seconds, peak resident memory in MiB; ``unsynced`` is without sync."""

    wall: float
    unsynced: float
    cpu: float
    rss: float


Rows = dict[str, dict[str, list[Cost]]]


@dataclass
class Run:
    """The options of the command line."""

    directory: Path
    peers: list[str]
    rounds: int
    server: str = "docker-registry"
    # The file of the authority of the registry's certificate.
    authority: Path | None = None

    @property
    def target(self) -> Path:
        return self.directory / "target"

    @property
    def suffix(self) -> str:
        """The end of the title of a table."""
        return " over TLS" if self.authority else ""

    def clear(self) -> None:
        """Empty the target, and flush pending writes."""
        shutil.rmtree(self.target, ignore_errors=True)
        os.sync()


def measure(command: list[str], then: Callable[[], None] = lambda: None) -> Cost:
    """Run a command, followed by ``then`` to make its result durable."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    unsynced = time.perf_counter() - begun
    then()
    wall = time.perf_counter() - begun
    if process.returncode:
        sys.exit(f"{' '.join(command)[:300]} failed: {said.decode()[-500:]}")
    return Cost(wall, unsynced, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def free_host() -> str:
    """Return a host and a port that no program uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def registry(
    root: Path, program: str = "docker-registry", authority: Path | None = None
) -> AbstractContextManager[str]:
    """Run a registry over ``root``; the context is its host:port.

    With the file of an ``authority``, its certificate and key are beside that.
    """
    host = free_host()
    if program == "aimage":
        command = [peers.AIMAGE, "-q", "--store", str(root), "registry", "serve", "--addr", host]
        return running(command, host)
    http: dict[str, Any] = {"addr": host}
    if authority is not None:
        pair = authority.with_name("server.pem"), authority.with_name("server.key")
        http["tls"] = dict(zip(("certificate", "key"), map(str, pair), strict=True))
    config = {
        "version": 0.1,
        "log": {"accesslog": {"disabled": True}, "level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(root)}},
        "http": http,
    }
    path = root.with_suffix(".yml")
    path.write_text(json.dumps(config))
    return running([program, "serve", str(path)], host)


def create_authority(directory: Path) -> Path:
    """Create an authority, and a certificate of 127.0.0.1 beside it; return the authority's."""
    import trustme

    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(directory / "server.key"))
    # The same file, with each certificate of the chain after the last one.
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(directory / "server.pem"), append=True)
    path = directory / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


def static(directory: Path, chosen: list[str]) -> AbstractContextManager[str]:
    """Run nginx over the layouts of these shapes; the context is its host:port."""
    host, root = free_host(), directory / "static"
    root.mkdir(exist_ok=True)
    for shape in chosen:
        layout = shapes.make_layout(directory, shape)
        [entry] = json.loads((layout / "index.json").read_text())["manifests"]
        shutil.copy(shapes.blob_path(layout, entry), root / f"manifest-{shape}")
    path = root / "nginx.conf"
    text = Path(__file__).with_name("nginx.conf").read_text()
    path.write_text(text.replace("@HOST@", host).replace("@DIRECTORY@", str(directory)))
    return running(["nginx", "-c", str(path), "-p", str(root)], host)


@contextlib.contextmanager
def running(command: list[str], host: str) -> Iterator[str]:
    """Run a server that listens on ``host``, and yield that once it does."""
    address, _, port = host.rpartition(":")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(500):
                with contextlib.suppress(OSError):
                    socket.create_connection((address, int(port)), timeout=1).close()
                    break
                time.sleep(0.02)
            yield host
        finally:
            process.terminate()


def pulls(run: Run, chosen: list[str], limits: tuple[float, float] | None = None) -> None:
    """Print the table of pulls; with ``limits``, through the link."""
    rows: Rows = {}
    with contextlib.ExitStack() as stack:
        if run.server == "static":
            host = stack.enter_context(static(run.directory, chosen))
        else:
            root = run.directory / run.server
            with registry(root, run.server) as filled:
                for shape in chosen:
                    layout = shapes.make_layout(run.directory, shape)
                    shapes.ensure_pushed(layout, f"bench/{shape}:v1", filled)
            host = stack.enter_context(registry(root, run.server, run.authority))
        if limits:
            host = stack.enter_context(link(host, *limits)).host
        for _ in range(run.rounds):
            for shape in chosen:
                name = f"{host}/bench/{shape}:v1"
                commands = peers.pull_commands(run.peers, name, run.target, run.authority)
                for tool, command in commands.items():
                    run.clear()
                    cost = _pull(run, tool, command)
                    rows.setdefault(shape, {}).setdefault(tool, []).append(cost)
                    _check(run.target, sum(shapes.sizes(shape)))
    run.clear()
    where = "" if run.server == "docker-registry" else f" from {run.server}"
    _print(("pull through the link" if limits else "pull") + where + run.suffix, rows)


def pushes(run: Run, chosen: list[str]) -> None:
    """Print the table of pushes."""
    rows: Rows = {}
    root, work = run.directory / "empty", run.directory / "curl"
    for _ in range(run.rounds):
        for shape in chosen:
            layout, name = shapes.make_layout(run.directory, shape), f"bench/{shape}:v1"
            theirs = [peers.PUSHES[peer] for peer in run.peers if peer in peers.PUSHES]
            # The commands of curl need HTTP, and URLs as locations.
            has_curl = run.authority is None and run.server != "aimage"
            for tool in (*([peers.PUSH_CURL] if has_curl else []), *theirs, peers.PUSH):
                for path in (root, work):
                    shutil.rmtree(path, ignore_errors=True)
                work.mkdir()
                os.sync()
                with registry(root, run.server, run.authority) as host:
                    if tool in theirs:
                        commands = peers.push_commands(run.peers, layout, name, host, run.authority)
                        cost = measure(commands[tool])
                    elif tool == peers.PUSH:
                        cost = measure(peers.aimage_push(layout, name, host, run.authority))
                        peers.forget(layout, name, host)
                    else:
                        cost = measure(peers.curl_push(layout, name, host, work))
                rows.setdefault(shape, {}).setdefault(tool, []).append(cost)
                _check(root, sum(shapes.sizes(shape)))
    for path in (root, work):
        shutil.rmtree(path, ignore_errors=True)
    where = "" if run.server == "docker-registry" else f" to {run.server}"
    _print("push" + where + run.suffix, rows)


def deltas(run: Run, chosen: list[str]) -> None:
    """Print the table of second versions. It does not depend on time: one round."""
    rule = "|---|---|---|---|---|"
    print(f"\n| pull of v2 after v1 | tool | sent MiB | v2 MiB | % of v2 |\n{rule}")
    with registry(run.directory / "docker-registry") as host:
        for shape in chosen:
            layout, name = shapes.make_versions(run.directory, shape), f"bench/delta-{shape}"
            for tag in ("v1", "v2"):
                shapes.ensure_pushed(layout, f"{name}:{tag}", host)
            v2 = sum(blob["size"] for blob in shapes.content(layout, f"{name}:v2"))
            for tool in peers.pull_commands(run.peers, name, run.target):
                run.clear()
                with link(host) as through:
                    sent = 0
                    for tag in ("v1", "v2"):
                        before = through.sent()
                        full = f"{through.host}/{name}:{tag}"
                        _pull(run, tool, peers.pull_commands(run.peers, full, run.target)[tool])
                        sent = through.sent() - before
                _check(run.target, v2)
                mib, share = shapes.MIB, sent / v2
                print(f"| {shape} | {tool} | {sent / mib:.2f} | {v2 / mib:.2f} | {share:.2%} |")
    run.clear()


def quotas(run: Run, rate: float) -> None:
    """Print the table of transfers with a registry that accepts ``rate`` requests a second."""
    layout, name = shapes.make_layout(run.directory, "q"), "bench/q:v1"
    rule = "|---|---|---|---|---|---|"
    print(f"\n| {rate:g} requests/s | verb | wall s | accepted | refused | ratio |\n{rule}")
    with quota.running() as server:
        full = f"{server.host}/{name}"
        commands = {
            "push": peers.aimage_push(layout, name, server.host),
            "pull": peers.pull_commands([], full, run.target)[peers.OURS],
        }
        for kind, build in quota.QUOTAS.items():
            rows: dict[str, list[tuple[float, int, int, float]]] = {verb: [] for verb in commands}
            for _ in range(run.rounds):
                server.forget()
                for verb, command in commands.items():
                    run.clear()
                    server.start(build(rate))
                    wall, count = measure(command).wall, server.accepted
                    rows[verb].append((wall, count, server.refused, wall * rate / count))
            for verb, costs in rows.items():
                wall, accepted, refused, ratio = map(statistics.median, zip(*costs, strict=True))
                print(f"| {kind} | {verb} | {wall:.2f} | {accepted} | {refused} | {ratio:.2f} |")
        peers.forget(layout, name, server.host)


def _pull(run: Run, tool: str, command: list[str]) -> Cost:
    if tool == peers.OURS:
        return measure(command)
    return measure(command, lambda: _sync(run.target))


def _sync(path: Path) -> None:
    subprocess.run(["sync", "-f", str(path)], check=True)


def _check(directory: Path, size: int) -> None:
    """Exit if a directory has fewer bytes than expected."""
    found = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    if found < size:
        sys.exit(f"only {found} of {size} bytes arrived in {directory}")


def _print(verb: str, rows: Rows) -> None:
    rule = "|---|---|---|---|---|---|---|---|---|"
    print(
        f"\n| {verb} | tool | wall s | unsynced | CPU s | peak MiB | by the best peer's wall"
        f" | its unsynced | its CPU |\n{rule}"
    )
    for shape, tools in rows.items():
        medians = {tool: _compute_medians(costs) for tool, costs in tools.items()}
        # curl sends no manifest: it is the peer only where there is no other one.
        others = [tool for tool in tools if tool not in (peers.OURS, peers.PUSH)]
        peer_rows = [medians[tool] for tool in others if tool != peers.PUSH_CURL]
        peer_rows = peer_rows or [medians[tool] for tool in others or tools]
        wall, unsynced, cpu = (
            min(getattr(cost, name) for cost in peer_rows) for name in ("wall", "unsynced", "cpu")
        )
        for tool, cost in medians.items():
            times = f"{cost.wall:.2f} | {cost.unsynced:.2f} | {cost.cpu:.2f} | {cost.rss:.0f}"
            ratios = (cost.wall / wall, cost.unsynced / unsynced, cost.cpu / cpu)
            text = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"| {shape} | {tool} | {times} | {text} |")


def _compute_medians(costs: list[Cost]) -> Cost:
    return Cost(
        *(
            statistics.median(getattr(cost, name) for cost in costs)
            for name in ("wall", "unsynced", "cpu", "rss")
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for table, default in SHAPES.items():
        parser.add_argument(f"--{table}", action="store_true", help=f"shapes {default}")
    parser.add_argument("--quota", type=float, help="requests a second of a registry")
    parser.add_argument("--shapes", help="for all of these tables")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default=",".join(peers.known_peers()), help="to compare with")
    servers = ["docker-registry", "registry", "static", "aimage"]
    parser.add_argument("--server", choices=servers, default=servers[0])
    parser.add_argument("--tls", action="store_true", help="the registry has a certificate")
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    tables = {
        "pull": pulls,
        "link": lambda run, chosen: pulls(run, chosen, LIMITS),
        "push": pushes,
        "delta": deltas,
    }
    asked = [table for table in tables if getattr(options, table)]
    if not asked and not options.quota:
        asked = ["pull"]
    chosen = options.peers.split(",") if options.peers else []
    if absent := peers.find_absent(chosen):
        known = ", ".join(peers.known_peers()) or "none"
        parser.error(f"not a known tool in PATH: {', '.join(absent)}; there are: {known}")
    if "push" in asked and options.server == "static":
        parser.error("a static server accepts no pushes")
    if options.tls and options.server not in servers[:2]:
        parser.error("--tls is for docker-registry and distribution")
    with contextlib.ExitStack() as stack:
        directory = options.directory
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        run = Run(directory.resolve(), chosen, options.rounds, options.server)
        if options.tls:
            run.authority = create_authority(
                Path(stack.enter_context(tempfile.TemporaryDirectory()))
            )
            os.environ["SSL_CERT_FILE"] = str(run.authority)
        for table in asked:
            tables[table](run, (options.shapes or SHAPES[table]).split(","))
        if options.quota:
            quotas(run, options.quota)


if __name__ == "__main__":
    main()
