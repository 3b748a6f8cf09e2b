"""Measure a fleet of nodes that all pull a model when its tag is pushed, with and without peers.

    python -m benchmarks.fleet [--ways alone,near,told,killed] [--rounds 3] [--nodes 8] [--mib 128]
        [--registry MIB_PER_S] [--node MIB_PER_S] [--json] [--simulate] [--directory DIR]

Each node is an ``aimage node`` process with its own store; docker-registry has the blobs of
the model. ``wire.py`` gives the registry and each node an uplink and a downlink, whose rate is
shared by all of its connections. The time starts with the registry's answer to the push of the tag,
which the nodes poll once a second, and ends when each node reports that the model is present. Then
all blobs in all stores are hashed.

alone   no peers are configured
near    each node has the addresses of all others
told    as near, but the tag exists, and the desired states of the nodes change one after the other,
        the last one when the first node has had the time to fetch half of the model
killed  as near, and two nodes are killed (SIGKILL) at 40 %; they start again when the others are
        complete

"registry" is the bytes that the registry sent, headers included, divided by the size of the model;
"most sent" is the maximum over the nodes. CPU seconds are the sum over all nodes, the peak
of memory is the maximum. With ``--simulate``, simulate.py is calibrated with the measurements and
predicts larger fleets. Needs docker-registry, and twice the size of all stores in ``--directory``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import simulate, wire
from benchmarks.nodes import MIB, REGISTRY, Model, Node, free_ports, sizes
from benchmarks.transfer import registry

PATIENCE = 600.0  # seconds
LOOK = 0.2  # seconds between two requests for a status, which take CPU time from the nodes
MIDDLE = 0.4  # of all bytes
WAYS = ("alone", "near", "told", "killed")


@dataclass
class Cost:
    """The result of one run.

    Seconds until the first node had the model, until all running nodes had it, and until the killed
    ones had it; bytes sent divided by the size of the model; CPU and memory of the nodes."""

    first: float
    all: float
    again: float
    registry: float
    most_sent: float
    cpu: float
    peak: float
    sources: dict[str, float]


@dataclass
class Setup:
    """The options of the command line."""

    directory: Path
    nodes: int
    mib: float
    registry: float  # bytes a second
    node: float

    @property
    def names(self) -> list[str]:
        return [f"node{number}" for number in range(self.nodes)]


class Fleet:
    """The nodes of one run."""

    def __init__(self, model: Model, ways: wire.Wires, nodes: list[Node]) -> None:
        self._model, self._ways, self.nodes = model, ways, nodes
        self.sources: dict[str, float] = {}

    def run(self, tag: str, way: str, apart: float) -> Cost:
        """Run one fleet; ``apart``: seconds between the changes of two desired states."""
        before = self._ways.sent()
        if way == "told":
            begun = time.monotonic()
            self._model.tag(tag)
            for number, node in enumerate(self.nodes):
                time.sleep(max(0.0, begun + number * apart - time.monotonic()))
                node.want(tag)
        else:
            for node in self.nodes:
                node.want(tag)
            _until(lambda: all(node.model()["state"] == "failed" for node in self.nodes), "to ask")
            begun = time.monotonic()
            self._model.tag(tag)
        killed = self._kill() if way == "killed" else []
        came = self._wait([node for node in self.nodes if node not in killed])
        again = [end - begun for end in came]
        if killed:
            for node in killed:
                node.start()
            self._wait(killed)
            again.append(time.monotonic() - begun)
        after = self._ways.sent()
        sent = {pair: after[pair] - before.get(pair, 0) for pair in after}
        self._look_after()
        by_node = [self._sent_by(node.name, sent) for node in self.nodes]
        return Cost(
            first=min(came) - begun,
            all=max(came) - begun,
            again=max(again),
            registry=self._sent_by(REGISTRY, sent),
            most_sent=max(by_node),
            cpu=sum(node.cpu for node in self.nodes),
            peak=max(node.peak for node in self.nodes),
            sources=self.sources,
        )

    def _sent_by(self, name: str, sent: dict[tuple[str, str], int]) -> float:
        return sum(count for pair, count in sent.items() if pair[0] == name) / self._model.size

    def _kill(self) -> list[Node]:
        """Kill two nodes during the pull."""

        def come(found: dict[str, Any]) -> int:
            return self._model.size if found["state"] == "present" else int(found["completed"])

        wanted = MIDDLE * self._model.size * len(self.nodes)
        _until(lambda: sum(come(node.model()) for node in self.nodes) >= wanted, "the middle")
        killed = [self.nodes[1], self.nodes[-2]]
        for node in killed:
            node.end(signal.SIGKILL)
        return killed

    def _wait(self, nodes: list[Node]) -> list[float]:
        """Return the time at which each of them had the model."""
        came: dict[str, float] = {}

        def look() -> bool:
            for node in nodes:
                if node.name not in came and node.model()["state"] == "present":
                    came[node.name] = time.monotonic()
            return len(came) == len(nodes)

        _until(look, "all to have the model")
        return list(came.values())

    def _look_after(self) -> None:
        """Check the stores, stop the nodes, and return the cost."""
        found = [node.model()["sources"] for node in self.nodes]
        for source in found[0]:
            count = sum(one[source] for one in found)
            self.sources[source] = count / self._model.size / len(self.nodes)
        for node in self.nodes:
            node.end()
            if not node.is_right(self._model):
                raise SystemExit(f"{node.name} has wrong bytes")


def _until(holds: Any, what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise SystemExit(f"in vain for {PATIENCE:.0f} s: {what}")
        time.sleep(LOOK)


@contextlib.contextmanager
def fleet(setup: Setup, model: Model, host: str, *, is_near: bool) -> Iterator[Fleet]:
    """Run a fleet of nodes that know each other's addresses."""
    home = setup.directory / "fleet"
    shutil.rmtree(home, ignore_errors=True)
    rates = {REGISTRY: (setup.registry, 0.0)}
    rates |= dict.fromkeys(setup.names, (setup.node, setup.node))
    ports = dict(zip(setup.names, free_ports(setup.nodes), strict=True))
    pairs = [wire.Pair(one, REGISTRY, int(host.rpartition(":")[2])) for one in setup.names]
    if is_near:
        pairs += [wire.Pair(a, b, ports[b]) for a in setup.names for b in setup.names if a != b]
    with wire.wires(rates, pairs) as ways:
        nodes = []
        for name in setup.names:
            others = [other for other in setup.names if is_near and other != name]
            nodes.append(Node(name, home / name, ports[name], ways, others))
        try:
            for node in nodes:
                node.start()
            live = setup.nodes - 1 if is_near else 0
            _until(lambda: min(map(_live, nodes)) >= live, "the nodes to live")
            yield Fleet(model, ways, nodes)
        finally:
            for node in nodes:
                node.end(signal.SIGKILL)
            shutil.rmtree(home, ignore_errors=True)


