"""Simulate a fleet of any size by the rules of the nodes, without transferring bytes.

    python -m benchmarks.simulate [--nodes 8,16,...,1024] [--mib 128] [--registry MIB_PER_S]
        [--node MIB_PER_S] [--overhead SECONDS] [--uploads 3] [--order same|own] [--json]

A discrete-event simulation with fixed seeds: the figures are the same on every machine. Each node
has an uplink and a downlink, the registry an uplink; pieces are queued as in wire.py. It
covers the owners of ranges of 16 MiB (by the function that nodes use), one flight per node and
range, ranges that are sent on while they arrive, four flights at a time for peers, requests to
other nodes before the registry, upload slots and the wait for them, redirects of busy nodes to
holders, pauses between requests, and eight connections per node, of which three fetch large blobs,
the largest first, and the others small ones, the smallest first. Failures, CPU (a request costs
``--overhead`` seconds) and disks are not simulated. The constants are those of clowder_aimage/node.

``fleet.py --simulate`` calibrates it: the rate of the registry from the run without peers, the
overhead from the run with peers.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise

from benchmarks.events import MIB, Clock, Event, Process, Transfer, Wire
from clowder_aimage.node.peers import SharingLimits
from clowder_aimage.node.range_reader import AT_ONCE
from clowder_aimage.node.range_routes import (
    COMING_TIMEOUT,
    MAX_HOLDERS,
    MAX_NAMED,
    MAX_REQUESTS,
    TURN_TIMEOUT,
)
from clowder_aimage.node.range_source import MAX_HOPS, OTHERS, RANGE, rank_nodes
from clowder_aimage.oci import Digest

CONNECTIONS, WIDTH = 8, 3  # as in content/
LIMITS = SharingLimits()
LOOK = 0.02  # seconds between two looks for the first byte of a range
SEEDS = 5  # runs of a small fleet, whose times vary
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Rules:
    """The parameters of a run. Rates are in bytes a second."""

    nodes: int
    sizes: tuple[int, ...]
    registry: float
    node: float
    overhead: float = 0.01  # seconds per request
    begin: float = 1.25  # seconds within which the nodes see the tag
    settle: float = 0.4  # seconds from the last byte until the model is reported as present
    uploads: int = LIMITS.uploads
    order: str = "same"
    seed: int = 1


@dataclass
class Found:
    """Seconds until the first and the last node had the model; bytes sent by model size."""

    nodes: int
    first: float
    all: float
    registry: float
    most_sent: float
    requests: float  # per node


class Blob:
    """A large blob that a node fetches: the ranges that no connection has started."""

    def __init__(self, parts: list[tuple[int, int]]) -> None:
        self.parts = deque(parts)


@dataclass
class Busy:
    """The answer of a busy node, with the nodes that have the range."""

    holders: list[int] = field(default_factory=list)


class Node:
    """One node: its ranges, its uploads, and the holders that it remembers."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet, self.number = fleet, number
        self.up, self.down = Wire(fleet.rules.node), Wire(fleet.rules.node)
        self.have: set[tuple[int, int]] = set()
        self.coming: dict[tuple[int, int], Transfer] = {}
        self.flights: dict[tuple[int, int], Event] = {}
        self.for_others = self.sending = self.inside = self.requests = 0
        self.turns: deque[Event] = deque()
        self.holders: dict[tuple[int, int], deque[int]] = {}
        self.large: deque[Blob] = deque()
        self.small: deque[tuple[int, int]] = deque()
        self.active: list[Blob] = []
        self.at_large = 0

    # -- the pull

    def pull(self) -> Process:
        fleet = self.fleet
        yield fleet.rng.uniform(0.0, fleet.rules.begin)
        blobs = list(range(len(fleet.rules.sizes)))
        if fleet.rules.order == "own":
            fleet.rng.shuffle(blobs)
            blobs.sort(key=lambda blob: fleet.rules.sizes[blob] <= RANGE)
        for blob in blobs:
            parts = fleet.parts[blob]
            if len(parts) > 1:
                if fleet.rules.order == "own":
                    at = fleet.rng.randrange(len(parts))
                    parts = parts[at:] + parts[:at]
                self.large.append(Blob(parts))
            else:
                self.small.append(parts[0])
        ends = [fleet.clock.start(self.connection()) for _ in range(CONNECTIONS)]
        for end in ends:  # noqa: UP028 - what the clock sends is for this process
            yield end
        yield fleet.rules.settle
        fleet.ends.append(fleet.clock.now)

    def connection(self) -> Process:
        """Fetch as in content/fetch.py: large blobs first, the smallest ones in parallel."""
        while True:
            if self.large and self.at_large < WIDTH:
                blob = self.large.popleft()
                yield from self.take(blob)
            elif self.small:
                yield from self.get(self.small.pop())
            elif self.active and self.at_large < WIDTH and (other := self.join()) is not None:
                yield from self.take(other)
            elif self.large or self.active:
                yield 0.1
            else:
                return

    def take(self, blob: Blob) -> Process:
        self.at_large += 1
        self.active.append(blob)
        while blob.parts:
            yield from self.get(blob.parts.popleft())
        self.active.remove(blob)
        self.at_large -= 1

    def join(self) -> Blob | None:
        """Take the second half of the ranges left to another connection."""
        most = max(self.active, key=lambda blob: len(blob.parts))
        if not most.parts:
            return None
        half = [most.parts.pop() for _ in range((len(most.parts) + 1) // 2)]
        return Blob(half[::-1])

    # -- one range

    def get(self, part: tuple[int, int]) -> Process:
        if part in self.have:
            return
        owner = self.fleet.rank_nodes(part)[0]
        if owner != self.number and (yield from self.ask_owner(self.fleet.nodes[owner], part)):
            self.have.add(part)
        elif part not in self.have:
            yield self.board(part)

    def ask_owner(self, owner: Node, part: tuple[int, int]) -> Process:
        pause, began = 0.05, self.fleet.clock.now
        while self.fleet.clock.now - began < LIMITS.coming:
            answer = yield from self.ask(owner, part)
            if answer is True:
                return True
            if answer.holders and (yield from self.ask_holders(answer.holders, part)):
                return True
            yield self.fleet.rng.uniform(0.5, 1.0) * pause
            pause = min(2 * pause, LIMITS.pause)
        return False

    def ask_holders(self, named: list[int], part: tuple[int, int]) -> Process:
        """Ask the nodes that an owner redirects to, and those that they redirect to."""
        queue, seen = self.fleet.rng.sample(named, len(named)), {self.number}
        hops = MAX_HOPS
        while queue and hops:
            holder = queue.pop()
            if holder in seen:
                continue
            seen.add(holder)
            hops -= 1
            answer = yield from self.ask(self.fleet.nodes[holder], part, is_stored=True)
            if answer is True:
                return True
            if isinstance(answer, Busy):
                queue += answer.holders
        return False

    def ask(self, other: Node, part: tuple[int, int], *, is_stored: bool = False) -> Process:
        """Send a request: return True, a Busy, or False if the other node lacks the range."""
        self.requests += 1
        yield self.fleet.rules.overhead
        answer = yield from other.answer(self, part, is_stored)
        return answer

    # -- requests of peers

    def answer(self, asker: Node, part: tuple[int, int], is_stored: bool) -> Process:
        rules, holders = self.fleet.rules, self.named(asker, part)
        is_full = self.sending >= rules.uploads and (
            holders or len(self.turns) >= MAX_REQUESTS // 2
        )
        if is_full or self.inside >= MAX_REQUESTS:
            return Busy(holders)
        self.inside += 1
        try:
            if part not in self.have and part not in self.coming:
                if is_stored:
                    return False
                if not (yield from self.fetch_for_others(part)):
                    return Busy()
            if not (yield from self.turn()):
                return Busy(self.named(asker, part))
            self.note(part, asker.number)
            yield asker.receive(part, self.up, self.coming.get(part))
            self.next()
            return True
        finally:
            self.inside -= 1

    def receive(self, part: tuple[int, int], up: Wire, source: Transfer | None = None) -> Event:
        """Begin to receive a range, which others may read meanwhile; return its end."""
        clock, length = self.fleet.clock, self.fleet.length(part)
        coming = self.coming[part] = Transfer(clock, up, self.down, length, source)

        def came(_: bool) -> None:
            self.have.add(part)
            self.coming.pop(part, None)

        coming.ended.waiting.append(came)
        return coming.ended

    def turn(self) -> Process:
        if self.sending < self.fleet.rules.uploads:
            self.sending += 1
            return True
        turn = Event()
        self.turns.append(turn)
        if (yield turn, TURN_TIMEOUT):
            return True
        if turn in self.turns:
            self.turns.remove(turn)
        return False

    def next(self) -> None:
        if self.turns:
            self.fleet.clock.fire(self.turns.popleft())
        else:
            self.sending -= 1

    def note(self, part: tuple[int, int], number: int) -> None:
        found = self.holders.setdefault(part, deque(maxlen=MAX_HOLDERS))
        if number not in found:
            found.append(number)

    def named(self, asker: Node, part: tuple[int, int]) -> list[int]:
        known = [one for one in self.holders.get(part, ()) if one != asker.number]
        return self.fleet.rng.sample(known, min(MAX_NAMED, len(known)))

    # -- the registry

    def fetch_for_others(self, part: tuple[int, int]) -> Process:
        if part not in self.flights:
            if self.for_others >= AT_ONCE:
                return False
            self.for_others += 1
            landed = self.board(part)
            landed.waiting.append(lambda _: self.left())
        end = self.fleet.clock.now + COMING_TIMEOUT
        while part not in self.have and not (part in self.coming and self.coming[part].came):
            if self.fleet.clock.now >= end:
                return False
            yield LOOK
        return True

    def left(self) -> None:
        self.for_others -= 1

    def board(self, part: tuple[int, int]) -> Event:
        if part in self.flights:
            return self.flights[part]
        fleet = self.fleet
        landed = self.flights[part] = Event()

        def fly() -> Process:
            others = [one for one in fleet.rank_nodes(part) if one != self.number]
            for number in others[:OTHERS]:
                self.requests += 1
                yield fleet.rules.overhead
                other = fleet.nodes[number]
                if part not in other.have and part not in other.coming:
                    continue
                if (yield from self.ask(other, part, is_stored=True)) is True:
                    fleet.clock.fire(landed)
                    return
            yield fleet.rules.overhead
            yield self.receive(part, fleet.registry)
            fleet.clock.fire(landed)

        fleet.clock.start(fly())
        return landed


class Fleet:
    """All nodes, and the registry."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.clock = rules, Clock()
        self.rng = random.Random(rules.seed)
        self.registry = Wire(rules.registry)
        self.ends: list[float] = []
        self.parts = [
            [(blob, number) for number in range(-(-size // RANGE))]
            for blob, size in enumerate(rules.sizes)
        ]
        self._ranked: dict[tuple[int, int], list[int]] = {}
        self.nodes = [Node(self, number) for number in range(rules.nodes)]

    def run(self) -> Found:
        for node in self.nodes:
            self.clock.start(node.pull())
        self.clock.run()
        size = sum(self.rules.sizes)
        assert len(self.ends) == len(self.nodes)
        return Found(
            nodes=len(self.nodes),
            first=min(self.ends),
            all=max(self.ends),
            registry=self.registry.passed / size,
            most_sent=max(node.up.passed for node in self.nodes) / size,
            requests=sum(node.requests for node in self.nodes) / len(self.nodes),
        )

    def length(self, part: tuple[int, int]) -> int:
        blob, number = part
        return min(RANGE, self.rules.sizes[blob] - number * RANGE)

    def rank_nodes(self, part: tuple[int, int]) -> list[int]:
        """Return the first nodes that own a range; the others are never asked."""
        if part not in self._ranked:
            digest = Digest.of(f"{self.rules.seed} {part[0]}".encode())
            found = rank_nodes(map(str, range(self.rules.nodes)), digest, part[1])
            self._ranked[part] = list(map(int, found[: OTHERS + 1]))
        return self._ranked[part]


def simulate(rules: Rules) -> Found:
    """Return the result of one run."""
    return Fleet(rules).run()


def calibrate(rules: Rules, seconds: float) -> Rules:
    """Return the rules with an overhead such that the last node ends after ``seconds``."""
    low, high = 0.0, 0.5
    for _ in range(8):
        middle = (low + high) / 2
        if mean(replace(rules, overhead=middle), SEEDS).all < seconds:
            low = middle
        else:
            high = middle
    return replace(rules, overhead=low)


def mean(rules: Rules, seeds: int) -> Found:
    """Return the mean of runs with several seeds."""
    rows = [asdict(simulate(replace(rules, seed=seed))) for seed in range(1, seeds + 1)]
    means = {key: sum(row[key] for row in rows) / seeds for key in rows[0]}
    return Found(**means | {"nodes": rules.nodes})


def compared(found: Found, measured: dict[str, float]) -> str:
    """Return the simulated figures beside the measured ones."""
    lines = ["| | measured | simulated | off by |", "|---|---|---|---|"]
    for name, value in measured.items():
        ours = getattr(found, name)
        lines.append(
            f"| {name.replace('_', ' ')} | {value:.2f} | {ours:.2f} | {ours / value - 1:+.0%} |"
        )
    return "\n".join(lines)


def fit(found: list[Found]) -> tuple[float, float, float]:
    """Return a and b of seconds = a + b * log2(nodes), and the largest relative error."""
    xs, ys = [math.log2(one.nodes) for one in found], [one.all for one in found]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mx) ** 2 for x in xs) or 1.0
    slope = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / spread
    start = my - slope * mx
    return start, slope, max(abs(start + slope * x - y) / y for x, y in zip(xs, ys, strict=True))


def table(found: list[Found]) -> str:
    """Return the series as a Markdown table, with the seconds added by each doubling."""
    lines = ["| nodes | first s | all s | more | registry | most sent | requests of a node |"]
    lines.append("|---|---|---|---|---|---|---|")
    before: Found | None = None
    for one in found:
        more = f"+{one.all - before.all:.1f} s" if before else ""
        lines.append(
            f"| {one.nodes} | {one.first:.1f} | {one.all:.1f} | {more} | {one.registry:.2f} x "
            f"| {one.most_sent:.2f} x | {one.requests:.0f} |"
        )
        before = one
    start, slope, error = fit(found)
    lines.append(f"\n{start:.1f} s + {slope:.2f} s * log2(nodes), at most {error:.0%} from it; ")
    lines[-1] += "it grows " + ("no faster than that." if is_logarithmic(found) else "FASTER.")
    return "\n".join(lines)


def is_logarithmic(found: list[Found]) -> bool:
    """Return whether doublings in the second half of the series add no more than in the first.

    A tenth of the total is allowed for random variation."""
    steps = [b.all - a.all for a, b in pairwise(found)]
    if len(steps) < 2:
        return True
    half = len(steps) // 2
    early, late = sum(steps[:half]) / half, sum(steps[-half:]) / half
    return late <= max(early, 0.0) + 0.1 * found[0].all / half


def series(rules: Rules, counts: Sequence[int] = COUNTS) -> list[Found]:
    """Simulate fleets of these sizes; small ones several times."""
    return [mean(replace(rules, nodes=count), max(1, min(SEEDS, 512 // count))) for count in counts]


def main() -> None:
    from benchmarks.nodes import sizes

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default=",".join(map(str, COUNTS)))
    parser.add_argument("--mib", type=float, default=128, help="of the model")
    parser.add_argument("--registry", type=float, default=12, help="MiB/s that it sends")
    parser.add_argument("--node", type=float, default=24, help="MiB/s of a node, each way")
    parser.add_argument("--overhead", type=float, default=0.01, help="seconds a request")
    parser.add_argument("--uploads", type=int, default=Rules.uploads, help="ranges sent at once")
    parser.add_argument("--order", choices=["same", "own"], default=Rules.order, help="of blobs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rules = Rules(
        nodes=0,
        sizes=tuple(sorted(sizes(options.mib), reverse=True)),
        registry=options.registry * MIB,
        node=options.node * MIB,
        overhead=options.overhead,
        uploads=options.uploads,
        order=options.order,
    )
    found = series(rules, [int(count) for count in options.nodes.split(",")])
    print(json.dumps([asdict(one) for one in found]) if options.json else table(found))


if __name__ == "__main__":
    main()
