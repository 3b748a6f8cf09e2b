"""How much memory this machine has for a worker, or the container that it runs in."""

from __future__ import annotations

import os
from pathlib import Path

_PART = 0.8  # of it: the system, and whatever else runs, have the rest
_FILES = ("memory.max", "memory.limit_in_bytes")  # of version 2 and version 1


def memory(root: Path = Path("/")) -> int | None:
    """Bytes that may be used; None where the system does not say."""
    found = [size for size in (_physical(), *_limits(root)) if size]
    return int(min(found) * _PART) if found else None


def _physical() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def _limits(root: Path) -> list[int]:
    """What control groups allow: that of this process, and each that it is in.

    Linux, Documentation/admin-guide/cgroup-v2.rst ("memory.max") and cgroup-v1/memory.rst; lines
    of /proc/self/cgroup are ``NUMBER:CONTROLLERS:PATH``, with no controllers for version 2.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inner = mount / path.lstrip("/")
        # in a container the path may be the host's, and what is mounted is the container's own
        for group in (inner, *inner.parents):
            if group == mount or mount in group.parents:
                found += [_number(group / name) for name in _FILES]
    return [size for size in found if 0 < size < 1 << 60]  # version 1 writes a huge one for none


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0  # "max"