def _live(node: Node) -> int:
    status = node.status()
    if "id" not in status:
        return -1
    return sum(one["state"] == "live" for one in status["neighbours"])


def measure(setup: Setup, ways: list[str], rounds: int) -> dict[str, list[Cost]]:
    """Return the costs of each way; the rounds of all ways are interleaved."""
    costs: dict[str, list[Cost]] = {way: [] for way in ways}
    shutil.rmtree(setup.directory / "registry", ignore_errors=True)
    with registry(setup.directory / "registry") as host:
        model = Model(host, setup.mib)
        for number in range(rounds):
            for way in ways:
                apart = 0.5 * model.size / setup.registry / setup.nodes
                with fleet(setup, model, host, is_near=way != "alone") as nodes:
                    cost = nodes.run(f"{way}-{number}", way, apart)
                costs[way].append(cost)
                load = os.getloadavg()[0]
                print(f"# {way} {number + 1}: {cost}, load {load:.1f}", file=sys.stderr, flush=True)
    return costs


def median(costs: list[Cost]) -> Cost:
    """Return the median of each figure."""
    rows = [asdict(cost) for cost in costs]
    found = {
        key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "sources"
    }
    sources = {
        key: statistics.median(row["sources"][key] for row in rows) for key in rows[0]["sources"]
    }
    return Cost(**found, sources=sources)


def simulated(setup: Setup, costs: dict[str, list[Cost]]) -> str:
    """Return a table of larger fleets, simulated and calibrated with the measurements."""
    blobs = tuple(sorted(sizes(setup.mib), reverse=True))
    rules = simulate.Rules(setup.nodes, blobs, setup.registry, setup.node)
    share = 1.0
    if "alone" in costs:
        alone = median(costs["alone"])
        ideal = alone.registry * sum(blobs) / setup.registry
        share = min(1.0, ideal / (alone.all - rules.begin / 2 - rules.settle))
    rules = replace(rules, registry=share * setup.registry, node=share * setup.node)
    near = median(costs["near"])
    rules = simulate.calibrate(rules, near.all)
    names = ("first", "all", "registry", "most_sent")
    measured = {name: getattr(near, name) for name in names}
    again = simulate.mean(rules, simulate.SEEDS)
    return "\n\n".join(
        [
            f"calibrated: {share:.0%} of the rates, {rules.overhead * 1000:.0f} ms a request",
            simulate.compared(again, measured),
            simulate.table(simulate.series(rules)),
        ]
    )


def table(costs: dict[str, list[Cost]]) -> str:
    """Return the medians as a Markdown table."""
    lines = [
        "| way | first s | all s | killed s | registry | most sent | of a node's bytes: "
        "registry, neighbours, kept | CPU s | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for way, each in costs.items():
        one = median(each)
        came = [one.sources.get(key, 0.0) for key in ("registry", "neighbour", "cache")]
        lines.append(
            f"| {way} | {one.first:.1f} | {one.all:.1f} | "
            f"{f'{one.again:.1f}' if way == 'killed' else ''} | {one.registry:.2f} x | "
            f"{one.most_sent:.2f} x | {', '.join(f'{share:.0%}' for share in came)} | "
            f"{one.cpu:.1f} | {one.peak:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--mib", type=float, default=128, help="of the model")
    parser.add_argument("--registry", type=float, default=12, help="MiB/s that it sends")
    parser.add_argument("--node", type=float, default=24, help="MiB/s of a node, each way")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--simulate", action="store_true", help="predict larger fleets")
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    if "killed" in options.ways and options.nodes < 4:
        parser.error("killed needs 4 nodes")
    with contextlib.ExitStack() as stack:
        directory = options.directory
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        setup = Setup(
            directory.resolve(),
            options.nodes,
            options.mib,
            options.registry * MIB,
            options.node * MIB,
        )
        costs = measure(setup, options.ways.split(","), options.rounds)
    if options.json:
        print(json.dumps({way: [asdict(one) for one in each] for way, each in costs.items()}))
    else:
        print(table(costs))
    if options.simulate and "near" in costs:
        file = sys.stderr if options.json else sys.stdout
        print(f"\n{simulated(setup, costs)}", file=file)


if __name__ == "__main__":
    main()
