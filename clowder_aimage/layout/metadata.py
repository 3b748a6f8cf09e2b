"""Private metadata of a store: small JSON objects, each in a separate file.

Processes that write different keys do not interfere, with or without locks; one key is replaced
atomically. An unreadable file is an error, so that pinned content is never removed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from clowder_aimage.content.atomic_file import open_atomic, sync_directory, write_all
from clowder_aimage.content.file_system import read_again
from clowder_aimage.content.open_directory import unlink
from clowder_aimage.errors import FormatError
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_own,
    make_directory,
    open_regular,
    share,
    translate_store_errors,
)
from clowder_aimage.oci import read_json

_MAX_SIZE = 1024 * 1024


class MetadataFiles:
    """The files in ``.aimage/<kind>``: JSON objects with their key in ``key``."""

    def __init__(self, root: Path, kind: str) -> None:
        self._root, self._kind = root, kind
        self._directory = os.path.join(root, PRIVATE, kind)

    def list_names(self) -> set[str]:
        """Return the names of the files (see ``build_file_name``). Raises StoreError."""
        directory = check_own(self._root, self._kind)
        with translate_store_errors(self._root), contextlib.suppress(FileNotFoundError):
            return {name for name in os.listdir(directory) if "." not in name}
        return set()

    def iter_items(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield all keys and their values, in arbitrary order. Raises StoreError."""
        for name in self.list_names():
            if (value := self.read(name)) is not None:
                yield value["key"], value

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the value of ``key``, or None. Raises StoreError."""
        check_own(self._root, self._kind)
        value = self.read(build_file_name(key))
        return value if value is not None and value["key"] == key else None

    def get_protected(self, key: str) -> dict[str, Any] | None:
        """Return the value of ``key`` as ``get`` does; None if another user may have written it.

        Those are users other than this one and root, and the groups of the file.
        """
        check_own(self._root, self._kind)
        value = self._read(build_file_name(key), _read_protected_file)
        return value if value is not None and value["key"] == key else None

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the value in a file; None if it is missing or damaged. Raises StoreError."""
        return self._read(name, _read_file)

    def _read(self, name: str, read_file: Callable[[str], bytes]) -> dict[str, Any] | None:
        path = os.path.join(self._directory, name)
        with translate_store_errors(self._root):
            try:
                raw = read_again(functools.partial(read_file, path))
            except FileNotFoundError:
                return None
            except OSError as error:
                error.filename = error.filename or path
                raise
        try:
            value = read_json(raw, name)
        except FormatError:
            return None
        return value if isinstance(value, dict) and isinstance(value.get("key"), str) else None

    def put(self, key: str, value: dict[str, Any], *, durable: bool) -> None:
        """Write the value of ``key``. Raises StoreError or NoSpaceError."""
        data = json.dumps({"key": key} | value).encode()
        with translate_store_errors(self._root):
            make_directory(self._root, PRIVATE, self._kind)
            write_shared(
                os.path.join(self._directory, build_file_name(key)), (data,), durable=durable
            )

    def restore(self, key: str, value: dict[str, Any] | None) -> None:
        """Write back the result of ``get``. Raises StoreError or NoSpaceError."""
        if value is None:
            self.remove(key)
        elif self.get(key) != value:
            self.put(key, value, durable=True)

    def remove(self, key: str) -> None:
        """Remove ``key``, durably. Raises StoreError."""
        check_own(self._root, self._kind)
        with translate_store_errors(self._root), contextlib.suppress(FileNotFoundError):
            unlink(os.path.join(self._directory, build_file_name(key)))
            sync_directory(self._directory)


def _read_file(path: str) -> bytes:
    with open(open_regular(path), "rb", buffering=0) as file:
        return file.read(_MAX_SIZE) or b""


def _read_protected_file(path: str) -> bytes:
    """Return the bytes of a file that only this user and root may write, else none."""
    with open(open_regular(path), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        is_own = status.st_uid in (os.geteuid(), 0)
        if not is_own or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return b""
        return file.read(_MAX_SIZE) or b""


@functools.lru_cache(maxsize=4096)
def build_file_name(key: str) -> str:
    """Return the name of the file of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def write_shared(
    path: str | Path,
    parts: Iterable[bytes | memoryview],
    *,
    durable: bool = True,
    directory: Path | None = None,
    time_ns: int | None = None,
    on_written: Callable[[os.stat_result], object] | None = None,
) -> None:
    """Replace a file of the store by ``parts``, shared with the directory's group. Raises OSError.

    ``time_ns`` becomes its time of change, if the file system accepts that. ``on_written`` is
    called with its status before it gets its name.
    """
    final = Path(path)

    def finish(fd: int) -> None:
        # What follows is short: another tool may replace the file meanwhile
        if on_written is not None:
            on_written(os.fstat(fd))

    with open_atomic(
        final,
        mode=0o644,
        durable=durable,
        directory=directory,
        prepare=functools.partial(share, directory=final.parent, mode=0o664),
        finish=finish,
    ) as to:
        for part in parts:
            write_all(to.fileno(), part)
        if time_ns is not None:
            with contextlib.suppress(OSError):
                os.utime(to.fileno(), ns=(time_ns, time_ns))
