"""index.json: read as a whole, merged and replaced under an interprocess lock.

Other tools do not lock, and may overwrite changes. Every name that aimage sets is first recorded
beside the index (``.aimage/names``); one missing from the index is read from there and restored by
the next write. The fingerprint changes when a name or a blob is added or removed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import stat
import time
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

from clowder_aimage.content.atomic_file import sync_directory
from clowder_aimage.content.store import LAYOUT_FILE
from clowder_aimage.errors import FormatError, StoreError, UsageError
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_version,
    held,
    make_directory,
    read_settled,
    store_errors,
)
from clowder_aimage.layout.metadata import MetadataFiles, file_name, write_shared
from clowder_aimage.oci import Digest, Reference, mediatype, read_json

MAX_INDEX_SIZE = 64 * 1024 * 1024
_NAMES = (  # in order: containerd's exports have only the tag as ref.name
    mediatype.CONTAINERD_NAME,
    mediatype.CONTAINERD_NAME_MISSPELT,
    mediatype.REF_NAME,
)
_HINT = "another program wrote it; move it away to start with an empty index"
_Stamp = tuple[int, int, int]
# A file that changed within this time may change again with the same stamp: file systems have a
# time resolution of up to two seconds, and a server's clock may differ.
_SETTLED = 5 * 10**9  # nanoseconds


def read_index(root: Path) -> dict[str, Any]:
    """Return the parsed index.json with the recorded names; an empty one without a store.

    Raises StoreError: it cannot be read, is not an index, or too large.
    """
    return _restored(root, _read(root)[0])


def _read(root: Path) -> tuple[dict[str, Any], _Stamp | None]:
    """Return the content of the file, and a stamp that changes when the file does."""
    path = root / "index.json"
    check_version(root)
    with store_errors(root):
        try:
            return read_settled(lambda: _read_file(path), path, FormatError)
        except FormatError as error:  # a fault of the store, not of the content that is asked for
            raise StoreError(error.message, **error.advice) from None
        except FileNotFoundError:
            if root.exists() and not root.is_dir():
                raise NotADirectoryError(20, "Not a directory", str(root)) from None
    return {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": []}, None


def _read_file(path: Path) -> tuple[dict[str, Any], _Stamp]:
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path} is not a regular file", hint=_HINT)
        if status.st_size > MAX_INDEX_SIZE:
            size = f"{status.st_size} bytes, the limit is {MAX_INDEX_SIZE}"
            raise FormatError(f"{path} is too large: {size}", hint=_HINT)
        return _parse(file.read(MAX_INDEX_SIZE + 1), path), _stamp(status)


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    broken = f"{path} is not an OCI index"
    try:
        value = read_json(raw, str(path), MAX_INDEX_SIZE)
    except FormatError as error:
        raise FormatError(f"{broken}: {error.message}", hint=_HINT) from None
    if isinstance(value, dict) and value.get("manifests", 0) is None:
        value["manifests"] = []  # how Go writes an empty list
    if not isinstance(value, dict) or not isinstance(value.get("manifests"), list):
        raise FormatError(broken, hint=_HINT)
    return value


def _restored(root: Path, value: dict[str, Any]) -> dict[str, Any]:
    """Restore recorded names that another tool has dropped, and return ``value``."""
    records = MetadataFiles(root, "names")
    ours = records.names()
    if ours:
        ours -= {file_name(name_of(entry)) for entry in value["manifests"]}
    for name in sorted(ours):
        record = records.read(name)
        if record is None or not isinstance(entry := record.get("entry"), dict):
            continue
        if record.get("elsewhere") or _is_here(root, entry):  # in another store, or here
            value["manifests"].append(entry)
    return value


def _record_moves(root: Path, entries: list[Any]) -> None:
    """Record names that another tool has moved, so that their old targets are not restored."""
    records = MetadataFiles(root, "names")
    ours = records.names()
    for entry in entries if ours else ():
        name = name_of(entry)
        if file_name(name) not in ours:
            continue
        ours.discard(file_name(name))  # the first of two entries counts
        known = (records.get(name) or {}).get("entry")
        if isinstance(known, dict) and known.get("digest") != entry.get("digest"):
            records.put(name, {"entry": entry}, durable=True)


def _is_here(root: Path, entry: Any) -> bool:
    try:
        digest = Digest.parse(entry["digest"])
        path = os.path.join(root, "blobs", digest.algorithm, digest.encoded)
        return bool(os.stat(path).st_size == entry["size"])
    except (FormatError, UsageError, KeyError, TypeError, OSError):
        return False


def entry_name(annotations: Any) -> str:
    """Return the name of an entry with these annotations; empty if it has none."""
    if not isinstance(annotations, dict):
        return ""
    return next((str(annotations[key]) for key in _NAMES if annotations.get(key)), "")


def name_of(entry: Any) -> str:
    """Return the name of an entry; empty if it has none, or is malformed."""
    return entry_name(entry.get("annotations")) if isinstance(entry, dict) else ""


def same_name(name: str, reference: Reference) -> bool:
    """Return True if an entry's name means ``reference`` (``model`` is ``model:latest``)."""
    return bool(name) and _meaning(name) == reference


