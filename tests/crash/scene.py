"""Stores for crash tests, commands on them, and their invariants."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clowder_aimage.content import build_bytes_body
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.gc import Collector
from clowder_aimage.layout.metadata import MetadataFiles
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.verify import verify
from tests.content.artifact import blob, manifest, put_artifact
from tests.process import Aimage, Done, spawn
from tests.store import copy_store

ROOT = Path(__file__).parent.parent.parent
MIB = 1024 * 1024
BIG = hashlib.shake_128(b"big").digest(20 * MIB)  # more than 16 MiB, so that it has a journal
SMALL = [hashlib.shake_128(b"%d" % number).digest(100_000) for number in range(3)]
KILLED = -9
WORKERS = 2


class Machine:
    """Processes forked from one that has imported everything."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()
        self._process = spawn(
            [sys.executable, "-m", "tests.crash.recorder"],
            is_shared=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def run(self, order: dict[str, Any]) -> Done:
        assert self._process.stdin
        assert self._process.stdout
        out = self._directory / str(next(self._numbers))
        self._process.stdin.write(json.dumps(order | {"out": str(out)}) + "\n")
        self._process.stdin.flush()
        code = json.loads(self._process.stdout.readline())["code"]
        said = [out.with_suffix(end) for end in (".out", ".err")]
        texts = [path.read_text() if path.exists() else "" for path in said]
        return Done(code, *texts)

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class Machines:
    """Machines; each command uses a free one, or starts another."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._all: list[Machine] = []
        self._free: list[Machine] = []
        self._lock = threading.Lock()

    def run(self, order: dict[str, Any]) -> Done:
        with self._lock:
            machine = self._free.pop() if self._free else self._start()
        try:
            return machine.run(order)
        finally:
            self._free.append(machine)

    def _start(self) -> Machine:
        directory = self._directory / str(len(self._all))
        directory.mkdir()
        self._all.append(Machine(directory))
        return self._all[-1]

    def close(self) -> None:
        for machine in self._all:
            machine.close()


@dataclass
class Place:
    """A store alone in a directory ``top``, and a home elsewhere.

    ``syncs`` is True if each checkpoint is durable; ``boot`` is the ID of the system's start, if it
    is not this one.
    """

    directory: Path
    machines: Machines
    syncs: bool = False
    boot: str = ""

    @property
    def top(self) -> Path:
        return self.directory / "top"

    @property
    def store(self) -> Path:
        return self.top / "store"

    def run(self, *arguments: str, **order: Any) -> Done:
        """Run a verb; ``order`` has the faults, as in recorder.py."""
        here = Aimage(self.directory / "home", self.store)
        order = {key: str(v) if isinstance(v, Path) else v for key, v in order.items()}
        done = self.machines.run(
            {
                "argv": arguments,
                "environ": here.env(),
                "cwd": str(here.home),
                "top": str(self.top),
                "syncs": self.syncs,
                "boot": self.boot,
                **order,
            }
        )
        assert "Traceback" not in done.err, done.err
        return done

    def names(self) -> dict[str, str]:
        return names(self.store)


class Places:
    """Creates places."""

    def __init__(self, directory: Path, machines: Machines) -> None:
        self._directory = directory
        self.machines = machines
        self._numbers = itertools.count()

    def new(self, template: Path | None = None) -> Place:
        """Return a place with a copy of a store. Blobs are hard-linked, as they never change.

        Without one, each checkpoint is durable, as in a slow transfer.
        """
        directory = self._directory / str(next(self._numbers))
        place = Place(directory, self.machines, syncs=template is None)
        (place.directory / "home").mkdir(parents=True)
        place.top.mkdir()
        if template is not None:
            copy_store(template, place.store)
        return place

    def drop(self, place: Place) -> None:
        shutil.rmtree(place.directory)


# -- invariants


def names(store: Path) -> dict[str, str]:
    """Return the names in the store, as the command line lists them."""
    return {name: str(found.digest) for name, found in ImageLayout(store).list_tags()}


def blobs(store: Path) -> set[str]:
    return {f"{p.parent.name}:{p.name}" for p in (store / "blobs").glob("*/*")}


def check_sound(store: Path, *, keeps: dict[str, str]) -> dict[str, str]:
    """Verify every blob, and that all names are complete and former ones unchanged.

    Returns the names.
    """
    report = verify(ImageLayout(store))
    assert report.problems == []
    found = names(store)
    assert keeps.items() <= found.items()
    return found


def check_finished(
    store: Path, wanted: dict[str, str], *, foreign: frozenset[str] = frozenset()
) -> None:
    """Verify the names and their spelling, also for tools that read index.json only.

    Args:
        store: The store.
        wanted: The digest of each name.
        foreign: The names set by another tool.
    """
    assert check_sound(store, keeps={}) == wanted
    index = json.loads((store / "index.json").read_bytes())
    name = "io.containerd.image.name"
    raw = {entry["annotations"][name]: entry["digest"] for entry in index["manifests"]}
    assert raw == wanted
    records = dict(MetadataFiles(store, "names").iter_items())
    ours = {name: digest for name, digest in wanted.items() if name not in foreign}
    assert {key: record["entry"]["digest"] for key, record in records.items()} == ours


def check_idle(store: Path, wanted: dict[str, str]) -> None:
    """Verify that no unfinished ingest is left, and that a collection changes nothing of value.

    It removes journals without a blob and leases without a process, and nothing else.
    """
    private = store / ".aimage"
    assert {path.suffix for path in private.glob("ingest/*")} <= {".journal"}
    Collector(ImageLayout(store), grace=0).run()
    assert [*private.glob("ingest/*"), *private.glob("lease/*")] == []
    assert check_sound(store, keeps={}) == wanted


# -- commands


@dataclass(frozen=True)
class Job:
    """A command on a copy of a store, and the names expected after it.

    ``loses`` are the names that it removes or changes.
    """

    verb: str
    argv: tuple[str, ...]
    template: Path | None
    before: dict[str, str] = field(default_factory=dict)
    wanted: dict[str, str] = field(default_factory=dict)
    foreign: frozenset[str] = frozenset()  # names of another tool
    blobs: frozenset[str] = frozenset()
    calls: int = 0  # writing calls
    allocations: int = 0

    @property
    def keeps(self) -> dict[str, str]:
        """Return the names that the command does not change."""
        return dict(self.before.items() & self.wanted.items())

    def check_broken(self, place: Place) -> None:
        """Verify that after an interruption each name has its former or its final value."""
        found = check_sound(place.store, keeps=self.keeps)
        assert found.items() <= self.before.items() | self.wanted.items()

    def finish(self, place: Place) -> None:
        """Complete the job by running the same command again."""
        done = place.run(*self.argv)
        gone = self.verb == "rm" and self.wanted == place.names()
        assert done.code == 0 or (gone and done.code == 3), done.err
        check_finished(place.store, self.wanted, foreign=self.foreign)
        assert blobs(place.store) == self.blobs
        assert (ImageLayout(place.store).pins.get("keep:v1") is not None) == self.verb.startswith(
            "pin"
        )
        check_idle(place.store, self.wanted)


def measured(job: Job, places: Places) -> tuple[Job, Place]:
    """Return the job with the record of its undisturbed run."""
    place = places.new(job.template)
    before, records = place.names(), MetadataFiles(place.store, "names")
    foreign = frozenset(before.keys() - {name for name, _ in records.iter_items()})
    log = place.directory / "log"
    done = place.run(*job.argv, log=log)
    assert done.code == 0, done.err
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    return (
        replace(
            job,
            before=before,
            foreign=foreign,
            wanted=place.names(),
            blobs=frozenset(blobs(place.store)),
            calls=len(calls),
            allocations=sum(call["allocates"] for call in calls),
        ),
        place,
    )


def fill(store: Path) -> None:
    """Create two AImages that share a blob, a third with two names, and unneeded blobs."""
    layout = ImageLayout(store)
    put_artifact(layout, "keep:v1", b"shared", b"kept", SMALL[0])
    put_artifact(layout, "old:v1", b"shared", b"old")
    put_artifact(layout, "gone:v1", b"shared", b"gone", b"gone too")
    layout.tag(layout.resolve(Reference.parse("keep:v1")), Reference.parse("twice:v1"))
    layout.untag(Reference.parse("gone:v1"))


def put_in(host: str, path: str, docker: Path, *layers: bytes) -> str:
    """Push an artifact of those layers to a registry; return its name."""
    config = blob(b"{}", "application/vnd.example.config")
    made = manifest(config, [blob(layer) for layer in layers])
    name = Reference.parse(f"{host}/{path}")
    with Repository(name, ClientOptions(docker_config=docker)) as target:
        for content, data in zip((config, *made.layers), (b"{}", *layers), strict=True):
            if not target.exists(content):
                target.push(content, build_bytes_body(data))
        target.push(made.descriptor, build_bytes_body(made.raw), name)
    return str(name)


def side_by_side(calls: Sequence[Any]) -> None:
    """Run all, a few at a time; raise the first failure."""
    with ThreadPoolExecutor(WORKERS) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()
