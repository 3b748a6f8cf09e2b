"""The blobs that manifests need, kept in the store as one table of numbers.

The content of a manifest never changes, and reading and scanning it takes longer than counting its
blobs. So it is scanned once. Other programs may write the file: a malformed table is ignored, and
its manifests are scanned again. A store that cannot be written has none.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from array import array
from collections.abc import Iterable
from itertools import accumulate, pairwise
from pathlib import Path
from zlib import crc32

from clowder_aimage import __version__
from clowder_aimage.errors import AImageError, FormatError
from clowder_aimage.layout.lock import PRIVATE, check_own, make_directory, open_regular
from clowder_aimage.layout.metadata import write_shared
from clowder_aimage.oci import read_json

_KIND, _NAME = "needs", "table"
_MAX_HEAD, _MAX_SIZE = 1024, 256 * 1024 * 1024  # bytes
# A table is written for that many new manifests, and this part of those in it.
_MIN_ADDED, _MAX_SHARE = 32, 8


class NeedTable:
    """The needs of the manifests in the store at ``root``. ``digests`` are those of all blobs.

    Needs are read from the file, and written to it by ``close`` if enough of them are new.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.digests: list[str] = []
        self._needs: dict[str, array[int]] = {}
        self._numbers: dict[str, int] | None = None
        with contextlib.suppress(OSError, ValueError, LookupError, AImageError):
            self.digests, self._needs = _parse(_read(root))
        self._kept = len(self._needs)
        self._used: dict[str, array[int]] = {}

    def find(self, manifest: str) -> array[int] | None:
        """Return the numbers of the blobs that a manifest needs; None if they are unknown."""
        if (blobs := self._needs.get(manifest)) is not None:
            self._used[manifest] = blobs
        return blobs

    def number(self, digests: Iterable[str]) -> array[int]:
        """Return the numbers of blobs."""
        if self._numbers is None:
            self._numbers = {digest: number for number, digest in enumerate(self.digests)}
        numbers = array("I")
        for digest in digests:
            number = self._numbers.setdefault(digest, len(self.digests))
            if number == len(self.digests):
                self.digests.append(digest)
            numbers.append(number)
        return numbers

    def add(self, manifest: str, blobs: array[int]) -> None:
        """Add what a manifest needs, all documents of which were verified."""
        self._needs[manifest] = self._used[manifest] = blobs

    def close(self) -> None:
        """Write the needs that were found or added, if the file has few of them, or many others."""
        added, kept = len(self._needs) - self._kept, self._kept
        is_behind = added >= max(_MIN_ADDED, kept // _MAX_SHARE)
        if not is_behind and kept <= 2 * len(self._used) + _MIN_ADDED:
            return
        with contextlib.suppress(OSError, AImageError):
            data = _encode(self.digests, self._used)
            if len(data) <= _MAX_SIZE:
                directory = make_directory(self._root, PRIVATE, _KIND)
                write_shared(directory / _NAME, (data,), durable=False)


def _read(root: Path) -> bytes:
    path = os.path.join(check_own(root, _KIND), _NAME)
    with open(open_regular(path), "rb", buffering=0) as file:
        return file.read(_MAX_SIZE) or b""


def _encode(digests: list[str], needs: dict[str, array[int]]) -> bytes:
    """Return a table: a head, a digest a line, and numbers of four bytes.

    The first numbers are those of manifests, then come the lengths of their needs, and then these.
    """
    used = sorted({number for blobs in needs.values() for number in blobs})
    numbers = {digests[number]: position for position, number in enumerate(used)}
    renumbered = dict(zip(used, range(len(used)), strict=True))
    body = array("I", map(numbers.__getitem__, needs))
    body.extend(map(len, needs.values()))
    body.extend(renumbered[number] for blobs in needs.values() for number in blobs)
    text = "".join(f"{digests[number]}\n" for number in used).encode()
    content = text + _swap(body).tobytes()
    head = {"version": __version__, "manifests": len(needs), "text": len(text)}
    return json.dumps(head | {"checksum": crc32(content)}).encode() + b"\n" + content


def _parse(data: bytes) -> tuple[list[str], dict[str, array[int]]]:
    """Return the digests and the needs in a table. Raises ValueError, FormatError."""
    line, _, _ = data[:_MAX_HEAD].partition(b"\n")
    head = read_json(line, "the table of needs")
    if not isinstance(head, dict) or head.get("version") != __version__:
        raise FormatError("the table of needs is of another version")
    content, count, size = memoryview(data)[len(line) + 1 :], head["manifests"], head["text"]
    is_form = type(count) is int and type(size) is int and count >= 0 <= size <= len(content)
    # An interrupted write may have left zeros
    if not is_form or head["checksum"] != crc32(content):
        raise FormatError("the table of needs is damaged")
    digests = bytes(content[:size]).decode("ascii").split("\n")[:-1]
    numbers = array("I")
    numbers.frombytes(content[size:])
    numbers = _swap(numbers)
    blobs = numbers[:count], numbers[2 * count :]
    if max(max(part, default=-1) for part in blobs) >= len(digests):
        raise FormatError("the table of needs has other numbers")
    ends = list(accumulate(numbers[count : 2 * count], initial=2 * count))
    if len(ends) != count + 1 or ends[-1] != len(numbers):
        raise FormatError("the table of needs has other lengths")
    manifests = map(digests.__getitem__, numbers[:count])
    return digests, {
        manifest: numbers[start:end]
        for manifest, (start, end) in zip(manifests, pairwise(ends), strict=True)
    }


def _swap(numbers: array[int]) -> array[int]:
    """Return numbers in the order of bytes of the file, which is that of most processors."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers
