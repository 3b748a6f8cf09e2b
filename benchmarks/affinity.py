"""Simulate which workers of a fleet take jobs, on a clock that jumps from event to event.

    python -m benchmarks.affinity [--workers N,...] [--load SHARE,...] [--delay SECONDS,...]
        [--jobs N] [--seconds S] [--models N] [--seed N] [--json]

Workers run the code of ``aimage serve --join`` that chooses jobs and the models to unload; their
engines and the NATS server are simulated, and each message is on its way for a millisecond and a
random time of mean ``--delay``, as on a busy machine. Jobs arrive at random, for models by Zipf's
law, so that ``--load`` of all slots are at work on average. ``met`` is the share of jobs for which
no model was loaded, without the first quarter of the jobs; ``fixed`` is that of a fleet that never
unloads a model. ``wait`` are the milliseconds until a job begins: p50 and p99. ``rate`` is the part
of what the engines allow (one job of a model at a time), while jobs arrive and without the first
quarter of that time: with one model and a load above what the engines allow, how the fleet scales.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import selectors
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.gateway import LOAD, MODELS, TEXT, SleepingRole, know_models, service_of
from benchmarks.jobs import percentiles
from clowder_aimage.fleet import joined_worker
from clowder_aimage.fleet.joined_worker import JoinedWorker, WorkerIdentity
from clowder_aimage.fleet.name import INTERACTIVE, FleetNames
from clowder_aimage.fleet.worker_registry import WorkerRegistry
from clowder_aimage.http.local_call import LocalCalls

SLOTS = 2


class JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: the time passes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen"
        self.now += max(0.0, timeout)
        return []


@contextmanager
def jumping_clock() -> Iterator[asyncio.Runner]:
    """Run a loop with a clock that jumps, which is also that of the workers."""
    selector = JumpingSelector()

    def loop() -> asyncio.AbstractEventLoop:
        found = asyncio.SelectorEventLoop(selector)
        found.time = lambda: selector.now  # type: ignore[method-assign]
        return found

    async def in_loop(work: Any) -> Any:
        return work()

    clock = SimpleNamespace(monotonic=lambda: selector.now)
    with (
        mock.patch.object(joined_worker, "time", clock),
        mock.patch.object(joined_worker, "run_io", in_loop),
        asyncio.Runner(loop_factory=loop) as runner,
    ):
        yield runner


class Queue:
    """The jobs of a fleet, as a server has them, and the link of its workers."""

    is_ready, api = True, "$JS.API"

    def __init__(self, delay: float, chance: random.Random) -> None:
        self.names, self._delay, self._chance = FleetNames(), delay, chance
        self.on_ready: list[Callable[[], object]] = []
        self.workers: list[SimulatedWorker] = []
        self.streams = self.client = self
        self.waiting: defaultdict[str, deque[Any]] = defaultdict(deque)
        self.running: defaultdict[str, int] = defaultdict(int)
        self._number = 0
        self._delivered: defaultdict[str, int] = defaultdict(int)

    async def travel(self) -> None:
        mean = self._delay
        await asyncio.sleep(0.001 + (self._chance.expovariate(1 / mean) if mean else 0.0))

    def publish(self, name: str) -> SimpleNamespace:
        digest = MODELS[name].partition(":")[2]
        self._number += 1
        job = SimpleNamespace(name=name, headers=None, began=0.0, done=asyncio.Event())
        job.metadata = SimpleNamespace(sequence=SimpleNamespace(stream=self._number))
        job.at = asyncio.get_running_loop().time()
        self.waiting[self.names.build_consumer_name(INTERACTIVE, digest)].append(job)
        text = f"{self.names.build_job_subject(INTERACTIVE, digest, 'me')} {self._number}"
        for worker in self.workers:
            worker._begin(self._tell(worker, text))
        return job

    async def _tell(self, worker: SimulatedWorker, text: str) -> None:
        await self.travel()
        await worker._on_announcement(SimpleNamespace(data=text.encode()))  # type: ignore[arg-type]

    # -- what a worker calls

    def listen(self, *_: object) -> None:
        pass

    async def add_consumer(self, *_: object) -> None:
        pass

    async def request(self, subject: str, *_: object, **__: object) -> SimpleNamespace:
        await self.travel()
        name = subject.rpartition(".")[2]
        job = self.waiting[name].popleft() if self.waiting[name] else None
        if job is not None:
            self._delivered[name] = job.metadata.sequence.stream
            self.running[name] += 1
        await self.travel()
        return job or SimpleNamespace(headers={"Status": "404"})

    async def consumer_info(self, _: str, name: str) -> SimpleNamespace:
        await self.travel()
        found = SimpleNamespace(
            num_pending=len(self.waiting[name]),
            num_ack_pending=self.running[name],
            delivered=SimpleNamespace(stream_seq=self._delivered[name]),
        )
        await self.travel()
        return found

    async def stream_info(self, *_: object, **__: object) -> SimpleNamespace:
        await self.travel()
        found = {}
        for digest in MODELS.values():
            plain = digest.partition(":")[2]
            name = self.names.build_consumer_name(INTERACTIVE, plain)
            if self.waiting[name] or self.running[name]:
                found[self.names.build_job_subject(INTERACTIVE, plain, "me")] = 1
        return SimpleNamespace(state=SimpleNamespace(subjects=found))


class SimulatedWorker(JoinedWorker):
    """A worker whose jobs only sleep."""

    def __init__(self, queue: Queue, name: str, role: SleepingRole, results: list[Any]) -> None:
        service = service_of(role, SLOTS)
        super().__init__(queue, service, LocalCalls(role), WorkerIdentity(name))  # type: ignore[arg-type]
        know_models(self)
        now = asyncio.get_running_loop().time
        self._watch.workers._clock = now
        self._placement.demand.clock = now
        self._queue, self._role, self._results = queue, role, results

    async def run(self) -> None:
        loops = (self._report, 0.25), (self._sweep, 0.25), (self._take, 0.0)
        await asyncio.gather(*(joined_worker._repeat(work, pause) for work, pause in loops))

    async def _serve(self, message: Any, key: tuple[str, str]) -> None:
        begun, digest = asyncio.get_running_loop().time(), f"sha256:{key[1]}"
        is_warm = await self._role.work(message.name)
        name = self._link.names.build_consumer_name(*key)
        self._queue.running[name] -= 1
        now = asyncio.get_running_loop().time()
        self._results.append((is_warm, begun - message.at, now))
        message.done.set()
        self._slots.leave(digest)
        self._placement.demand.record_end(digest, begun)
        self._wake.set()

    async def _publish_status(self) -> None:
        status = self._build_status()
        for other in self._queue.workers:
            self._begin(self._tell(other._watch.workers, status))

    async def _tell(self, workers: WorkerRegistry, status: Any) -> None:
        await self._queue.travel()
        workers.put(status)


async def simulate(options: argparse.Namespace, workers: int, load: float, delay: float) -> Any:
    """Return the result of one run."""
    chance = random.Random(options.seed)
    random.seed(options.seed)  # of the workers' jitter
    queue, results = Queue(delay, chance), list[tuple[bool, float, float]]()
    names = [name for name in MODELS if name != TEXT][: options.models]
    weights = [1 / (at + 1) for at in range(len(names))]
    for at in range(workers):
        role = SleepingRole(SLOTS, options.seconds, ())
        queue.workers.append(SimulatedWorker(queue, f"w{at:03}", role, results))
    tasks = [asyncio.create_task(each.run()) for each in queue.workers]
    mean = options.seconds / (load * SLOTS * workers)
    jobs, clock = [], asyncio.get_running_loop().time
    begun = clock()
    for _ in range(options.jobs):
        await asyncio.sleep(chance.expovariate(1 / mean))
        jobs.append(queue.publish(chance.choices(names, weights)[0]))
    end = clock()
    begun += (end - begun) / 4
    served = sum(begun <= at < end for _, _, at in results)
    for job in jobs:
        await job.done.wait()
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
    settled = results[len(results) // 4 :]
    slots = min(SLOTS, options.models) * workers
    return {
        "workers": workers,
        "load": load,
        "delay": delay,
        "met": round(sum(is_warm for is_warm, _, _ in settled) / len(settled), 3),
        "fixed": round(sum(sorted(weights)[-SLOTS * workers :]) / sum(weights), 3),
        "wait": percentiles([wait for _, wait, _ in settled]),
        "rate": round(served * options.seconds / (end - begun) / slots, 3),
    }


def run(options: argparse.Namespace, workers: int, load: float, delay: float) -> Any:
    with jumping_clock() as runner:
        return runner.run(simulate(options, workers, load, delay))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", default="8")
    parser.add_argument("--load", default="0.1,0.2,0.4", help="shares of the slots at work")
    parser.add_argument("--delay", default="0", help="mean seconds of a message, more than 1 ms")
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=LOAD / 4, help=f"a load is {LOAD:g}")
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [
        run(options, int(workers), float(load), float(delay))
        for workers in options.workers.split(",")
        for load in options.load.split(",")
        for delay in options.delay.split(",")
    ]
    print(json.dumps(found) if options.json else "\n".join(map(str, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
