"""Measure a cold start: ``aimage --version`` against importing click alone.

    python -m benchmarks.startup

Prints medians of 25 runs, interleaved, and their ratio; the goal is at most 1.2.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 25
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
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    base = statistics.median(times["import click"])
    print("| command | median ms | ratio |\n|---|---|---|")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"| {name} | {median * 1000:.1f} | {median / base:.2f} |")


if __name__ == "__main__":
    main()
