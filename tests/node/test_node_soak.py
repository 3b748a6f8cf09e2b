"""Soak test: moving tags, garbage collection and readers cause no failures or growth.

``AIMAGE_SOAK_SECONDS`` sets the duration; the figures are printed (pytest -s).
"""

from __future__ import annotations

import base64
import json
import os
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clowder_aimage.content import build_bytes_body, copy
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import lease_manifest
from clowder_aimage.oci import Digest, Manifest, Reference, mediatype
from clowder_aimage.oci.descriptor import Descriptor
from clowder_aimage.registry import ClientOptions, Repository
from tests.node.node_run import LiveNode
from tests.node.nodes import MIB, noise
from tests.process import Aimage
from tests.wait import until
from tests.worker.conftest import begin

pytestmark = pytest.mark.integration  # nodes in child processes

pytest.importorskip("mlx.core", reason="mlx is not installed")

SECONDS = float(os.environ.get("AIMAGE_SOAK_SECONDS", "600"))
EVERY = 5.0  # seconds between two moves of a tag
WARM = min(60.0, SECONDS / 4)  # seconds of warm-up, after which nothing may grow
EXTRA = MIB  # unique bytes of each version
GROWTH = 48 * MIB  # bytes that a process may grow after warm-up
FILES = 12  # additional descriptors allowed, for open connections
BODY = {"prompt": "a dog", "steps": 1, "size": "32x32"}


class Mover:
    """Publish successive versions of tags."""

    def __init__(self, author: Aimage, repository: str) -> None:
        self._store, self._repository = ImageLayout(author.store), repository
        self._connection = ClientOptions(docker_config=author.home)
        found = self._store.resolve(Reference.parse("tiny"))
        with self._store.open(found) as reader:
            self._plain = json.loads(reader.read())
        self.moves = 0

    def publish(self, tag: str) -> str:
        """Push a version with a new file under a tag, and return its name."""
        self.moves += 1
        data = noise(EXTRA, f"{tag} {self.moves}")
        layer = Descriptor.of(mediatype.AIMAGE_FILE, data)
        self._store.push(layer, build_bytes_body(data))
        named = layer.to_json() | {"annotations": {mediatype.NAME: f"notes-{self.moves}.bin"}}
        document = self._plain | {"layers": [*self._plain["layers"], named]}
        made = Manifest.parse(json.dumps(document).encode())
        reference = Reference.parse(f"{self._repository}:{tag}")
        self._store.push(made.descriptor, build_bytes_body(made.raw), reference)
        with Repository(reference, self._connection) as target:
            copy(self._store, reference, target)
        self._store.untag(reference)
        self._store.find_path(layer).unlink()
        return str(reference)


