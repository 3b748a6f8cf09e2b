"""What is being fetched from a registry at the moment: each range once, however many want it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import BinaryIO

from clowder_aimage.content.verified_reader import check, readinto
from clowder_aimage.errors import VerificationError
from clowder_aimage.node.rendezvous import BlobRange
from clowder_aimage.oci import Digest

_BLOCK = 256 * 1024
Opened = Callable[[BlobRange], AbstractContextManager[BinaryIO]]


class Flight:
    """One range on its way. ``come`` bytes have come; once it is ``landed`` there is an ``error``,
    or ``data`` with its SHA-256 in ``digest``."""

    def __init__(self, part: BlobRange) -> None:
        self.part = part
        self.come = 0
        self.landed = threading.Event()
        self.data = bytearray()
        self.digest = b""
        self.error: BaseException | None = None

    def run(self, opened: Opened) -> None:
        """Fetch it. What goes wrong is raised here, and known to those who wait.

        Raises:
            VerificationError: it is too short, or all of its blob and not it.
            AccessError: it cannot be had.
        """
        try:
            with opened(self.part) as reader:
                data = self._read(reader)
            self.digest = verified(self.part, data)
            self.data = data
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.landed.set()

    def cancel(self) -> None:
        """There is no need for it: those who wait look again."""
        self.landed.set()

    def _read(self, reader: BinaryIO) -> bytearray:
        data = bytearray(self.part.length)
        view = memoryview(data)
        while self.come < len(data):
            count = readinto(reader, view[self.come : self.come + _BLOCK])
            if not count:
                where = self.part.start + self.come
                raise VerificationError(f"{self.part.digest} ends after {where} bytes")
            self.come += count
        return data


def verified(part: BlobRange, data: bytes | bytearray) -> bytes:
    """The SHA-256 of a range. Raises VerificationError where it is all of its blob, and not it."""
    digest = hashlib.sha256(data)
    if part.is_whole:
        hasher = digest
        if part.digest.algorithm != "sha256":
            hasher = hashlib.new(part.digest.algorithm, data)
        check(part.content, len(data), hasher.hexdigest())
    return digest.digest()


class Flights:
    """Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[BlobRange, Flight] = {}

    def board(self, part: BlobRange, *, may_begin: bool = True) -> tuple[Flight | None, bool]:
        """The flight of a range, and whether it is new: then the caller has it ``run`` or
        ``cancel``, and has it forgotten (``leave``) when what came can be had from elsewhere."""
        with self._lock:
            found = self._flights.get(part)
            if found is not None and (found.data or not found.landed.is_set()):
                return found, False
            if not may_begin:
                return None, False
            made = self._flights[part] = Flight(part)
            return made, True

    def leave(self, flight: Flight) -> None:
        """Forget a flight; those who have boarded it still get there."""
        with self._lock:
            if self._flights.get(flight.part) is flight:
                del self._flights[flight.part]

    def forget(self, digest: Digest) -> None:
        """Forget those of a blob."""
        with self._lock:
            for part in [part for part in self._flights if part.digest == digest]:
                del self._flights[part]
