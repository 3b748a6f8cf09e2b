"""A blob on its way into the layout."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from clowder_aimage.content.verify import CHUNK_SIZE, check
from clowder_aimage.errors import VerificationError
from clowder_aimage.layout.fault import store_errors
from clowder_aimage.oci import Descriptor
from clowder_aimage.oci.digest import Hasher

BLOB_MODE = 0o444  # content never changes under its name


class FileIngest:
    """Bytes gather in a file of its own and get the blob's name only when they are verified.

    Written from front to back they are hashed as they pass; a write out of order is allowed,
    and then the file is read once more at commit.
    """

    def __init__(self, root: Path, key: str, expected: Descriptor | None = None) -> None:
        self._root = root
        self._expected = expected
        self._spans: list[tuple[int, int]] = []
        self._hashed = 0
        self._hasher: Hasher | None = expected.digest.hasher() if expected else None
        directory = root / ".aimage" / "ingest"
        with store_errors(root):
            directory.mkdir(parents=True, exist_ok=True)
            self._path = directory / f"{key[:80]}.{secrets.token_hex(8)}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o600)

    @property
    def size(self) -> int:
        """One past the last byte written so far."""
        return max((end for _, end in self._spans), default=0)

    def missing(self) -> list[tuple[int, int]]:
        """The spans [start, end) of the expected size that have not been written yet."""
        total = self._expected.size if self._expected else self.size
        spans, offset = [], 0
        for start, end in self._spans:
            if start > offset:
                spans.append((offset, start))
            offset = max(offset, end)
        return [*spans, (offset, total)] if offset < total else spans

    def write_at(self, offset: int, data: bytes | bytearray | memoryview, /) -> None:
        """Write ``data`` at ``offset``. Raises NoSpaceError or StoreError."""
        view = memoryview(data)
        with store_errors(self._root):
            written = 0
            while written < len(view):
                written += os.pwrite(self._fd, view[written:], offset + written)
        if self._hasher is not None and offset < self._hashed:
            self._hasher = None  # what was hashed is not what is there now
        elif self._hasher is not None and offset == self._hashed:
            self._hasher.update(view)
            self._hashed += len(view)
        self._add(offset, offset + len(view))

    def _add(self, start: int, end: int) -> None:
        """Merge a span into the sorted, disjoint list of what is there."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self._spans, (start, end)]):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self._spans = merged

    def commit(self, expected: Descriptor, /) -> None:
        """Verify, make durable, publish. The directory is synchronised by the layout.

        Raises:
            VerificationError: the bytes are not ``expected``; the ingest is gone then.
        """
        try:
            with store_errors(self._root):
                self._check_whole(expected)
                check(expected, os.fstat(self._fd).st_size, self._encoded(expected))
                os.fchmod(self._fd, BLOB_MODE)
                os.fsync(self._fd)
                final = blob_path(self._root, expected)
                final.parent.mkdir(parents=True, exist_ok=True)
                self._path.replace(final)
        except BaseException:
            self.abort()
            raise
        self._close()

    def _check_whole(self, expected: Descriptor) -> None:
        if self.missing():
            written = sum(end - start for start, end in self._spans)
            raise VerificationError(
                f"{expected.digest} is not whole: {written} of {expected.size} bytes came"
            )

    def _encoded(self, expected: Descriptor) -> str:
        """The hash of what is in the file, from the running hasher where that saw all of it."""
        own = self._expected
        if self._hasher and own and own.digest.algorithm == expected.digest.algorithm:
            hasher, offset = self._hasher, self._hashed
        else:
            hasher, offset = expected.digest.hasher(), 0
        while chunk := os.pread(self._fd, CHUNK_SIZE, offset):
            hasher.update(chunk)
            offset += len(chunk)
        return hasher.hexdigest()

    def abort(self) -> None:
        """Forget everything written so far."""
        if self._close():
            self._path.unlink(missing_ok=True)

    def _close(self) -> bool:
        """Close the file, once: its number may be another file's by now."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
        return fd >= 0


def blob_path(root: Path, content: Descriptor) -> Path:
    """Where the layout keeps a blob; the digest is strict, so nothing can climb out."""
    return root / "blobs" / content.digest.algorithm / content.digest.encoded