@dataclass
class Readers:
    """Clients that use the models during the test."""

    url: str
    store: Path
    refs: list[str]
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def draw(self, number: int) -> None:
        """Generate pictures until the end."""
        seed = 0
        while not self.over.is_set():
            seed += 1
            body = BODY | {"model": self.refs[(seed + number) % len(self.refs)], "seed": seed}
            asked = urllib.request.Request(
                f"{self.url}/v1/images/generations", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            try:
                with urllib.request.urlopen(asked, timeout=120) as answer:
                    found = json.load(answer)["data"][0]["b64_json"]
                assert base64.b64decode(found).startswith(b"\x89PNG")
                self.counts["pictures"] += 1
            except urllib.error.HTTPError as error:
                with error:
                    self.errors.append(f"{error.code}: {error.read()[:300]!r}")
            except Exception as error:
                self.errors.append(repr(error))

    def read(self, number: int) -> None:
        """Read and verify every blob of the models under a lease."""
        layout = ImageLayout(self.store)
        while not self.over.is_set():
            number += 1
            reference = Reference.parse(self.refs[number % len(self.refs)])
            try:
                with layout.lease() as lease:
                    self._check(layout, lease_manifest(layout, reference, lease))
                self.counts["models read"] += 1
            except Exception as error:
                self.errors.append(repr(error))

    def _check(self, layout: ImageLayout, found: Descriptor) -> None:
        raw = layout.find_path(found).read_bytes()
        assert Digest.of(raw) == found.digest
        for blob in Manifest.parse(raw).layers:
            if self.over.wait(0.001):
                return
            with layout.open(blob) as reader:
                assert Digest.of(reader.read()) == blob.digest


@dataclass
class Figures:
    """Resource usage of a server and its models at one time."""

    at: float
    resident: dict[str, int]
    files: dict[str, int]
    blobs: int
    private: int  # files in the store's private directory

    def __str__(self) -> str:
        resident = {name: f"{size / MIB:.0f} MiB" for name, size in self.resident.items()}
        return (
            f"{self.at:5.0f} s: resident {resident}, descriptors {self.files}, "
            f"blobs {self.blobs / MIB:.1f} MiB, private files {self.private}"
        )


def processes(pid: int) -> dict[str, int]:
    """Return the process ids of the server and of its models."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {"server": pid} | {f"model {at}": int(one) for at, one in enumerate(children)}


def measure(pid: int, store: Path, began: float) -> Figures:
    resident: dict[str, int] = {}
    files: dict[str, int] = {}
    for name, one in processes(pid).items():
        kind = name.partition(" ")[0]
        try:
            size = int(Path(f"/proc/{one}/statm").read_text().split()[1]) * 4096
            count = sum(1 for _ in Path(f"/proc/{one}/fd").iterdir())
        except (OSError, IndexError):
            continue  # an unloaded model
        resident[kind] = max(resident.get(kind, 0), size)
        files[kind] = max(files.get(kind, 0), count)
    taken = 0
    for path in (store / "blobs" / "sha256").iterdir():
        try:
            taken += path.stat().st_size
        except OSError:
            continue  # collected
    private = sum(len(names) for _, _, names in os.walk(store / ".aimage"))
    return Figures(time.monotonic() - began, resident, files, taken, private)


def usual(figures: list[Figures], what: str, kind: str) -> int:
    return int(statistics.median(getattr(each, what).get(kind, 0) for each in figures))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_moving_tags_and_readers_cause_no_failures_or_growth(
    tmp_path: Path, author: Aimage, repository: str
) -> None:
    mover = Mover(author, repository)
    refs = [mover.publish(tag) for tag in ("one", "two")]
    node = LiveNode(tmp_path / "node")
    node.want(*({"ref": ref, "pullPolicy": "Always", "refresh": 1} for ref in refs))
    said = ("--node", "--desired", node.desired, "--collect", "5s", "--max-models", "2")
    node.worker = begin(node.aimage, *said, "--queue", "16", "--pull", "never")
    try:
        for ref in refs:
            node.reaches(ref, "present")
        figures = soak(node, mover, refs)
    finally:
        node.end()
    warm = [each for each in figures if WARM / 2 <= each.at <= WARM * 1.5]
    late = [each for each in figures if each.at >= SECONDS * 0.8]
    for kind in ("server", "model"):
        assert usual(late, "resident", kind) <= usual(warm, "resident", kind) + GROWTH, kind
        assert usual(late, "files", kind) <= usual(warm, "files", kind) + FILES, kind
    highest = max(each.blobs for each in warm) + 3 * EXTRA
    assert max(each.blobs for each in late) <= highest < mover.moves * EXTRA + figures[0].blobs
    assert max(each.private for each in late) <= max(each.private for each in warm) + 20
    node.aimage("verify")


def soak(node: LiveNode, mover: Mover, refs: list[str]) -> list[Figures]:
    """Move tags while clients use the models; return the figures of each second."""
    readers = Readers(node.url, node.aimage.store, refs)
    works = [(readers.draw, 0), (readers.draw, 1), (readers.draw, 2), (readers.read, 0)]
    threads = [threading.Thread(target=work, args=(number,)) for work, number in works]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    figures, moved = [], 0.0
    try:
        while (now := time.monotonic() - began) < SECONDS and not readers.errors:
            if now - moved >= EVERY:
                moved = now
                mover.publish(("one", "two")[mover.moves % 2])
            figures.append(measure(node.worker.process.pid, node.aimage.store, began))
            readers.over.wait(1)
    finally:
        readers.over.set()
        for thread in threads:
            thread.join(130)
    tell(figures, readers, mover)
    assert not readers.errors, (len(readers.errors), readers.errors[:5])
    lines = [line for line in node.worker.lines if "Traceback" in line or "[error" in line]
    assert not lines, lines[:20]
    assert readers.counts["pictures"] > SECONDS / 5 and readers.counts["models read"] > 1
    for ref in refs:
        last = ImageLayout(node.aimage.store)
        until(lambda: not any(each["drift"] for each in node.status()["models"]), f"{ref} to move")
        assert str(last.resolve(Reference.parse(ref)).digest) == node.model(ref)["digest"]
    return figures


def tell(figures: list[Figures], readers: Readers, mover: Mover) -> None:
    """Print a summary."""
    text = f"{dict(readers.counts)}, {mover.moves} versions of 2 tags, {len(readers.errors)} errors"
    print(f"\n{text}")  # noqa: T201
    for second in sorted({1.0, 60.0, 300.0, WARM, SECONDS / 2, SECONDS}):
        if figures and second <= SECONDS:
            print(min(figures, key=lambda each: abs(each.at - second)))  # noqa: T201
