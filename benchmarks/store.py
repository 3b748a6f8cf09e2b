"""Measure verbs on a store with many AImages, and the cost of durable writes.

    python -m benchmarks.store [--counts 100,1000] [--rounds 5] [--verbs] [--registry]
        [--durability] [--directory DIR]

The default is ``--verbs`` and ``--durability``.

--verbs       ls, tag, rm, gc --dry-run and du on stores of N AImages with 1,200 layers each, of
              which nine tenths are shared by all. In one variant the tags were written by another
              tool, without our records; in the other by aimage.
--registry    ``aimage registry serve`` on stores of N AImages with four layers each: a PUT of a new
              tag, the GET after it, a further GET, and a DELETE of the tag.
--durability  1,200 blobs of 64 KiB to 1 MiB into an empty store from 8 threads: with the default
              settings, without fsync, and left in the page cache entirely. The disk is idle before
              each run.

Rounds are interleaved; the tables show medians. The stores are created mostly without our code:
blobs are tiny files, so that N = 1,000 takes half a GiB, most of it manifests.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest import mock

from clowder_aimage.content import build_bytes_body
from clowder_aimage.layout import ImageLayout, direct_io, group_commit
from clowder_aimage.layout.metadata import MetadataFiles
from clowder_aimage.oci import Descriptor, mediatype

AIMAGE = str(Path(sys.executable).with_name("aimage"))
LAYERS, SHARED = 1200, 0.9
BARS = {"ls": 0.4, "tag": 0.4, "gc --dry-run": 5.0}  # seconds, for 1,000 AImages
THREADS = 8
KIB = 1024


# -- the verbs


def make_store(root: Path, count: int, layers: int, *, ours: bool) -> None:
    """Create a store of ``count`` AImages; with ``ours``, as if aimage had written all tags."""
    blobs = root / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    common = [_layer(blobs, f"common/{number}") for number in range(int(layers * SHARED))]
    own = layers - len(common)
    entries = []
    for which in range(count):
        config = _keep(blobs, json.dumps({"name": f"model {which}"}).encode())
        document = {
            "schemaVersion": 2,
            "mediaType": mediatype.OCI_MANIFEST,
            "artifactType": mediatype.AIMAGE_MANIFEST,
            "config": {"mediaType": mediatype.AIMAGE_CONFIG, **config},
            "layers": common + [_layer(blobs, f"{which}/{number}") for number in range(own)],
        }
        entry = {
            "mediaType": mediatype.OCI_MANIFEST,
            **_keep(blobs, json.dumps(document, separators=(",", ":")).encode()),
            "annotations": {mediatype.REF_NAME: name_of(which)},
        }
        if ours:
            entry["annotations"][mediatype.CONTAINERD_NAME] = name_of(which)
            MetadataFiles(root, "names").put(name_of(which), {"entry": entry}, durable=False)
        entries.append(entry)
    (root / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    index = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": entries}
    (root / "index.json").write_text(json.dumps(index, indent=1))
    if ours:
        ImageLayout(root).write_index()


def name_of(which: int) -> str:
    return f"registry.example.com/bench/model-{which}:v1"


def _keep(blobs: Path, data: bytes) -> dict[str, Any]:
    encoded = hashlib.sha256(data).hexdigest()
    fd = os.open(f"{blobs}/{encoded}", os.O_WRONLY | os.O_CREAT, 0o444)
    os.write(fd, data)
    os.close(fd)
    return {"digest": f"sha256:{encoded}", "size": len(data)}


def _layer(blobs: Path, name: str) -> dict[str, Any]:
    return {
        "mediaType": mediatype.AIMAGE_SAFETENSORS,
        **_keep(blobs, name.encode()),
        "annotations": {
            mediatype.NAME: f"transformer/layers.{name.replace('/', '.')}.weight",
            mediatype.DTYPE: "BF16",
            mediatype.SHAPE: "[3840,3840]",
        },
    }


def seconds(root: Path, *arguments: str) -> float:
    """Return the seconds that a verb takes."""
    begun = time.perf_counter()
    subprocess.run([AIMAGE, "--store", str(root), *arguments], check=True, capture_output=True)
    return time.perf_counter() - begun


def has_verb(name: str) -> bool:
    return subprocess.run([AIMAGE, name, "--help"], capture_output=True).returncode == 0


def one_round(root: Path, number: int) -> Iterator[tuple[str, float]]:
    """Run each verb once."""
    shutil.rmtree(root / ".aimage" / "listing", ignore_errors=True)
    yield "ls, the first", seconds(root, "ls")
    yield "ls", seconds(root, "ls")
    yield "tag", seconds(root, "tag", name_of(number), "copy:v1")
    yield "rm", seconds(root, "rm", "copy:v1")
    yield "gc --dry-run", seconds(root, "gc", "--dry-run")
    if has_verb("du"):
        yield "du", seconds(root, "du")


def measure_verbs(directory: Path, counts: list[int], layers: int, rounds: int) -> None:
    """Print the table of the verbs."""
    stores = {}
    for ours in (False, True):
        for count in counts:
            root = directory / f"store-{count}-{'ours' if ours else 'theirs'}"
            shutil.rmtree(root, ignore_errors=True)
            make_store(root, count, layers, ours=ours)
            stores["aimage" if ours else "another tool", count] = root
    os.sync()
    times: dict[str, dict[tuple[str, int], list[float]]] = {}
    for number in range(rounds):
        for key, root in stores.items():
            for verb, took in one_round(root, number):
                times.setdefault(verb, {}).setdefault(key, []).append(took)
    _print_table("verb", times, counts)


def _print_table(
    title: str, times: dict[str, dict[tuple[str, int], list[float]]], counts: list[int]
) -> None:
    print(f"\n| {title} | names set by | " + " | ".join(f"N = {n:,}, s" for n in counts), end="")
    print(" | growth | bar s |\n|---|---|" + "---|" * (len(counts) + 2))
    for verb, values in times.items():
        for who in sorted({who for who, _ in values}, reverse=True):
            medians = [statistics.median(values[who, count]) for count in counts]
            growth = f"{medians[-1] / medians[0]:.1f}x for {counts[-1] / counts[0]:.0f}x"
            cells = [verb, who, *(f"{median:.3g}" for median in medians), growth]
            print("| " + " | ".join([*cells, str(BARS.get(verb, ""))]) + " |")


# -- the registry


@contextlib.contextmanager
def serve(root: Path) -> Iterator[tuple[HTTPConnection, int]]:
    """Yield a connection to a registry that serves the store, and the id of its process."""
    command = [AIMAGE, "--store", str(root), "registry", "serve", "--addr", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().decode().split("://")[-1].strip().rstrip("/")
            yield HTTPConnection(address, timeout=600), process.pid
        finally:
            process.terminate()


def ask(connection: HTTPConnection, method: str, path: str, body: bytes = b"") -> float:
    """Return the seconds that a request takes."""
    begun = time.perf_counter()
    headers = {"Content-Type": mediatype.OCI_MANIFEST, "Accept": mediatype.OCI_MANIFEST}
    connection.request(method, f"/v2/bench/pushed/{path}", body, headers)
    response = connection.getresponse()
    answer = response.read()
    if response.status >= 300:
        raise SystemExit(f"{method} {path}: {response.status} {answer!r}")
    return time.perf_counter() - begun


def read_cpu(pid: int) -> float:
    """Return the CPU seconds of the threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def read_memory(pid: int) -> tuple[int, int]:
    """Return the resident memory of a process and its peak, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    size, peak = (int(fields[name].split()[0]) // KIB for name in ("VmRSS", "VmHWM"))
    return size, peak


def measure_registry(directory: Path, counts: list[int], rounds: int) -> None:
    """Print the table of the requests."""
    config = b"{}"
    entry = {"mediaType": mediatype.AIMAGE_CONFIG, "digest": "", "size": len(config)}
    entry["digest"] = f"sha256:{hashlib.sha256(config).hexdigest()}"
    document = {"schemaVersion": 2, "mediaType": mediatype.OCI_MANIFEST, "config": entry}
    manifest = json.dumps(document | {"layers": []}).encode()
    times: dict[str, dict[tuple[str, int], list[float]]] = {}
    with contextlib.ExitStack() as stack:
        roots = {count: directory / f"registry-{count}" for count in counts}
        for count, root in roots.items():
            shutil.rmtree(root, ignore_errors=True)
            make_store(root, count, 4, ours=True)
        servers = {}
        for count, root in roots.items():
            servers[count] = connection, _ = stack.enter_context(serve(root))
            ask(connection, "POST", f"blobs/uploads/?digest={entry['digest']}", config)
            # The first write compares all names
            ask(connection, "PUT", "manifests/first", manifest)
        for number in range(rounds):
            for count, (connection, pid) in servers.items():
                path = f"manifests/v{number}"
                for name, method, body in (
                    ("PUT of a tag", "PUT", manifest),
                    ("GET after it", "GET", b""),
                    ("GET", "GET", b""),
                    ("DELETE", "DELETE", b""),
                ):
                    before = read_cpu(pid)
                    took = ask(connection, method, path, body)
                    cpu = read_cpu(pid) - before
                    times.setdefault(name, {}).setdefault(("aimage", count), []).append(took)
                    key = f"{name}, CPU"
                    times.setdefault(key, {}).setdefault(("aimage", count), []).append(cpu)
        for count, (_, pid) in servers.items():
            size, peak = read_memory(pid)
            print(f"{count:,} names: {size} MiB in memory, {peak} MiB at most")
    _print_table("request", times, counts)


# -- durability


def make_blobs(count: int) -> list[tuple[Descriptor, bytes]]:
    rng = random.Random(7)
    data = [os.urandom(int(64 * KIB * 2 ** rng.uniform(0, 4))) for _ in range(count)]
    return [(Descriptor.of("application/vnd.example.weights", blob), blob) for blob in data]


@contextlib.contextmanager
def hasty(*, cached: bool) -> Iterator[None]:
    """Skip fsync and syncfs; if ``cached``, leave all writes in the page cache."""
    flag = 0 if cached else direct_io._DIRECT
    with (
        mock.patch.object(os, "fsync", lambda fd: None),
        mock.patch.object(group_commit, "sync_file_system", lambda fd: True),
        mock.patch.object(direct_io, "_DIRECT", flag),
    ):
        yield


def write_all(root: Path, blobs: list[tuple[Descriptor, bytes]]) -> float:
    """Return the seconds to write all blobs to a new store."""
    shutil.rmtree(root, ignore_errors=True)
    os.sync()
    layout = ImageLayout(root)
    begun = time.perf_counter()
    with layout.begin_batch(), ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda one: layout.push(one[0], build_bytes_body(one[1])), blobs))
    return time.perf_counter() - begun


def measure_durability(directory: Path, count: int, rounds: int) -> None:
    """Print the table of the cost of fsync."""
    blobs, root = make_blobs(count), directory / "durable"
    write_all(root, blobs)  # warms up the directory's blocks, the threads, the allocator
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        with hasty(cached=False):
            times.setdefault("without fsync", []).append(write_all(root, blobs))
        times.setdefault("durable", []).append(write_all(root, blobs))
        with hasty(cached=True):
            times.setdefault("in the page cache alone", []).append(write_all(root, blobs))
    shutil.rmtree(root)
    reference = statistics.median(times["without fsync"])
    size = sum(content.size for content, _ in blobs) / KIB / KIB
    print(f"\n| {count:,} blobs, {size:.0f} MiB, {THREADS} threads | s | ratio |\n|---|---|---|")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.2f} | {median / reference:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--counts", default="100,1000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--verbs", action="store_true")
    parser.add_argument("--registry", action="store_true")
    parser.add_argument("--durability", action="store_true")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of each AImage")
    parser.add_argument("--blobs", type=int, default=1200, help="to be written durably")
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    both = not (options.verbs or options.registry or options.durability)
    with contextlib.ExitStack() as stack:
        directory = options.directory
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        counts = [int(n) for n in options.counts.split(",")]
        if options.registry:
            measure_registry(directory, counts, options.rounds)
        if both or options.verbs:
            measure_verbs(directory, counts, options.layers, options.rounds)
        if both or options.durability:
            measure_durability(directory, options.blobs, options.rounds)


if __name__ == "__main__":
    main()
