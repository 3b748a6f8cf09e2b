"""Warnings about file systems that lack something that the store needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from clowder_aimage.content.file_system import Limit, find_existing
from clowder_aimage.content.mount import find_mount
from clowder_aimage.layout.limit import find_limits

# The inability, and its consequence. Without times, files are replaced instead: nothing is lost.
WORDS = {
    Limit.LOCKS: (
        "has no locks",
        "let only one command write at a time, or blobs are fetched twice and gc removes too much",
    ),
    Limit.HOST_LOCKS: ("has no locks between hosts", "let only one host write"),
    Limit.FILE_SYNC: ("cannot sync files", "a power failure may damage what was written last"),
    Limit.DIRECTORY_SYNC: (
        "cannot sync directories",
        "a power failure may undo the last changes",
    ),
    Limit.MODES: ("cannot set modes", "blobs are not write-protected"),
    Limit.FREE_SPACE: ("does not report its free space", "a download may fill it"),
}


def build_listener(
    stores: Iterable[Path], show: Callable[[str], object]
) -> Callable[[Limit, Path], None]:
    """Return a listener that shows one warning for each store, and each other file system."""
    roots, lock, shown = tuple(stores), threading.Lock(), set[object]()

    def warn(limit: Limit, path: Path) -> None:
        # A new store is synchronised in its parent.
        root = next((root for root in roots if _is_of(root, path)), None)
        place = root or _find_device(path)
        with lock:
            is_new = limit in WORDS and place not in shown
            shown.update([place] if is_new else [])
        if is_new:
            mount = find_mount(path)
            name = f"at {mount.point}" if root is None else f"of the store {root}"
            limits = {limit} | (set() if root is None else find_limits(root) or set())
            show(f"the file system {name} ({mount.type or 'unknown'}) {describe(limits)}")

    return warn


def _is_of(root: Path, path: Path) -> bool:
    """Return True if a path is in a store, or a parent of it on the same file system."""
    is_parent = path in root.parents and _find_device(path) == _find_device(root)
    return root == path or root in path.parents or is_parent


def _find_device(path: Path) -> int:
    return find_existing(path).stat().st_dev


def describe(limits: Iterable[Limit]) -> str:
    """Return the end of a sentence about limits: the missing calls and the consequences."""
    met = set(limits)
    if Limit.LOCKS in met:
        met.discard(Limit.HOST_LOCKS)
    inabilities, consequences = zip(*(WORDS[limit] for limit in WORDS if limit in met), strict=True)
    return f"{_join(inabilities)}: {_join(consequences)}"


def _join(parts: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
