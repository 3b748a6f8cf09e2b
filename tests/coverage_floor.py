"""Compare the coverage of each package with its floor: ``coverage_floor.py coverage.json``.

``coverage json`` writes the file after ``make test-all`` with branch coverage.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

# Per cent of lines and branches together, rounded down; "." is the root's modules
FLOORS = {
    ".": 97,
    "api": 95,
    "cli": 93,
    "content": 97,
    "dialect": 98,
    "distribution": 53,  # most of its tests serve in a process of their own, which is not measured
    "engine": 88,
    "exporter": 97,
    "formats": 97,
    "http": 87,
    "importer": 98,
    "layout": 96,
    "model": 96,
    "node": 94,
    "oci": 99,
    "registry": 97,
    "tensor": 98,
}
COUNTS = ("num_statements", "num_branches", "covered_lines", "covered_branches")


def coverage(report: Path) -> dict[str, float]:
    """Return the coverage of each package in per cent."""
    packages: dict[str, Counter[str]] = {}
    for name, found in json.loads(report.read_text())["files"].items():
        parts = Path(name).parts
        parts = parts[parts.index("clowder_aimage") + 1 :]
        counts = packages.setdefault(parts[0] if len(parts) > 1 else ".", Counter())
        counts.update({key: found["summary"].get(key, 0) for key in COUNTS})
    return {
        name: 100
        * (counts["covered_lines"] + counts["covered_branches"])
        / max(1, counts["num_statements"] + counts["num_branches"])
        for name, counts in sorted(packages.items())
    }


def main() -> int:
    """Print a table; return 1 if a package is below its floor."""
    found = coverage(Path(sys.argv[1]))
    for name, share in found.items():
        floor = FLOORS.get(name, 0)
        print(f"{name:14}{share:6.1f} %  floor {floor} %{'  BELOW' if share < floor else ''}")
    return int(any(share < FLOORS.get(name, 0) for name, share in found.items()))


if __name__ == "__main__":
    sys.exit(main())
