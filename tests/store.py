"""Copies of stores that share their blobs, and blobs that are read or damaged."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from clowder_aimage.oci import Descriptor
from tests.wait import until

# Mode, modification time and size of each shared blob when it was linked first
_linked: dict[Path, tuple[int, int, int]] = {}


def copy_store(source: Path, target: Path) -> Path:
    """Copy a store to ``target``, which must not exist, and return that. Blobs are hard links.

    A test calls ``unshare`` before it damages a blob. Raises AssertionError if one did not.
    """
    shutil.copytree(source, target, copy_function=_link_blob)
    return target


def _link_blob(source: str, target: str) -> None:
    if "/blobs/" not in source:
        shutil.copy2(source, target)
        return
    path = Path(source)
    Path(target).hardlink_to(path)
    status = path.stat()
    state = status.st_mode, status.st_mtime_ns, status.st_size
    assert _linked.setdefault(path, state) == state, f"{source} was changed by a test"


def unshare(path: Path) -> None:
    """Make a blob a writable file of its own, with the same content and times."""
    status, content = path.stat(), path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def read(store: Any, content: Descriptor, *span: int | None) -> bytes:
    """Return the bytes of a content, or of its ``span``: an offset and a length."""
    with store.open(content, *span) as file:
        data: bytes = file.read()
        return data


def pass_tick(directory: Path) -> None:
    """Wait until a file that is written gets a later time than all files before."""
    probe = directory / "clock"
    probe.touch()
    before = probe.stat().st_mtime_ns

    def is_later() -> bool:
        probe.touch()
        return probe.stat().st_mtime_ns > before

    until(is_later, "the clock of the file system to go on")
    probe.unlink()
