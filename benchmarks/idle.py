"""Measure an idle node: all of its models are present, and nothing changes.

    python -m benchmarks.idle [--counts 1,100,500] [--rounds 5] [--seconds 10]
        [--layers 1200] [--settle 25]

For each number of models (of 1,200 layers each, as in store.py): the seconds from the start of the
node until it is ready, its CPU use of one core afterwards (median of the rounds), its resident
memory and its open files. The pull policy is Never, so there are no requests to a registry.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from benchmarks.store import AIMAGE, LAYERS, make_store, name_of


class Node:
    """``aimage node`` on a store of ``count`` models, all of them in its desired state."""

    def __init__(self, home: Path, count: int, layers: int) -> None:
        make_store(home / "store", count, layers, ours=True)
        (home / "desired").mkdir()
        wants = [{"ref": name_of(number), "pullPolicy": "Never"} for number in range(count)]
        (home / "desired" / "models.json").write_text(json.dumps(wants))
        command = [AIMAGE, "node", "--store", str(home / "store")]
        command += ["--desired", str(home / "desired")]
        command += ["--addr", "127.0.0.1:0", "--log-level", "error", "--high", "100"]
        self.begun = time.monotonic()
        self._process = subprocess.Popen(
            [*command, "--low", "100"], stdout=subprocess.PIPE, text=True, env=_env(home)
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        self._proc = Path("/proc") / str(self._process.pid)

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=60) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def cpu(self) -> float:
        """Return the CPU seconds used so far."""
        words = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def resident(self) -> float:
        """Return the resident memory in MiB."""
        pages = int((self._proc / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2

    def files(self) -> int:
        return len(list((self._proc / "fd").iterdir()))


def _env(home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AIMAGE_")}
    return kept | {"HOME": str(home)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--counts", default="1,100,500")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each round")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of each model")
    # recently changed files are read again for a while
    parser.add_argument("--settle", type=float, default=25.0, help="seconds before the first round")
    options = parser.parse_args()
    print("| models | ready after s | % of a core | resident MiB | open files |")
    print("|---|---|---|---|---|")
    for count in map(int, options.counts.split(",")):
        with tempfile.TemporaryDirectory() as home:
            node = Node(Path(home), count, options.layers)
            try:
                while not node.is_ready():
                    time.sleep(0.5)
                ready, used = time.monotonic() - node.begun, []
                time.sleep(options.settle)
                for _ in range(options.rounds):
                    before = node.cpu()
                    time.sleep(options.seconds)
                    used.append(100 * (node.cpu() - before) / options.seconds)
                share = statistics.median(used)
                facts = f"{share:.1f} | {node.resident():.0f} | {node.files()} |"
                print(f"| {count} | {ready:.1f} | {facts}", flush=True)
            finally:
                node.end()


if __name__ == "__main__":
    main()
