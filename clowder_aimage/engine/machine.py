"""The memory of this machine, or of the container of this process.

Sources: Linux, Documentation/filesystems/proc.rst ("MemAvailable"),
Documentation/admin-guide/cgroup-v2.rst ("memory.max", "memory.current"; "inactive_file" of
memory.stat is reclaimable) and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

# Share of the memory for models; the system and other processes need the rest
_SHARE = 0.8
# The files of cgroup version 2 and version 1
_LIMITS = ("memory.max", "memory.limit_in_bytes")
# Words in the messages of MLX and its libraries
_NO_MEMORY = ("allocate", "out of memory", "bad_alloc")
# Version 1 reports a huge number for no limit
_UNLIMITED = 1 << 60


def read_memory_limit(root: Path = Path("/")) -> int | None:
    """Return the number of bytes that a worker may use; None if unknown."""
    sizes = [size for size in (read_physical_memory(), read_group_limit(root)) if size]
    return int(min(sizes) * _SHARE) if sizes else None


def read_group_limit(root: Path = Path("/")) -> int | None:
    """Return the limit of the control groups of this process in bytes; None without one."""
    limits = (_read_number(group / name) for group in _iter_groups(root) for name in _LIMITS)
    return min((size for size in limits if 0 < size < _UNLIMITED), default=None)


def read_available_memory(root: Path = Path("/")) -> int | None:
    """Return the number of bytes available to a new process; None if unknown."""
    kilobytes = _read_fields(root / "proc/meminfo").get("MemAvailable:")
    sizes = [] if kilobytes is None else [kilobytes * 1024]
    for group in _iter_groups(root):
        limit, usage = _read_number(group / "memory.max"), _read_number(group / "memory.current")
        if limit and usage:
            sizes.append(
                limit - usage + _read_fields(group / "memory.stat").get("inactive_file", 0)
            )
    return max(0, min(sizes)) if sizes else None


def read_physical_memory() -> int:
    """Return the memory of the machine in bytes; 0 if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def _iter_groups(root: Path) -> Iterator[Path]:
    """Yield the control groups of this process, innermost first.

    Lines of /proc/self/cgroup are ``NUMBER:CONTROLLERS:PATH``, without controllers in version 2.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inner = mount / path.lstrip("/")
        # In a container, the path may be the host's while the container's group is mounted
        yield from (group for group in (inner, *inner.parents) if group.is_relative_to(mount))


def _read_number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        # Also for "max", the text for no limit
        return 0


def _read_fields(file: Path) -> dict[str, int]:
    """Parse the lines ``NAME NUMBER`` of a system file."""
    try:
        words = [line.split() for line in file.read_text().splitlines()]
        return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
    except (OSError, ValueError):
        return {}


def limit_memory(share: int | None) -> None:
    """Make allocations beyond the machine's memory fail, before the system ends other processes.

    ``share`` is a result of ``memory``.
    """
    if sys.platform == "linux" and share is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        # The inverse of _SHARE: the limit is the whole memory
        total = share * 5 // 4
        soft = total if hard == resource.RLIM_INFINITY else min(total, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def lacks_memory(error: Exception) -> bool:
    """Return True if an allocation failed. MLX raises a RuntimeError then."""
    text = str(error).lower()
    is_of_mlx = isinstance(error, RuntimeError) and any(word in text for word in _NO_MEMORY)
    return isinstance(error, MemoryError) or is_of_mlx
