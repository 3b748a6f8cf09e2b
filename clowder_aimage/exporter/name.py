"""The names of what an export writes: each means one thing, on every file system."""

from __future__ import annotations

import unicodedata

from clowder_aimage.errors import FormatError


class Names:
    """Files and directories, by their names below the directory. ``is_folded`` where the file
    system takes ``A`` and ``a`` for one name."""

    def __init__(self, *, is_folded: bool = False) -> None:
        self._is_folded = is_folded
        self._files: dict[str, str] = {}
        self._directories: dict[str, str] = {}

    @property
    def directories(self) -> list[str]:
        """All of them, parents first."""
        return sorted(self._directories.values())

    def add_file(self, name: str) -> None:
        """Raises FormatError where ``name`` is taken, or a directory, or lies below a file."""
        self._add_parts(name.split("/")[:-1], name)
        key = self._key(name)
        if key in self._directories:
            raise _in_the_way(name, self._directories[key] + "/...")
        if key in self._files:
            raise _collision(name, self._files[key])
        self._files[key] = name

    def add_directory(self, name: str) -> None:
        """Raises FormatError where ``name``, or what it lies in, is a file, or is there already in
        another spelling."""
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
        """From now on ``A`` and ``a`` are one name, among what was added, too. Raises
        FormatError."""
        if self._is_folded:
            return
        again = Names(is_folded=True)
        for name in self.directories:
            again.add_directory(name)
        for name in self._files.values():
            again.add_file(name)
        self._is_folded = True
        self._files, self._directories = again._files, again._directories

    def is_file(self, name: str) -> bool:
        """Whether that very name is a file's."""
        return self._files.get(self._key(name)) == name

    def _key(self, name: str) -> str:
        if not self._is_folded:
            return name
        return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def _in_the_way(file: str, whole: str) -> FormatError:
    return FormatError(f"{file[:200]!r} is a file, and {whole[:200]!r} wants it as a directory")


def _collision(name: str, taken: str) -> FormatError:
    if name == taken:
        return FormatError(f"two files are called {name[:200]!r}: a directory can hold one")
    return FormatError(
        f"{name[:200]!r} and {taken[:200]!r} are one name where upper case and lower case are not "
        "told apart",
    )
