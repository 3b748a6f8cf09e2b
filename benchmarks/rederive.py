"""Measure ``aimage verify --rederive`` against ``convert``: ``python -m benchmarks.rederive``.

    python -m benchmarks.rederive [--gib 0.25] [--rounds 3] [--jobs N] [--to TYPE]...
                                  [--directory DIR]

A Z-Image directory whose transformer has ``--gib`` GiB of random BF16 is packed. Each round
converts it, computes the result again, and removes it: both in processes of their own. Figures are
medians of seconds, and of ratios of the pairs.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.create import make_model
from clowder_aimage.importer.recipe import DTYPES

Cost = tuple[float, float]  # seconds, and those of processors
SHARDS = 2


def run(store: Path, *words: str) -> Cost:
    """Run a verb, and return what it took."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "clowder_aimage", "-q", "--store", str(store), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(store: Path, kind: str, jobs: list[str], rounds: int) -> list[tuple[Cost, Cost]]:
    """Return the costs of both verbs, in pairs."""
    option, pairs = "--dtype" if kind in DTYPES else "--quantize", []
    for _ in range(rounds):
        converted = run(store, "convert", "m", "d", option, kind, *jobs)
        pairs.append((converted, run(store, "verify", "d", "--rederive", *jobs)))
        run(store, "rm", "d", "--gc")
    return pairs


def print_rows(kind: str, pairs: list[tuple[Cost, Cost]]) -> None:
    converted, computed = (
        [statistics.median(costs) for costs in zip(*side, strict=True)]
        for side in zip(*pairs, strict=True)
    )
    ratios = [statistics.median(after[i] / before[i] for before, after in pairs) for i in range(2)]
    print(f"| convert {kind} | {converted[0]:.2f} | {converted[1]:.2f} | | |")
    cells = " | ".join(f"{value:.2f}" for value in (*computed, *ratios))
    print(f"| rederive {kind} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--to", action="append", metavar="TYPE")
    parser.add_argument("--directory", type=Path)
    chosen = parser.parse_args()
    jobs = ["--jobs", str(chosen.jobs)] if chosen.jobs else []
    with tempfile.TemporaryDirectory(dir=chosen.directory) as scratch:
        home = Path(scratch)
        os.environ["HOME"] = scratch
        make_model(home / "model", int(chosen.gib * 2**30), SHARDS)
        run(home / "store", "create", "m", str(home / "model"))
        print("| | s | processor s | ratio | ratio of processor s |\n|---|---|---|---|---|")
        for kind in chosen.to or ["int8"]:
            print_rows(kind, measure(home / "store", kind, jobs, chosen.rounds))


if __name__ == "__main__":
    main()
