"""index.json: read whole, merged and replaced under a lock between processes.

Other tools know no lock: they may read it before our write and write it after. So every name that
we give is written down beside the index first (``.aimage/names``). A name that is not in the index
then is read as if it were, and the next command that writes puts it back.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clowder_aimage.content.atomic_file import sync_directory
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.layout.lock import PRIVATE, held, make_directory, store_errors
from clowder_aimage.layout.metadata import MetadataFiles, file_name, write_shared
from clowder_aimage.oci import Digest, Reference, mediatype, read_json

LAYOUT_FILE = b'{"imageLayoutVersion":"1.0.0"}'
MAX_INDEX_SIZE = 64 * 1024 * 1024
_NAMES = (  # the best first: what containerd exports has the tag alone as ref.name
    mediatype.CONTAINERD_NAME,
    mediatype.CONTAINERD_NAME_MISSPELT,
    mediatype.REF_NAME,
)
_HINT = "it was not written by aimage; move it away to begin with an empty one"
_PATIENCE = 20  # looks at an index that another tool is in the middle of writing
_LOOK = 0.02  # seconds between them


def read_index(root: Path) -> dict[str, Any]:
    """The parsed index.json with our names in it, or an empty one where there is no store yet.

    Raises:
        FormatError: it is not an index, or absurdly large.
        StoreError: it cannot be read.
    """
    return _restored(root, _read(root)[0])


def _read(root: Path) -> tuple[dict[str, Any], Any]:
    """What is in the file, and a mark that changes when the file does."""
    path = root / "index.json"
    for left in reversed(range(_PATIENCE)):
        with store_errors(root):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                with open(fd, "rb") as file:
                    status = os.fstat(fd)
                    mark = _mark(status)
                    _check_file(path, status)
                    raw = file.read(MAX_INDEX_SIZE + 1)
            except FileNotFoundError:
                if root.exists() and not root.is_dir():
                    raise NotADirectoryError(20, "Not a directory", str(root)) from None
                return {
                    "schemaVersion": 2,
                    "mediaType": mediatype.OCI_INDEX,
                    "manifests": [],
                }, None
        try:
            return _parse(raw, path), mark
        except FormatError:
            if not left or len(raw) > MAX_INDEX_SIZE or _is_old(mark):
                raise
        time.sleep(_LOOK)
    raise AssertionError


def _check_file(path: Path, status: os.stat_result) -> None:
    """Raise FormatError for what must not even be read: a pipe, a device, far too much."""
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path} is no file", hint=_HINT)
    if status.st_size > MAX_INDEX_SIZE:
        raise FormatError(
            f"{path} is not an OCI index: it has {status.st_size} bytes, over {MAX_INDEX_SIZE}",
            hint=_HINT,
        )


def _mark(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _is_old(mark: tuple[int, int, int]) -> bool:
    """Whether nobody can be in the middle of writing it."""
    return not -5e9 < time.time_ns() - mark[2] < 5e9


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    broken = FormatError(f"{path} is not an OCI index", hint=_HINT)
    if len(raw) > MAX_INDEX_SIZE:
        raise broken
    try:
        value = read_json(raw, str(path))
    except FormatError as error:
        raise FormatError(f"{broken.message}: {error.message}", hint=_HINT) from None
    if isinstance(value, dict) and value.get("manifests", 0) is None:
        value["manifests"] = []  # how Go writes an empty list
    if not isinstance(value, dict) or not isinstance(value.get("manifests"), list):
        raise broken
    return value


def _restored(root: Path, value: dict[str, Any]) -> dict[str, Any]:
    """``value`` with the names that we gave and another tool has dropped."""
    records = MetadataFiles(root, "names")
    ours = records.names()
    for entry in value["manifests"] if ours else ():
        if isinstance(entry, dict):
            ours.discard(file_name(entry_name(entry.get("annotations"))))
    for name in sorted(ours):
        record = records.read(name)
        if record is None or not isinstance(entry := record.get("entry"), dict):
            continue
        if record.get("elsewhere") or _is_here(root, entry):  # in another store of ours, or here
            value["manifests"].append(entry)
    return value


def _learn(root: Path, entries: list[Any]) -> None:
    """Write down what another tool has named by our names: what they meant before must not come
    back when it drops them."""
    records = MetadataFiles(root, "names")
    ours = records.names()
    for entry in entries if ours else ():
        name = entry_name(entry.get("annotations")) if isinstance(entry, dict) else ""
        if file_name(name) not in ours:
            continue
        ours.discard(file_name(name))  # of two, the first counts
        known = (records.get(name) or {}).get("entry")
        if isinstance(known, dict) and known.get("digest") != entry.get("digest"):
            records.put(name, {"entry": entry}, durable=True)


def _is_here(root: Path, entry: Any) -> bool:
    """Whether the manifest of an entry is in the store; without it the name means nothing."""
    try:
        digest = Digest.parse(entry["digest"])
        path = os.path.join(root, "blobs", digest.algorithm, digest.encoded)
        return bool(os.stat(path).st_size == entry["size"])
    except (FormatError, UsageError, KeyError, TypeError, OSError):
        return False


def entry_name(annotations: Any) -> str:
    """What an entry is called; empty where nobody named it."""
    if not isinstance(annotations, dict):
        return ""
    return next((str(annotations[key]) for key in _NAMES if annotations.get(key)), "")


def same_name(name: str, reference: Reference) -> bool:
    """Whether a foreign entry's name means ``reference`` (``model`` is ``model:latest``)."""
    return bool(name) and _meaning(name) == reference


