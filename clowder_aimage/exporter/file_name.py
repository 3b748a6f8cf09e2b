"""File names of an export: unique and valid on every file system."""

from __future__ import annotations

import contextlib
import os
import unicodedata
from pathlib import Path

from clowder_aimage.errors import FormatError

# Bytes of a path component on every file system.
_NAME_MAX = 255
# Bytes of a path with its terminating zero (Linux, limits.h).
_PATH_MAX = 4096


class FileNames:
    """Files and directories, by their paths below the output directory.

    ``is_folded`` is True if names are compared case-insensitively.
    """

    def __init__(self, *, is_folded: bool = False) -> None:
        self._is_folded = is_folded
        self._name_limit, self._path_limit = _NAME_MAX, _PATH_MAX
        self._files: dict[str, str] = {}
        self._directories: dict[str, str] = {}

    @property
    def directories(self) -> list[str]:
        """Return all directories, parents first."""
        return sorted(self._directories.values())

    def add_file(self, name: str) -> None:
        """Add a file. Raises FormatError: It exists, is too long, a directory, or below a file."""
        self._check_length(name)
        self._add_components(name.split("/")[:-1], name)
        key = self._build_key(name)
        if key in self._directories:
            raise _build_conflict_error(name, self._directories[key] + "/...")
        if key in self._files:
            raise _build_collision_error(name, self._files[key])
        self._files[key] = name

    def add_directory(self, name: str) -> None:
        """Add a directory. Raises FormatError: It is too long, a file, or below a file."""
        self._check_length(name)
        self._add_components(name.split("/"), f"{name}/")

    def _add_components(self, components: list[str], user: str) -> None:
        for count in range(1, len(components) + 1):
            directory = "/".join(components[:count])
            key = self._build_key(directory)
            if key in self._files:
                raise _build_conflict_error(self._files[key], user)
            if self._directories.setdefault(key, directory) != directory:
                raise _build_collision_error(directory, self._directories[key])

    def fold(self) -> None:
        """Compare all names case-insensitively from now on. Raises FormatError."""
        if self._is_folded:
            return
        folded = FileNames(is_folded=True)
        for name in self.directories:
            folded.add_directory(name)
        for name in self._files.values():
            folded.add_file(name)
        self._is_folded = True
        self._files, self._directories = folded._files, folded._directories

    def fit(self, root: Path) -> None:
        """Limit all names to the lengths below ``root``. Raises FormatError."""
        # A ValueError: the system does not know the limit.
        with contextlib.suppress(OSError, ValueError):
            self._name_limit = min(self._name_limit, _limit(root, "PC_NAME_MAX"))
            self._path_limit = min(self._path_limit, _limit(root, "PC_PATH_MAX"))
        # A path has a slash before the name, and a zero at its end.
        self._path_limit -= len(os.fsencode(root)) + 2
        for name in (*self._directories.values(), *self._files.values()):
            self._check_length(name)

    def _check_length(self, name: str) -> None:
        raw = name.encode(errors="surrogateescape")
        longest = max(map(len, raw.split(b"/")))
        if longest > self._name_limit:
            raise FormatError(
                f"a component of {name[:200]!r} has {longest} bytes; the limit is "
                f"{self._name_limit}"
            )
        if len(raw) > self._path_limit:
            raise FormatError(
                f"{name[:200]!r} has {len(raw)} bytes; the limit is {self._path_limit}",
                hint="export to a directory with a shorter path",
            )

    def is_free(self, name: str) -> bool:
        """Return True if a file at the top level can have this name on every file system."""
        return all(_fold(name) != _fold(key) for key in (*self._files, *self._directories))

    def is_file(self, name: str) -> bool:
        """Return True if a file has exactly this name."""
        return self._files.get(self._build_key(name)) == name

    def _build_key(self, name: str) -> str:
        return _fold(name) if self._is_folded else name


def _fold(name: str) -> str:
    # Canonical caseless matching (Unicode, 3.13): file systems fold case and composition.
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def _limit(root: Path, name: str) -> int:
    value = os.pathconf(root, name)
    return value if value > 0 else _PATH_MAX


def _build_conflict_error(file: str, path: str) -> FormatError:
    return FormatError(f"{file[:200]!r} is a file, but {path[:200]!r} requires a directory")


def _build_collision_error(name: str, existing: str) -> FormatError:
    if name == existing:
        return FormatError(f"duplicate file name: {name[:200]!r}")
    return FormatError(
        f"{name[:200]!r} and {existing[:200]!r} are the same name on a case-insensitive file system"
    )
