"""index.json: merged and replaced under an interprocess lock.

Other tools do not lock, and may overwrite changes. Every name that aimage sets is first recorded
in a separate file (``.aimage/names``). A name that is missing from the index is read from there,
and restored by the next write. While the index is the one that aimage wrote last (index_stamp.py),
it has all recorded names, and single entries are found in its text (index_text.py). The fingerprint
changes when a name or a blob is added or removed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.content.atomic_file import sync_directory
from clowder_aimage.content.file_system import is_file_locked
from clowder_aimage.content.open_directory import READ
from clowder_aimage.content.store import LAYOUT_FILE
from clowder_aimage.document.similarity import find_nearest
from clowder_aimage.errors import FormatError, StoreError, UsageError
from clowder_aimage.layout.index_stamp import (
    IndexStamp,
    build_stamp,
    is_current,
    remove_stamp,
    write_stamp,
)
from clowder_aimage.layout.index_text import encode_index, find_lines, replace_lines
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_version,
    hold_lock,
    make_directory,
    open_regular,
    read_settled,
    translate_store_errors,
)
from clowder_aimage.layout.metadata import MetadataFiles, build_file_name, write_shared
from clowder_aimage.oci import Digest, Reference, mediatype, read_json
from clowder_aimage.oci.reference import DEFAULT_TAG

_LOCK = "lock"
MAX_INDEX_SIZE = 64 * 1024 * 1024
# In order of preference: containerd's exports have only the tag as ref.name.
_NAMES = (
    mediatype.CONTAINERD_NAME,
    mediatype.CONTAINERD_NAME_MISSPELT,
    mediatype.REF_NAME,
)
_HINT = "another program wrote it; move it away to start with an empty index"
# A file that changed within this time may change again with the same stamp: file systems have a
# time resolution of up to two seconds, and a server's clock may differ.
_SETTLED = 5 * 10**9  # nanoseconds


# Names that are edited without parsing the other entries
_MAX_SINGLE = 16


@dataclass(frozen=True, slots=True)
class IndexFile:
    """An index as it was read.

    A missing one has no stamp; one that aimage wrote last has no value, since it is not parsed.
    """

    raw: bytes
    stamp: IndexStamp | None
    value: dict[str, Any] | None


def read_index(root: Path) -> dict[str, Any]:
    """Return the parsed index.json with the recorded names; an empty one without a store.

    Raises StoreError: it cannot be read, is not an index, or too large.
    """
    return parse_index(root, read_index_file(root))


def parse_index(root: Path, file: IndexFile) -> dict[str, Any]:
    """Return the value of the file with the recorded names."""
    if file.value is not None:
        return _restore_names(root, file.value)[0]
    return _parse(file.raw, root / "index.json")


def find_entries(root: Path, texts: Collection[str]) -> list[Any]:
    """Return the entries with one of these names or digests, and perhaps others, in order.

    Raises as ``read_index`` does.
    """
    file = read_index_file(root)
    if file.value is not None:
        entries: list[Any] = parse_index(root, file)["manifests"]
        return entries
    return [line.entry for line in find_lines(file.raw, texts)]


def read_index_file(root: Path) -> IndexFile:
    """Return the file, with its value unless aimage wrote it last. Raises as ``read_index``."""
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
    value = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": list[Any]()}
    return IndexFile(b"", None, value)


def _read_file(path: Path) -> IndexFile:
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path} is not a regular file", hint=_HINT)
        if status.st_size > MAX_INDEX_SIZE:
            size = f"{status.st_size} bytes, the limit is {MAX_INDEX_SIZE}"
            raise FormatError(f"{path} is too large: {size}", hint=_HINT)
        stamp, raw = build_stamp(status), file.read(MAX_INDEX_SIZE + 1)
        # Another tool may write in place since its status was read
        if is_current(path.parent, stamp) and build_stamp(os.fstat(file.fileno())) == stamp:
            return IndexFile(raw, stamp, None)
        return IndexFile(raw, stamp, _parse(raw, path))


def open_current(root: Path) -> int | None:
    """Return a descriptor of the index if aimage wrote it last, else None. Raises StoreError."""
    check_version(root)
    with translate_store_errors(root), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        fd = open_regular(root / "index.json")
        if is_current(root, build_stamp(os.fstat(fd))):
            return fd
        os.close(fd)
    return None


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


def _restore_names(root: Path, value: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Restore recorded names that another tool has dropped, and return ``value``.

    The second value is True if none is left that may be restored later.
    """
    records, is_complete = MetadataFiles(root, "names"), True
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
        else:
            is_complete = False
    return value, is_complete


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


