"""The processor cores and the memory of this machine. Nothing here imports a library."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any


@cache
def count_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity: Any = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def count_limited_cores() -> int | None:
    """Return the number of cores of this process if it may not use all, else None.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, "cpu.max".
    """
    count, all_cores = count_cores(), os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        pass
    return count if count < all_cores else None


def get_machine_memory() -> int | None:
    """Return the memory of the machine in bytes, or None if it is unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
