"""A tar that is read once, from its beginning to its end, and not trusted.

Headers are tarfile's to read; what they may cost is bounded here. Nothing is extracted by its path:
a member is what its header says, and the bytes that follow it.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, cast

from clowder_aimage.content.buffer import CHUNK_SIZE, new_buffer
from clowder_aimage.errors import FormatError

_HEADER = 64 * 1024  # bytes of a member's header with all its extensions
_FAULTS = (tarfile.TarError, ValueError, LookupError, ArithmeticError, RecursionError)


class TarReader:
    """The tar whose bytes ``read(view)`` gives, some at a time and 0 at the end. Errors call
    it ``name``, and say ``hint`` where it breaks off. ``skip(count)`` passes over bytes without
    reading them, or says that it cannot.
    """

    def __init__(
        self,
        read: Callable[[memoryview], int],
        name: str,
        *,
        hint: str | None = None,
        skip: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._source, self._skip = read, skip
        self._name, self._hint = name, hint
        self.position = 0  # the byte that is read next
        self._budget = _HEADER
        self._last = b""  # what tarfile read last: the end, or what is no header

    def members(self) -> Iterator[tarfile.TarInfo]:
        """All entries, to the last header; what follows the archive's end is not read.

        Raises:
            FormatError: it is no tar, is damaged, or breaks off.
        """
        with self._faults("is no tar archive"):
            tar = tarfile.open(fileobj=cast(IO[bytes], self), mode="r:", encoding="utf-8")
        while True:
            self._budget = _HEADER
            with self._faults(f"is damaged at byte {self.position}"):
                found = tar.next()
            if found is None:
                break
            tar.members.clear()  # type: ignore[attr-defined]  # or it would keep all of them
            yield found
        if len(self._last) < tarfile.BLOCKSIZE:
            raise self._broken()
        if self._last.strip(b"\0"):
            raise FormatError(f"{self._name} is damaged at byte {self.position}: no header there")

    def read_exactly(self, view: memoryview) -> None:
        """Fill ``view`` from a member. Raises FormatError where the archive breaks off."""
        if self._fill(view) < len(view):
            raise self._broken()

    def _fill(self, view: memoryview) -> int:
        done = 0
        while done < len(view) and (count := self._source(view[done:])):
            done += count
        self.position += done
        return done

    @contextmanager
    def _faults(self, what: str) -> Iterator[None]:
        try:
            yield
        except _FAULTS as error:
            raise FormatError(f"{self._name} {what}: {error}") from None

    def _broken(self) -> FormatError:
        return FormatError(f"{self._name} breaks off at byte {self.position}", hint=self._hint)

    # -- what tarfile calls, for headers alone

    def tell(self) -> int:
        return self.position

    def read(self, size: int) -> bytes:
        """Raises FormatError where a member's header is longer than any needs to be."""
        self._budget -= max(size, 1)
        if size < 0 or self._budget < 0:
            raise FormatError(
                f"{self._name} has a header of more than {_HEADER} bytes at byte {self.position}"
            )
        buffer = bytearray(size)
        self._last = bytes(buffer[: self._fill(memoryview(buffer))])
        return self._last

    def seek(self, position: int, whence: int = io.SEEK_SET) -> None:
        """Pass over what was not read. Raises FormatError for a way back."""
        count = position - self.position
        if count < 0 or whence != io.SEEK_SET:
            raise FormatError(f"{self._name} is damaged: its headers contradict each other")
        if self._skip(count):
            self.position += count
            return
        buffer = new_buffer(min(CHUNK_SIZE, count))
        while count and (passed := self._fill(buffer[: min(len(buffer), count)])):
            count -= passed
