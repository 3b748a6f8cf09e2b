"""The directories of blobs, opened once to read many small ones.

A file is opened, and its status is read, in half of the time that its path takes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.layout.digest_scan import ALGORITHMS

# The bits of a mode that tell the kind of a file
_KIND = stat.S_IFMT(0xFFFF)


class BlobDirectories:
    """The blobs of the stores at ``roots``, until they are closed. Methods raise OSError.

    Digests are texts. Blobs are not verified.
    """

    def __init__(self, roots: Iterable[Path]) -> None:
        self._stack = contextlib.ExitStack()
        self._directories: dict[str, list[OpenDirectory]] = {name: [] for name in ALGORITHMS}
        for root in roots:
            for algorithm, directories in self._directories.items():
                # It may be missing, or not a directory
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    directory = OpenDirectory(root / "blobs" / algorithm)
                    directories.append(self._stack.enter_context(directory))

    def __enter__(self) -> BlobDirectories:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def measure(self, digest: str) -> int:
        """Return the size of a blob in bytes, -1 for a missing one."""
        return self.measure_all((digest,))[0]

    def measure_all(self, digests: Iterable[str]) -> list[int]:
        """Return the sizes of blobs in bytes, -1 for missing ones."""
        # One loop: a call for each of hundreds of thousands would take a fifth of the time
        first = {name: found[0].fd for name, found in self._directories.items() if found}
        find, sizes, regular, kind = os.stat, list[int](), stat.S_IFREG, _KIND
        for digest in digests:
            algorithm, _, encoded = digest.partition(":")
            try:
                status = find(encoded, dir_fd=first[algorithm], follow_symlinks=False)
            except (FileNotFoundError, KeyError):
                status = None
            if status is not None and status.st_mode & kind == regular:
                sizes.append(status.st_size)
            else:
                sizes.append(self._measure_next(algorithm, encoded))
        return sizes

    def _measure_next(self, algorithm: str, encoded: str) -> int:
        """Return the size of a blob that the first store lacks, -1 if all others lack it."""
        for directory in self._directories.get(algorithm, ())[1:]:
            with contextlib.suppress(FileNotFoundError):
                status = directory.stat(encoded)
                if stat.S_ISREG(status.st_mode):
                    return status.st_size
        return -1

    def read(self, digest: str, limit: int) -> bytes | None:
        """Return up to ``limit`` bytes of a blob, None without it; memory is allocated for all."""
        algorithm, _, encoded = digest.partition(":")
        for directory in self._directories.get(algorithm, ()):
            try:
                return directory.read(encoded, limit)
            except OSError as error:
                # It may be a link
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
        return None