def list_spellings(name: str) -> set[str]:
    """Return all texts of a name: ``model`` is ``model:latest``."""
    reference = _parse_name(name)
    if reference is None:
        return {name}
    is_short = reference.tag == DEFAULT_TAG and reference.digest is None
    return {name, str(reference)} | ({reference.name} if is_short else set())


@contextlib.contextmanager
def edit_index(root: Path, names: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the index for changes in place, and write it when the block ends.

    With ``names`` it may have only the entries of these names. Entries are replaced, and not
    changed. Unknown fields and entries are kept. Concurrent changes by other tools are merged.
    """
    with hold_lock(root, _LOCK):
        if not (root / "oci-layout").exists():
            _replace(root, "oci-layout", LAYOUT_FILE)
            with translate_store_errors(root):
                sync_directory(root.parent)
        file = read_index_file(root)
        with translate_store_errors(root):
            remove_stamp(root)
        is_single = file.value is None and names is not None and len(names) <= _MAX_SINGLE
        edit = _edit_lines(file, names or ()) if is_single else _edit_value(root, file)
        with edit as edited:
            yield edited.value
        written = _write(root, file, edited)
        if written is not None and edited.is_complete and _is_alone(root):
            write_stamp(root, written)


def _is_alone(root: Path) -> bool:
    """Return True if the lock that is held excludes other processes.

    Where locks have no effect, another process may be writing an index without the last record.
    """
    with contextlib.suppress(OSError):
        return is_file_locked(root / PRIVATE / _LOCK, READ)
    return False


@dataclass(slots=True)
class _Edited:
    """A yielded index: ``parts`` are its text at the end, or None if it is the one that was read.

    ``base`` is the index that was read, unless it was not parsed. ``is_complete`` is True if no
    recorded name is missing.
    """

    value: dict[str, Any]
    base: dict[str, Any] | None
    parts: Sequence[bytes | memoryview] | None = None
    is_complete: bool = True


@contextlib.contextmanager
def _edit_lines(file: IndexFile, names: Collection[str]) -> Iterator[_Edited]:
    lines = [
        line
        for line in find_lines(file.raw, {text for name in names for text in list_spellings(name)})
        if any(is_named(line.entry, name) for name in names)
    ]
    edited = _Edited({"manifests": [line.entry for line in lines]}, None)
    yield edited
    before = [line.entry for line in lines]
    if edited.value["manifests"] != before:
        edited.parts = replace_lines(file.raw, lines, edited.value["manifests"])


@contextlib.contextmanager
def _edit_value(root: Path, file: IndexFile) -> Iterator[_Edited]:
    value = file.value or _parse(file.raw, root / "index.json")
    base, is_complete = _copy(value), True
    if file.value is not None:
        _record_moves(root, value["manifests"])
        value, is_complete = _restore_names(root, value)
    edited = _Edited(value, base, is_complete=is_complete)
    yield edited
    if value != base or file.stamp is None:
        edited.parts = [encode_index(value)]


def _copy(value: dict[str, Any]) -> dict[str, Any]:
    return value | {"manifests": list(value["manifests"])}


def _write(root: Path, file: IndexFile, edited: _Edited) -> IndexStamp | None:
    """Write the index, merged with changes by other tools; return its stamp if it is ours."""
    stamp, parts = file.stamp, edited.parts
    if parts is None:
        return stamp if file.value is None else None
    path, value, base = root / "index.json", None, edited.base
    # Checked as late as possible: another tool's write would be lost.
    while read_index_stamp(root) != stamp:
        current = read_index_file(root)
        value = value or _parse(b"".join(parts), path)
        base = base or _parse(file.raw, path)
        theirs = current.value or _parse(current.raw, path)
        _merge(value["manifests"], base["manifests"], theirs["manifests"])
        base, stamp, parts = theirs, current.stamp, [encode_index(value)]
    return _replace(root, "index.json", *parts)


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


def read_index_stamp(root: Path) -> IndexStamp | None:
    """Return the stamp of the index, None without one. Raises StoreError."""
    with translate_store_errors(root), contextlib.suppress(FileNotFoundError):
        return build_stamp(os.stat(root / "index.json"))
    return None


def _replace(root: Path, name: str, *parts: bytes | memoryview) -> IndexStamp | None:
    """Replace a file, and return its stamp unless another program has replaced it since."""
    path, timestamp = root / name, time.time_ns()
    size = sum(map(len, parts))
    if size > MAX_INDEX_SIZE:
        raise StoreError(
            f"{path} would have {size} bytes, the limit is {MAX_INDEX_SIZE}",
            hint="remove names that are no longer needed",
        )
    with translate_store_errors(root):
        private = make_directory(root, PRIVATE)
        write_shared(path, *parts, directory=private, time_ns=timestamp)
        status = os.stat(path)
    is_ours = status.st_mtime_ns == timestamp and status.st_size == size
    return build_stamp(status) if is_ours else None


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
