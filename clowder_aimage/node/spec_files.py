"""What a node is to keep: the files of its desired state, and when they change.

The files are ``*.yaml``, ``*.yml`` and ``*.json`` in one directory (schemas/desired.schema.json).
The directory may be a mounted ConfigMap: then the files are links through ``..data``, a link that
is replaced whole (Kubernetes, "ConfigMaps", "Mounted ConfigMaps are updated automatically").
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clowder_aimage.errors import AccessError, AImageError, FormatError, NotFoundError
from clowder_aimage.node.model_spec import HINT, Found, ModelSpec, entries, once, position
from clowder_aimage.node.plain_yaml import NotYAMLError, read_yaml
from clowder_aimage.oci import read_json
from clowder_aimage.oci.position import LineIndex, find_positions
from clowder_aimage.oci.position import Path as Place

__all__ = ["ModelSpec", "SpecFiles", "SpecWatcher", "read_directory", "shown"]
MAX_SIZE = 1024 * 1024  # bytes of a file
_SUFFIXES = (".yaml", ".yml", ".json")
_DATA = "..data"
_NOWHERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}  # what a link leads to
_TRIES = 5  # at a directory that changes while it is read


@dataclass(frozen=True, slots=True)
class SpecFiles:
    """What the files of a directory say, by name and then in their order. ``fingerprint`` is
    another one where a byte or a name of them is."""

    wants: tuple[ModelSpec, ...] = ()
    files: tuple[str, ...] = ()
    fingerprint: str = ""


def read_directory(directory: Path) -> SpecFiles:
    """What the files of ``directory`` say now, all of them at one moment.

    A file that another program is still writing is read as it is; whoever wants it whole writes it
    beside (with a name that begins with a dot) and renames it.

    Raises:
        NotFoundError: there is no such directory.
        AccessError: it cannot be read.
        FormatError: a file is not what it should be, or two want the same model differently; with
            the file, and the line where it is known.
    """
    for _ in range(_TRIES):
        before = _facts(directory)
        try:
            found: SpecFiles | AImageError = _read(directory)
        except AImageError as error:
            found = error
        if _facts(directory) != before:
            continue  # half of the old, half of the new
        if isinstance(found, AImageError):
            raise found
        return found
    raise FormatError(
        f"the files in {shown(directory)} change while they are read",
        hint="replace files whole: write beside them, and rename",
    )


class SpecWatcher:
    """Notices that a directory's files may say something else. Costs a few system calls a file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: object = None

    def changed(self) -> bool:
        """Whether anything is different from the last call; the first call says so, too.

        Ask first and read then: what changes in between is noticed at the next call.
        """
        before, self._seen = self._seen, _facts(self._directory)
        return before != self._seen


def shown(path: Path | str) -> str:
    """A path as it may be printed."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def _read(directory: Path) -> SpecFiles:
    names = _names(directory)
    hasher = hashlib.sha256()
    found: list[Found] = []
    for name in names:
        raw = _content(directory / name)
        for part in (os.fsencode(name), raw):
            hasher.update(len(part).to_bytes(8, "big") + part)
        found += _of_file(directory / name, raw)
    return SpecFiles(once(found), tuple(map(shown, names)), hasher.hexdigest())


def _names(directory: Path) -> list[str]:
    """The files that count. Raises NotFoundError or AccessError."""
    try:
        return sorted(entry.name for entry in directory.iterdir() if _counts(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(
            f"there is no directory {shown(directory)}",
            hint="make it, or name another one with --desired; an empty one wants nothing",
        ) from None
    except OSError as error:
        raise AccessError(
            f"cannot read the directory {shown(directory)}: {error.strerror or error}"
        ) from None


def _counts(name: str) -> bool:
    return name.endswith(_SUFFIXES) and not name.startswith(".")


def _content(path: Path) -> bytes:
    """The bytes of a plain file; a pipe in its place is not waited for. Raises FormatError."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            is_plain = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            raw = file.read(MAX_SIZE + 1) if is_plain else b""
    except IsADirectoryError:
        is_plain, raw = False, b""
    except OSError as error:
        is_lost = error.errno in _NOWHERE and path.is_symlink()
        reason = "it is a link to nothing" if is_lost else error.strerror or error
        raise FormatError(f"cannot read {shown(path)}: {reason}") from None
    if not is_plain:
        raise FormatError(f"{shown(path)} is no file", hint="call it something else")
    if len(raw) > MAX_SIZE:
        raise FormatError(f"{shown(path)} is larger than {MAX_SIZE} bytes", hint="divide it")
    return raw


def _of_file(path: Path, raw: bytes) -> Iterator[Found]:
    """The wants in a file. Raises FormatError."""
    file, origin = shown(path), shown(path.name)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = position(file, raw.count(b"\n", 0, error.start) + 1)
        raise FormatError(f"{at}: not UTF-8", hint="save it in UTF-8") from None
    if path.suffix == ".json":
        value = read_json(text.encode(), file) if text.strip() else None
        return entries(value, origin, file, lambda place: _json_line(text, place))
    try:
        written = read_yaml(text)
    except NotYAMLError as error:
        raise FormatError(f"{position(file, error.line)}: {error.message}", hint=HINT) from None
    return entries(written.value, origin, file, lambda place: written.lines.get(place, 0))


def _json_line(text: str, place: Place) -> int:
    offset = find_positions(text, {place}).of.get(place)
    return 0 if offset is None else LineIndex(text).find(offset)[0]


def _facts(directory: Path) -> object:
    """What is another when a file was written, replaced or removed, or a link now leads elsewhere;
    the error's number where the directory cannot be read."""
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        return error.errno
    return tuple(
        (name, _file_facts(directory / name)) for name in names if name == _DATA or _counts(name)
    )


def _file_facts(path: Path) -> object:
    try:
        target = str(path.readlink()) if path.is_symlink() else None
        found = path.stat()
    except OSError as error:
        return error.errno
    identity = (found.st_dev, found.st_ino, found.st_size)
    return (target, *identity, found.st_mtime_ns, found.st_ctime_ns)
