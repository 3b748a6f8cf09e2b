"""index.json: read whole, merged and replaced under a lock between processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clowder_aimage.errors import StoreError
from clowder_aimage.layout.fault import store_errors
from clowder_aimage.oci import mediatype

LAYOUT_FILE = b'{"imageLayoutVersion":"1.0.0"}'
MAX_INDEX_SIZE = 64 * 1024 * 1024


def read_index(root: Path) -> dict[str, Any]:
    """The parsed index.json, or an empty one where there is no store yet.

    Raises:
        StoreError: it is not an index, or absurdly large.
    """
    path = root / "index.json"
    with store_errors(root):
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_INDEX_SIZE + 1)
        except FileNotFoundError:
            if root.exists() and not root.is_dir():
                raise NotADirectoryError(20, "Not a directory", str(root)) from None
            return {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": []}
    return _parse(raw, path)


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    broken = StoreError(
        f"{path} is not an OCI index",
        hint="it was not written by aimage; move it away to begin with an empty one",
    )
    if len(raw) > MAX_INDEX_SIZE:
        raise broken
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise broken from None
    if isinstance(value, dict) and value.get("manifests", 0) is None:
        value["manifests"] = []  # how Go writes an empty list
    if not isinstance(value, dict) or not isinstance(value.get("manifests"), list):
        raise broken
    return value


@contextlib.contextmanager
def edit_index(root: Path) -> Iterator[dict[str, Any]]:
    """The index to change in place; it replaces the old one when the block ends well.

    Fields and entries that we do not know stay as they were.
    """
    with _lock(root):
        value = read_index(root)
        before = json.dumps(value)
        yield value
        if json.dumps(value) != before or not (root / "index.json").exists():
            replace_file(root, "index.json", json.dumps(value, indent=1).encode() + b"\n")


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[None]:
    """Hold the store's writer lock; it goes with the process, however that ends."""
    with store_errors(root):
        (root / ".aimage").mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(root / ".aimage" / "lock", flags, 0o660)
    try:
        with store_errors(root):
            fcntl.flock(fd, fcntl.LOCK_EX)
        if not (root / "oci-layout").exists():
            replace_file(root, "oci-layout", LAYOUT_FILE)
        yield
    finally:
        os.close(fd)


def replace_file(root: Path, name: str, data: bytes) -> None:
    """Replace a file of the store so that every reader sees the old or the new one, whole."""
    temporary = root / ".aimage" / f"{name}.{secrets.token_hex(8)}"
    with store_errors(root):
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(root / name)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(root)


def sync_directory(path: Path) -> None:
    """Make renames into a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
