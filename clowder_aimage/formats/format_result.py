"""Results of a format's reader: files that become layers, properties of the config.

Also what all readers share: which files may be read, and how a fault is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.dialect.aimage import check_name
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats.model_tree import (
    PICKLED,
    SourceFile,
    check_inside,
    check_not_pointer,
    home,
)
from clowder_aimage.oci import mediatype

AGAIN = "download the file again, in full"
OTHER = f"{AGAIN}, or have its format detected"
MAX_FILES = 8000  # of a model: more layers do not fit into a manifest
START = 64  # bytes that tell what a file is
_MAX_TEXT = 1024


@dataclass(frozen=True, slots=True)
class FormatResult:
    """A model in the words of a format.

    ``files`` are sorted by name; ``facts`` are properties of the AImage config
    (schemas/aimage-config.schema.json).
    """

    format: str
    files: tuple[SourceFile, ...]
    facts: Mapping[str, Any]
    license: str | None = None


def taken(
    kind: str, files: Iterable[SourceFile], facts: Mapping[str, Any], licence: object = None
) -> FormatResult:
    """Files in order, and facts without those that are not known."""
    known = {key: value for key, value in facts.items() if value is not None}
    ordered = tuple(sorted(files, key=lambda file: file.name))
    return FormatResult(kind, ordered, known, text(licence))


def text(value: object) -> str | None:
    """Return a word that a file says of itself, if it is fit to be shown: short, and printable."""
    if not isinstance(value, str):
        return None
    word = value.strip()
    return word if word and len(word) <= _MAX_TEXT and word.isprintable() else None


def source_file(
    root: Path | None, path: Path, name: str, media_type: str = mediatype.AIMAGE_FILE
) -> SourceFile:
    """Return a file that becomes the layer ``name``.

    It may not lie outside of ``root``, if there is one: a link that was named by hand is followed
    wherever it leads.

    Raises:
        ModelError: it is no regular file, elsewhere, a pointer of Git LFS, or its name cannot be a
            layer's.
    """
    _check_file(path)
    if root is not None:
        check_inside(home(root), path)
    try:
        check_name(name)
    except FormatError:
        raise ModelError(f"{str(path)!r:.300} cannot be packed under its name") from None
    check_not_pointer(path, start_of(path))
    status = path.stat()
    return SourceFile(name, path, status.st_size, status.st_mtime_ns, media_type)


def start_of(path: Path) -> bytes:
    """Return the first bytes of a file."""
    with path.open("rb") as file:
        return file.read(START)


def _check_file(path: Path) -> None:
    if path.is_file():
        return
    if not path.exists():
        link = " is a link to nothing" if path.is_symlink() else " does not exist"
        raise ModelError(f"{path}{link}", hint="name the file or directory that holds the model")
    raise ModelError(f"{path} is not a regular file", hint="name the file that holds the model")


def is_pickled(path: Path) -> bool:
    """Return whether a file is pickled, by its name: it is not opened."""
    return path.suffix.lower() in PICKLED


def walk(root: Path) -> list[Path]:
    """Return all files below ``root`` but hidden ones, sorted.

    Raises:
        ModelError: a link leads out of it, a directory is a link, something is no regular file, or
            there are too many.
    """
    found: list[Path] = []
    directories = [root]
    while directories:
        for path in sorted(directories.pop().iterdir()):
            if path.name.startswith("."):
                continue
            check_inside(home(root), path)
            if path.is_dir():
                _check_directory(path)
                directories.append(path)
                continue
            _check_file(path)
            found.append(path)
        if len(found) + len(directories) > MAX_FILES:
            raise ModelError(
                f"{root} holds over {MAX_FILES} files", hint="name a directory with the model alone"
            )
    return sorted(found)


def _check_directory(path: Path) -> None:
    # it could lead back up, and every file in it would have two names
    if path.is_symlink():
        raise ModelError(
            f"{path} is a link to a directory", hint="put the directory itself in its place"
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into ModelError."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or path}: {error.strerror}") from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Yield a FormatError gets the name of the file that it is about."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{path}: {error}", hint=error.hint or AGAIN) from None
