"""The memory of this process."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


def read_resident_memory() -> int:
    """Return the resident memory of this process in bytes; its peak without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")
