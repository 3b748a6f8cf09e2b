"""Picture files: their places, names and formats."""

from __future__ import annotations

import itertools
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clowder_aimage.cli.console.output import open_output
from clowder_aimage.content.atomic_file import DISK_FULL, write_file
from clowder_aimage.errors import NoSpaceError, StoreError, UsageError

if TYPE_CHECKING:
    from clowder_aimage.generation.encoding import Format

_KINDS: Mapping[str, Format] = {
    "": "png",
    ".png": "png",
    ".jpg": "jpeg",
    ".jpeg": "jpeg",
    ".webp": "webp",
}
# Characters of a prompt in a file name.
_LONGEST = 40


@dataclass(frozen=True, slots=True)
class PictureOutput:
    """The place of pictures: a file, a directory, ``-`` for stdout; None is this directory."""

    name: str | None = None

    @property
    def is_stdout(self) -> bool:
        """Return True if the bytes are written to stdout."""
        return self.name == "-"

    @property
    def kind(self) -> Format:
        """Return the format of the pictures, one of ``encoding.FORMATS``."""
        is_file = not (self.is_stdout or self._is_directory)
        return _KINDS[self._path.suffix.lower()] if is_file else "png"

    @property
    def _path(self) -> Path:
        return Path(self.name or "")

    @property
    def _is_directory(self) -> bool:
        return not self.name or self.name.endswith(os.sep) or self._path.is_dir()

    def check(self, count: int) -> None:
        """Reject a place that cannot be written, before pictures are generated."""
        if self.is_stdout:
            if count > 1:
                raise UsageError(f"-o - writes one picture, not {count}", hint="use -o DIR/")
            if sys.stdout.isatty():
                hint = "set a file with -o, or use a pipe"
                raise UsageError("refusing to write a picture to a terminal", hint=hint)
            return
        directory = self._path
        if not self._is_directory:
            directory = self._path.parent
            if self._path.suffix.lower() not in _KINDS:
                suffixes = "expected a name in .png, .jpg, .jpeg or .webp"
                raise UsageError(f"unknown picture format: {self._path.name}", hint=suffixes)
        elif self.name and self.name.endswith(os.sep):
            # A directory that is created with the first picture.
            while not directory.exists() and directory != directory.parent:
                directory = directory.parent
        if not directory.is_dir():
            raise StoreError(
                f"cannot write a picture: directory not found: {directory}",
                hint="create the directory, or choose another path with -o",
            )
        if not os.access(directory, os.W_OK | os.X_OK):
            raise StoreError(
                f"cannot write a picture to {directory}: Permission denied",
                hint="choose another path with -o",
            )

    def write(self, data: bytes, prompt: str, seed: int, index: int, count: int) -> Path | None:
        """Write a picture atomically; return its path, None for stdout.

        Raises:
            NoSpaceError: The disk is full.
            StoreError: The file cannot be written.
        """
        if self.is_stdout:
            with open_output("-") as file:
                left = memoryview(data)
                # A pipe may accept some of the bytes.
                while left:
                    left = left[file.write(left) :]
            return None
        return self._write(data, lambda: self._choose(prompt, seed, index, count))

    def write_sheet(self, data: bytes, prompt: str) -> Path:
        """Write a sheet of pictures, a PNG, beside them; return its path. Raises as ``write``."""

        def choose() -> Path:
            if self._is_directory:
                return _choose_path(self._path, f"{_slugify(prompt)}-sheet")
            return self._path.with_name(f"{self._path.stem}-sheet.png")

        return self._write(data, choose)

    def _write(self, data: bytes, choose: Callable[[], Path]) -> Path:
        path = self._path
        try:
            if self.name and self.name.endswith(os.sep):
                path.mkdir(parents=True, exist_ok=True)
            path = choose()
            write_file(path, data, durable=False)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise NoSpaceError(
                    f"no space left for the picture {path}", hint="free some space, or use -o"
                ) from None
            raise StoreError(
                f"cannot write the picture {path}: {error.strerror or error}",
                hint="choose another path with -o",
            ) from None
        return path

    def _choose(self, prompt: str, seed: int, index: int, count: int) -> Path:
        """Return a picture's path. A name chosen here never overwrites another picture."""
        path = self._path
        if self._is_directory:
            return _choose_path(path, f"{_slugify(prompt)}-{seed}")
        path = path if path.suffix else path.with_suffix(".png")
        return path if count == 1 else path.with_stem(f"{path.stem}-{index + 1}")


def _choose_path(directory: Path, stem: str) -> Path:
    names = (f"{stem}-{number}.png" for number in itertools.count(2))
    paths = (directory / name for name in itertools.chain((f"{stem}.png",), names))
    return next(path for path in paths if not path.exists())


def _slugify(prompt: str) -> str:
    """Return the first words of a prompt for a file name: ``two-red-circles``."""
    words = re.findall(r"[^\W_]+", unicodedata.normalize("NFC", prompt).lower())
    name = "-".join(words)
    if len(name) > _LONGEST:
        name = name[:_LONGEST].rpartition("-")[0] or name[:_LONGEST]
    return name or "picture"
