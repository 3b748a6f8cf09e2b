"""Compare the coverage of each package with its floor: ``python -m tests.coverage_floor FILE``.

``coverage json`` writes the file after ``make test-all`` with branch coverage.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from tests.budget import PACKAGES

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
    below = []
    for name, (_, floor) in PACKAGES.items():
        share = found.pop(name, 0.0)
        below += [name] * (share < floor)
        print(f"{name:14}{share:6.1f} %  floor {floor} %{'  BELOW' if share < floor else ''}")
    for name in found:
        print(f"{name:14} has no floor")
    return int(bool(below or found))


if __name__ == "__main__":
    sys.exit(main())
