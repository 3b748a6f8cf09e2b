"""Compare the coverage of each package with its floor: ``python -m tests.coverage_floor FILE``.

``coverage json`` writes the file after ``make test-all`` with branch coverage.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

# The least coverage of each package, of lines and branches together, in per cent, rounded down.
# It only rises. "." is the root.
FLOORS = {
    ".": 96,
    "adapter": 96,
    "api": 96,
    "bom": 95,
    "cli": 93,
    "client": 96,
    "config": 98,
    "content": 97,
    "dialect": 98,
    "distribution": 75,  # most of its tests serve in a child process
    "document": 97,
    "engine": 91,
    "exporter": 97,
    "family": 97,
    "fleet": 93,
    "formats": 97,
    "generation": 97,
    "http": 91,
    "importer": 97,
    "layout": 96,
    "model": 96,
    "node": 96,
    "oci": 99,
    "pictures": 96,
    "registry": 97,
    "tensor": 98,
    "trust": 86,
}
COUNTS = ("num_statements", "num_branches", "covered_lines", "covered_branches")


def coverage(report: Path) -> dict[str, float]:
    """Return the coverage of each package in per cent."""
    packages: dict[str, Counter[str]] = {}
    for name, file in json.loads(report.read_text())["files"].items():
        parts = Path(name).parts
        parts = parts[parts.index("clowder_aimage") + 1 :]
        counts = packages.setdefault(parts[0] if len(parts) > 1 else ".", Counter())
        counts.update({key: file["summary"].get(key, 0) for key in COUNTS})
    return {
        name: 100
        * (counts["covered_lines"] + counts["covered_branches"])
        / max(1, counts["num_statements"] + counts["num_branches"])
        for name, counts in sorted(packages.items())
    }


def main() -> int:
    """Print a table; return 1 if a package is below its floor."""
    shares = coverage(Path(sys.argv[1]))
    below = []
    for name, floor in FLOORS.items():
        share = shares.pop(name, 0.0)
        below += [name] * (share < floor)
        print(f"{name:14}{share:6.1f} %  floor {floor} %{'  BELOW' if share < floor else ''}")
    for name in shares:
        print(f"{name:14} has no floor")
    return int(bool(below or shares))


if __name__ == "__main__":
    sys.exit(main())
