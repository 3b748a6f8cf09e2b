"""Orphans in a store's private directory: what killed processes left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from clowder_aimage.content.atomic_file import flock
from clowder_aimage.layout.lock import PRIVATE, check_own, locks_work, store_errors

_TEMPORARY = re.compile(r".*\.[0-9a-f]{16}")
_ALGORITHMS = ("sha256", "sha512")


def remove_partials(root: Path, latest: float, *, dry_run: bool) -> list[int]:
    """Remove ingests that were last written before ``latest`` and that no process has open.

    Returns:
        The bytes on disk of each of them.

    Raises:
        StoreError: one cannot be removed.
    """
    directory = Path(check_own(root, "ingest"))
    removed: list[int] = []
    if not directory.is_dir():
        return removed
    can_lock = locks_work(root)
    for path in sorted(directory.glob("*")):
        if path.suffix == ".journal":
            continue
        is_anonymous = path.suffix != "" and can_lock  # no ingest will continue it
        with store_errors(root), contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                continue
            if not is_anonymous and status.st_mtime > latest:
                continue
            if _remove_idle(path, dry_run=dry_run):
                removed.append(status.st_blocks * 512)
    for journal in () if dry_run else sorted(directory.glob("*.journal")):
        if not journal.with_suffix("").exists():
            journal.unlink(missing_ok=True)
    return removed


def _remove_idle(path: Path, *, dry_run: bool) -> bool:
    """Remove an ingest that no process has open, and return whether that is so."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        return False  # another user's
    try:
        flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        if os.fstat(fd).st_ino != os.stat(path).st_ino:
            return False  # it was finished, and begun anew
        if not dry_run:
            os.unlink(path)
        return True
    finally:
        os.close(fd)


def _own(private: Path) -> Iterator[Path]:
    """Yield the files in our directories, except ingests."""
    for directory in private.glob("[!i]*"):
        if not directory.is_symlink():
            yield from directory.glob("*.*")


def tidy(root: Path, latest: float) -> None:
    """Remove metadata of missing manifests, and temporary files from before ``latest``."""
    private = root / PRIVATE
    for kind in ("used", "listing"):
        for path in Path(check_own(root, kind)).glob("*"):
            places = (root / "blobs" / algorithm / path.name for algorithm in _ALGORITHMS)
            if "." not in path.name and not any(place.exists() for place in places):
                with contextlib.suppress(OSError):
                    path.unlink()
    for path in [*private.glob("*.*"), *_own(private)]:
        if _TEMPORARY.fullmatch(path.name) or path.name.startswith("damaged."):
            with contextlib.suppress(OSError):
                if path.lstat().st_ctime < latest:  # a damaged blob keeps its old mtime
                    path.unlink()