@functools.lru_cache(maxsize=4096)
def _meaning(name: str) -> Reference | None:
    """What a name means; the same ones are asked for, time and again."""
    try:
        return Reference.parse(name)
    except UsageError:
        return None


def is_named(entry: Any, name: str) -> bool:
    """Whether an entry is called ``name``, as we or as another tool would write it."""
    if not isinstance(entry, dict):
        return False
    found = entry_name(entry.get("annotations"))
    meant = _meaning(name)  # nothing, for another tool's name
    return found == name or (meant is not None and same_name(found, meant))


@contextlib.contextmanager
def edit_index(root: Path) -> Iterator[dict[str, Any]]:
    """The index to change in place; it replaces the old one when the block ends well.

    Fields and entries that we do not know stay as they were. What another tool writes while the
    block runs is merged in.
    """
    with held(root, "lock"):
        if not (root / "oci-layout").exists():
            _replace(root, "oci-layout", LAYOUT_FILE)
            with store_errors(root):
                sync_directory(root.parent)
        value, mark = _read(root)
        before = copy.deepcopy(value)
        _learn(root, value["manifests"])
        value = _restored(root, value)
        yield value
        while value != before or mark is None:
            now, seen = _read(root)
            if seen == mark:
                data = json.dumps(value, indent=1).encode() + b"\n"
                if _mark_of(root) == mark:  # another tool's write would be lost now
                    _replace(root, "index.json", data)
                    return
            else:
                _merge(value["manifests"], before["manifests"], now["manifests"])
                before, mark = now, seen


def _merge(ours: list[Any], known: list[Any], theirs: list[Any]) -> None:
    """Take over what another tool added or named anew since we read ``known``."""
    for entry in theirs:
        if entry in known:
            continue
        name = entry_name(entry.get("annotations")) if isinstance(entry, dict) else ""
        same = [i for i, old in enumerate(ours) if name and is_named(old, name)]
        if not same:
            ours.append(entry)
        elif ours[same[0]] in known:  # else we name it anew, too
            ours[same[0]] = entry


def _mark_of(root: Path) -> Any:
    with store_errors(root):
        try:
            return _mark(os.stat(root / "index.json"))
        except FileNotFoundError:
            return None


def _replace(root: Path, name: str, data: bytes) -> None:
    """Replace a file of the store, durably, by one that was written beside it."""
    with store_errors(root):
        room = make_directory(root, PRIVATE)
        write_shared(root / name, data, directory=room)
