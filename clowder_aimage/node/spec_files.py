"""The files of a node's desired state and the detection of their changes.

The files are ``*.yaml``, ``*.yml`` and ``*.json`` in one directory (schemas/desired.schema.json).
The directory may be a mounted ConfigMap. Its files are links through ``..data``, a link that is
replaced atomically (Kubernetes, "ConfigMaps", "Mounted ConfigMaps are updated automatically").
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tenacity

from clowder_aimage.document.unicode_text import recode_file
from clowder_aimage.document.yaml import find_json_lines, format_position, read_yaml
from clowder_aimage.errors import AccessError, FormatError, NotFoundError
from clowder_aimage.node.model_spec import HINT, ModelSpec, PlacedSpec, deduplicate, iter_specs
from clowder_aimage.oci import read_json

# Bytes of a file.
MAX_SIZE = 1024 * 1024
_SUFFIXES = (".yaml", ".yml", ".json")
_DATA = "..data"
# Errors of a link without a target.
_DANGLING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
# Attempts to read a directory that changes meanwhile.
_ATTEMPTS = 5


class _ChangedError(FormatError):
    """The directory was changed while it was read."""


@dataclass(frozen=True, slots=True)
class SpecFiles:
    """The specs of a directory's files, in the order of file names, then in that of the entries."""

    specs: tuple[ModelSpec, ...] = ()
    files: tuple[str, ...] = ()


def read_directory(directory: Path) -> SpecFiles:
    """Return the specs of the files in ``directory``, all from one state of the directory.

    A file is read even if it is being written. For an atomic update, write a temporary file whose
    name begins with a dot, then rename it. Raises NotFoundError, AccessError, and FormatError with
    the file, and with the line if it is known.
    """
    retryer = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(_ChangedError),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        reraise=True,
    )
    return retryer(_read_unchanged, directory)


def _read_unchanged(directory: Path) -> SpecFiles:
    before = compute_fingerprint(directory)
    try:
        return _read(directory)
    finally:
        # A mix of files from before and after an update.
        if compute_fingerprint(directory) != before:
            raise _ChangedError(
                f"the files in {escape_unprintable(directory)} changed while they were read",
                hint="replace files atomically: write a temporary file and rename it",
            )


def escape_unprintable(path: Path | str) -> str:
    """Return a path with its unprintable characters replaced."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def _read(directory: Path) -> SpecFiles:
    names = _list_names(directory)
    paths = [directory / name for name in names]
    specs = [spec for path in paths for spec in _read_specs(path, _read_content(path))]
    return SpecFiles(deduplicate(specs), tuple(map(escape_unprintable, names)))


def _list_names(directory: Path) -> list[str]:
    """Return the names of the specification files. Raises NotFoundError or AccessError."""
    try:
        return sorted(entry.name for entry in directory.iterdir() if _is_spec_name(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(
            f"directory {escape_unprintable(directory)} not found",
            hint="create the directory of the desired state; an empty one specifies no models",
        ) from None
    except OSError as error:
        raise AccessError(
            f"cannot read the directory {escape_unprintable(directory)}: {error.strerror or error}"
        ) from None


def _is_spec_name(name: str) -> bool:
    return name.endswith(_SUFFIXES) and not name.startswith(".")


def _read_content(path: Path) -> bytes:
    """Return the bytes of a regular file, without blocking on a pipe. Raises FormatError."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for its writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            raw = file.read(MAX_SIZE + 1) if is_regular else b""
    except IsADirectoryError:
        is_regular, raw = False, b""
    except OSError as error:
        is_dangling = error.errno in _DANGLING and path.is_symlink()
        reason = "the link has no target" if is_dangling else error.strerror or error
        raise FormatError(f"cannot read {escape_unprintable(path)}: {reason}") from None
    if not is_regular:
        raise FormatError(
            f"{escape_unprintable(path)} is not a regular file", hint="remove or rename it"
        )
    if len(raw) > MAX_SIZE:
        raise FormatError(
            f"{escape_unprintable(path)} is larger than {MAX_SIZE} bytes", hint="split it"
        )
    return raw


def _read_specs(path: Path, raw: bytes) -> Iterator[PlacedSpec]:
    file, origin = escape_unprintable(path), escape_unprintable(path.name)
    try:
        text = recode_file(raw).decode("utf-8")
    except UnicodeDecodeError as error:
        at = format_position(file, raw.count(b"\n", 0, error.start) + 1)
        raise FormatError(f"{at}: not UTF-8", hint="save it as UTF-8") from None
    if path.suffix == ".json":
        value = read_json(text.encode(), file) if text.strip() else None
        # Only needed for errors.
        lines = functools.cache(lambda: find_json_lines(text))
        return iter_specs(value, origin, file, lambda path_in_file: lines().get(path_in_file, 0))
    value, lines_by_path = read_yaml(text, file, HINT)
    return iter_specs(value, origin, file, lambda path_in_file: lines_by_path.get(path_in_file, 0))


def compute_fingerprint(directory: Path) -> object:
    """Return a value that changes when a file is written, replaced, removed, or relinked.

    It is the error number if the directory cannot be read, and never None.
    """
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        return error.errno
    return tuple(
        (name, _read_file_identity(directory / name))
        for name in names
        if name == _DATA or _is_spec_name(name)
    )


def _read_file_identity(path: Path) -> object:
    try:
        target = str(path.readlink()) if path.is_symlink() else None
        status = path.stat()
    except OSError as error:
        return error.errno
    identity = (status.st_dev, status.st_ino, status.st_size)
    return (target, *identity, status.st_mtime_ns, status.st_ctime_ns)
