"""Find the calls that the file system of a store lacks, by trying each on a temporary file."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from clowder_aimage.content import file_system
from clowder_aimage.content.atomic_file import build_temporary_name, write_all
from clowder_aimage.content.file_system import Limit, collect_limits
from clowder_aimage.content.mount import find_mount
from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.layout.lock import PRIVATE


def find_limits(root: Path) -> set[Limit] | None:
    """Return the limits of a store's file system; None if the store is missing or read-only."""
    private = root / PRIVATE
    try:
        # The store may be about to be created
        place = private if private.is_dir() else root
        with collect_limits() as limits, OpenDirectory(place) as directory:
            _try_calls(directory)
    except OSError:
        return None
    mount = find_mount(root)
    if Limit.LOCKS not in limits and mount.is_network and mount.has_local_locks:
        limits.add(Limit.HOST_LOCKS)
    return limits


def _try_calls(directory: OpenDirectory) -> None:
    # The collection of the store removes such files of killed processes.
    name = build_temporary_name(Path("probe"))
    path = directory.path / name
    fd = directory.create(name, 0o600)
    try:
        if not file_system.lock(fd, fcntl.LOCK_EX):
            file_system.report_limit(Limit.LOCKS, path)
        write_all(fd, b"x")
        file_system.sync_file(fd, path)
        file_system.set_mode(fd, 0o400, path)
        file_system.set_current_time(path)
        directory.sync()
        file_system.measure_space(directory.path)
    finally:
        os.close(fd)
        directory.remove(name)
