"""A small file system for tests of full disks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.nodes import MIB
from tests.process import run


class Disk:
    """A file system mounted at ``root``. A ballast file takes up space until ``drop``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ballast = root / "ballast"

    @property
    def free(self) -> int:
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Write until no more than ``leave`` bytes are free."""
        with self._ballast.open("ab", buffering=0) as file:
            while self.free > leave:
                try:
                    file.write(bytes(min(MIB, self.free - leave)))
                except OSError:
                    break

    def drop(self) -> None:
        """Delete the ballast file."""
        self._ballast.unlink()


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[Disk]:
    """Mount a tmpfs of ``size`` bytes, or skip the test if that is not possible."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        done = run(mount, timeout=60)
    except OSError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.decode().strip()}")
    try:
        yield Disk(place)
    finally:
        run(["umount", "-l", str(place)], check=True, timeout=60)
