"""index.json: read as a whole, merged and replaced under an interprocess lock.

Other tools do not lock, and may overwrite changes. Every name that aimage sets is first recorded
in a separate file (``.aimage/names``). A name that is missing from the index is read from there,
and restored by the next write. The fingerprint changes when a name or a blob is added or removed.
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
from clowder_aimage.document.similarity import find_nearest
from clowder_aimage.errors import FormatError, StoreError, UsageError
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_version,
    hold_lock,
    make_directory,
    read_settled,
    translate_store_errors,
)
from clowder_aimage.layout.metadata import MetadataFiles, build_file_name, write_shared
from clowder_aimage.oci import Digest, Reference, mediatype, read_json
from clowder_aimage.oci.reference import DEFAULT_TAG

MAX_INDEX_SIZE = 64 * 1024 * 1024
# In order of preference: containerd's exports have only the tag as ref.name.
_NAMES = (
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
    return _restore_names(root, _read(root)[0])


def _read(root: Path) -> tuple[dict[str, Any], _Stamp | None]:
    """Return the content of the file, and a stamp that changes when the file does."""
    path = root / "index.json"
    check_version(root)
    with translate_store_errors(root):
        try:
            return read_settled(lambda: _read_file(path), path, FormatError)
        except FormatError as error:
            # The store is at fault, not the requested content.
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
        # Go writes an empty list as null.
        value["manifests"] = []
    if not isinstance(value, dict) or not isinstance(value.get("manifests"), list):
        raise FormatError(broken, hint=_HINT)
    return value


def _restore_names(root: Path, value: dict[str, Any]) -> dict[str, Any]:
    """Restore recorded names that another tool has dropped, and return ``value``."""
    records = MetadataFiles(root, "names")
    ours = records.list_names()
    if ours:
        ours -= {build_file_name(get_name(entry)) for entry in value["manifests"]}
    for name in sorted(ours):
        record = records.read(name)
        if record is None or not isinstance(entry := record.get("entry"), dict):
            continue
        # An entry of a read-only store, or one whose manifest is still stored.
        if record.get("elsewhere") or _is_here(root, entry):
            value["manifests"].append(entry)
    return value


def _record_moves(root: Path, entries: list[Any]) -> None:
    """Record names that another tool has moved, so that their old targets are not restored."""
    records = MetadataFiles(root, "names")
    ours = records.list_names()
    for entry in entries if ours else ():
        name = get_name(entry)
        if build_file_name(name) not in ours:
            continue
        # Of two entries with one name, the first counts.
        ours.discard(build_file_name(name))
        recorded = (records.get(name) or {}).get("entry")
        if isinstance(recorded, dict) and recorded.get("digest") != entry.get("digest"):
            records.put(name, {"entry": entry}, durable=True)


def _is_here(root: Path, entry: Any) -> bool:
    try:
        digest = Digest.parse(entry["digest"])
        path = os.path.join(root, "blobs", digest.algorithm, digest.encoded)
        return bool(os.stat(path).st_size == entry["size"])
    except (FormatError, UsageError, KeyError, TypeError, OSError):
        return False


def find_entry_name(annotations: Any) -> str:
    """Return the name of an entry with these annotations; empty if it has none."""
    if not isinstance(annotations, dict):
        return ""
    return next((str(annotations[key]) for key in _NAMES if annotations.get(key)), "")


def find_similar_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that resembles another one most, or None."""
    return find_nearest(name, names, cutoff=0.7, suffix=f":{DEFAULT_TAG}")


def get_name(entry: Any) -> str:
    """Return the name of an entry; empty if it has none, or is malformed."""
    return find_entry_name(entry.get("annotations")) if isinstance(entry, dict) else ""


def is_same_name(name: str, reference: Reference) -> bool:
    """Return True if an entry's name means ``reference`` (``model`` is ``model:latest``)."""
    return bool(name) and _parse_name(name) == reference


@functools.lru_cache(maxsize=4096)
def _parse_name(name: str) -> Reference | None:
    with contextlib.suppress(UsageError):
        return Reference.parse(name)
    return None


def is_named(entry: Any, name: str) -> bool:
    """Return True if an entry has a name, in aimage's form or that of another tool."""
    entry_reference, reference = get_name(entry), _parse_name(name)
    return entry_reference == name or (
        reference is not None and is_same_name(entry_reference, reference)
    )


@contextlib.contextmanager
def edit_index(root: Path) -> Iterator[dict[str, Any]]:
    """Yield the index for changes in place, and write it when the block ends.

    Unknown fields and entries are kept. Concurrent changes by other tools are merged.
    """
    with hold_lock(root, "lock"):
        if not (root / "oci-layout").exists():
            _replace(root, "oci-layout", LAYOUT_FILE)
            with translate_store_errors(root):
                sync_directory(root.parent)
        value, stamp = _read(root)
        before = copy.deepcopy(value)
        _record_moves(root, value["manifests"])
        value = _restore_names(root, value)
        yield value
        while value != before or stamp is None:
            current, current_stamp = _read(root)
            if current_stamp == stamp:
                data = json.dumps(value, indent=1).encode() + b"\n"
                # Checked as late as possible: another tool's write would be lost.
                if _stamp_of(root) == stamp:
                    _replace(root, "index.json", data)
                    return
            else:
                _merge(value["manifests"], before["manifests"], current["manifests"])
                before, stamp = current, current_stamp


def _merge(ours: list[Any], base: list[Any], theirs: list[Any]) -> None:
    """Add to ``ours`` entries that another tool added or renamed after ``base`` was read."""
    for entry in theirs:
        if entry in base:
            continue
        name = get_name(entry)
        indexes = [i for i, old in enumerate(ours) if name and is_named(old, name)]
        if not indexes:
            ours.append(entry)
        elif ours[indexes[0]] in base:
            # If this process changed the entry, too, its change wins.
            ours[indexes[0]] = entry


def _stamp_of(root: Path) -> _Stamp | None:
    with translate_store_errors(root), contextlib.suppress(FileNotFoundError):
        return _stamp(os.stat(root / "index.json"))
    return None


def _replace(root: Path, name: str, data: bytes) -> None:
    with translate_store_errors(root):
        private = make_directory(root, PRIVATE)
        write_shared(root / name, data, directory=private)


def compute_fingerprint(roots: Iterable[Path]) -> Hashable:
    """Return a value that changes when a name or a blob of these stores is added or removed.

    None if that is uncertain: something changed recently, or cannot be read. A blob that is changed
    in place is not detected.
    """
    try:
        stamps = [(path, _read_change(path)) for root in roots for path in _list_watched(root)]
    except OSError:
        return None
    newest = max((max(stamp[3:]) for _, stamp in stamps if stamp is not None), default=0)
    return tuple(stamps) if time.time_ns() - newest > _SETTLED else None


def _list_watched(root: Path) -> list[str]:
    blobs = os.path.join(root, "blobs")
    algorithms = sorted(os.listdir(blobs)) if os.path.isdir(blobs) else []
    names = (os.path.join(root, "index.json"), os.path.join(root, PRIVATE, "names"), blobs)
    return [*names, *(os.path.join(blobs, name) for name in algorithms)]


def _read_change(path: str) -> tuple[int, int, int, int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
