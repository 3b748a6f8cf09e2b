"""Measure a cold start: ``aimage --version`` against importing click alone.

    python -m benchmarks.startup [--runs 25]

Prints medians of interleaved runs, and their ratio; the goal is at most 1.2.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

AIMAGE = str(Path(sys.executable).with_name("aimage"))
COMMANDS = {
    "import click": [sys.executable, "-c", "import click"],
    "aimage --version": [AIMAGE, "--version"],
    "aimage ls": [AIMAGE, "--store", "/nonexistent", "ls"],
}


def seconds(command: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=25)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.runs):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    base = statistics.median(times["import click"])
    print("| command | median ms | ratio |\n|---|---|---|")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"| {name} | {median * 1000:.1f} | {median / base:.2f} |")


if __name__ == "__main__":
    main()
