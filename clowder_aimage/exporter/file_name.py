"""File names of an export: unique and valid on every file system."""

from __future__ import annotations

import contextlib
import os
import unicodedata
from pathlib import Path

from clowder_aimage.errors import FormatError

_PART = 255  # bytes in a path component on every file system (NAME_MAX)
_PATH = 4096  # bytes of a path with its terminating zero (Linux, limits.h, PATH_MAX)


class FileNames:
    """Files and directories, by their paths below the output directory.

    ``is_folded`` is set if the file system is case-insensitive.
    """

    def __init__(self, *, is_folded: bool = False) -> None:
        self._is_folded = is_folded
        self._part, self._whole = _PART, _PATH
        self._files: dict[str, str] = {}
        self._directories: dict[str, str] = {}

    @property
    def directories(self) -> list[str]:
        """Return all directories, parents first."""
        return sorted(self._directories.values())

    def add_file(self, name: str) -> None:
        """Add a file. Raises FormatError: it is taken, too long, a directory, or below a file."""
        self._check_length(name)
        self._add_parts(name.split("/")[:-1], name)
        key = self._key(name)
        if key in self._directories:
            raise _in_the_way(name, self._directories[key] + "/...")
        if key in self._files:
            raise _collision(name, self._files[key])
        self._files[key] = name

    def add_directory(self, name: str) -> None:
        """Add a directory. Raises FormatError: it is too long, a file, or below a file."""
        self._check_length(name)
        self._add_parts(name.split("/"), f"{name}/")

    def _add_parts(self, parts: list[str], whole: str) -> None:
        for count in range(1, len(parts) + 1):
            own = "/".join(parts[:count])
            key = self._key(own)
            if key in self._files:
                raise _in_the_way(self._files[key], whole)
            if self._directories.setdefault(key, own) != own:
                raise _collision(own, self._directories[key])

    def fold(self) -> None:
        """Compare names case-insensitively, earlier ones too. Raises FormatError."""
        if self._is_folded:
            return
        again = FileNames(is_folded=True)
        for name in self.directories:
            again.add_directory(name)
        for name in self._files.values():
            again.add_file(name)
        self._is_folded = True
        self._files, self._directories = again._files, again._directories

    def fit(self, root: Path) -> None:
        """Limit names, earlier ones too, to the lengths below ``root``. Raises FormatError."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: the limit is unknown
            self._part = min(self._part, _limit(root, "PC_NAME_MAX"))
            self._whole = min(self._whole, _limit(root, "PC_PATH_MAX"))
        self._whole -= len(os.fsencode(root)) + 2  # a slash, and a zero
        for name in (*self._directories.values(), *self._files.values()):
            self._check_length(name)

    def _check_length(self, name: str) -> None:
        raw = name.encode(errors="surrogateescape")
        longest = max(map(len, raw.split(b"/")))
        if longest > self._part:
            raise FormatError(
                f"a component of {name[:200]!r} has {longest} bytes; the limit is {self._part}"
            )
        if len(raw) > self._whole:
            raise FormatError(
                f"{name[:200]!r} has {len(raw)} bytes; the limit is {self._whole}",
                hint="export to a directory with a shorter path",
            )

    def is_free(self, name: str) -> bool:
        """Return whether a file at the top level may have this name on every file system."""
        return all(_fold(name) != _fold(one) for one in (*self._files, *self._directories))

    def is_file(self, name: str) -> bool:
        """Return whether a file has exactly that name."""
        return self._files.get(self._key(name)) == name

    def _key(self, name: str) -> str:
        return _fold(name) if self._is_folded else name


def _fold(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def _limit(root: Path, name: str) -> int:
    found = os.pathconf(root, name)
    return found if found > 0 else _PATH


def _in_the_way(file: str, whole: str) -> FormatError:
    return FormatError(f"{file[:200]!r} is a file, but {whole[:200]!r} requires a directory")


def _collision(name: str, taken: str) -> FormatError:
    if name == taken:
        return FormatError(f"duplicate file name: {name[:200]!r}")
    return FormatError(
        f"{name[:200]!r} and {taken[:200]!r} are the same name on a case-insensitive file system"
    )