@functools.lru_cache(maxsize=4096)
def _meaning(name: str) -> Reference | None:
    with contextlib.suppress(UsageError):
        return Reference.parse(name)
    return None


def is_named(entry: Any, name: str) -> bool:
    """Return True if an entry has a name, in aimage's form or that of another tool."""
    found, meant = name_of(entry), _meaning(name)
    return found == name or (meant is not None and same_name(found, meant))


@contextlib.contextmanager
def edit_index(root: Path) -> Iterator[dict[str, Any]]:
    """Yield the index for changes in place, and write it when the block ends.

    Unknown fields and entries are kept. Concurrent changes by other tools are merged.
    """
    with held(root, "lock"):
        if not (root / "oci-layout").exists():
            _replace(root, "oci-layout", LAYOUT_FILE)
            with store_errors(root):
                sync_directory(root.parent)
        value, stamp = _read(root)
        before = copy.deepcopy(value)
        _record_moves(root, value["manifests"])
        value = _restored(root, value)
        yield value
        while value != before or stamp is None:
            now, seen = _read(root)
            if seen == stamp:
                data = json.dumps(value, indent=1).encode() + b"\n"
                if _stamp_of(root) == stamp:  # otherwise another tool's write would be lost
                    _replace(root, "index.json", data)
                    return
            else:
                _merge(value["manifests"], before["manifests"], now["manifests"])
                before, stamp = now, seen


def _merge(ours: list[Any], known: list[Any], theirs: list[Any]) -> None:
    """Add to ``ours`` entries that another tool added or renamed after ``known`` was read."""
    for entry in theirs:
        if entry in known:
            continue
        name = name_of(entry)
        same = [i for i, old in enumerate(ours) if name and is_named(old, name)]
        if not same:
            ours.append(entry)
        elif ours[same[0]] in known:  # otherwise this process changed it, too
            ours[same[0]] = entry


def _stamp_of(root: Path) -> _Stamp | None:
    with store_errors(root), contextlib.suppress(FileNotFoundError):
        return _stamp(os.stat(root / "index.json"))
    return None


def _replace(root: Path, name: str, data: bytes) -> None:
    with store_errors(root):
        room = make_directory(root, PRIVATE)
        write_shared(root / name, data, directory=room)


def fingerprint(roots: Iterable[Path]) -> Hashable:
    """Return a value that changes when a name or a blob of these stores is added or removed.

    None if that is uncertain: something changed recently, or cannot be read. A blob that is changed
    in place is not detected.
    """
    try:
        stamps = [(path, _change_of(path)) for root in roots for path in _watched(root)]
    except OSError:
        return None
    newest = max((max(stamp[3:]) for _, stamp in stamps if stamp is not None), default=0)
    return tuple(stamps) if time.time_ns() - newest > _SETTLED else None


def _watched(root: Path) -> list[str]:
    blobs = os.path.join(root, "blobs")
    algorithms = sorted(os.listdir(blobs)) if os.path.isdir(blobs) else []
    names = (os.path.join(root, "index.json"), os.path.join(root, PRIVATE, "names"), blobs)
    return [*names, *(os.path.join(blobs, name) for name in algorithms)]


def _change_of(path: str) -> tuple[int, int, int, int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
