"""How much memory a new process may have now without another one losing any."""

from __future__ import annotations

from pathlib import Path


def available(root: Path = Path("/")) -> int | None:
    """Bytes; None where the system does not say.

    Linux, Documentation/filesystems/proc.rst ("MemAvailable"), and what the control groups of this
    process leave: Documentation/admin-guide/cgroup-v2.rst ("memory.max", "memory.current";
    "inactive_file" of memory.stat is given back when it is needed).
    """
    found = [size for size in (_of_machine(root), *_of_groups(root)) if size is not None]
    return max(0, min(found)) if found else None


def _of_machine(root: Path) -> int | None:
    kilobytes = _fields(root / "proc/meminfo").get("MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _of_groups(root: Path) -> list[int]:
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        path = next(line.removeprefix("0::") for line in lines if line.startswith("0::"))
    except (OSError, UnicodeDecodeError, StopIteration):
        return []
    inner = mount / path.lstrip("/")
    # in a container the path may be the host's, and what is mounted is the container's own
    groups = [group for group in (inner, *inner.parents) if group.is_relative_to(mount)]
    return [left for group in groups if (left := _left(group)) is not None]


def _left(group: Path) -> int | None:
    try:
        most = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # "max", or the root, which has none
        return None
    return most - used + _fields(group / "memory.stat").get("inactive_file", 0)


def _fields(file: Path) -> dict[str, int]:
    """The lines ``NAME NUMBER`` of a file of the system."""
    try:
        words = [line.split() for line in file.read_text().splitlines()]
        return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
    except (OSError, ValueError):
        return {}
