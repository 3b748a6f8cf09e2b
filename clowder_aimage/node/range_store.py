"""The ranges that this node has, and how it comes to those that it is at home to.

A range is had in one of four places: in a blob of the layout, in a file that was kept for the
neighbours, in the file of a blob that is being pulled, or in memory while it comes from the
registry. What its SHA-256 is, this process has found itself, or been told by another node: the
*first hand* is the registry's, or a verified blob. Others are given what came by first hand, and
what did not only where they know its SHA-256 from where we have it: so nobody answers for bytes
that another made up.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, cast

import structlog

from clowder_aimage.errors import (
    AImageError,
    NetworkError,
    NotFoundError,
    StoreError,
    VerificationError,
)
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.lock import check_own, open_regular
from clowder_aimage.node.flight import Flight, Flights, Opened
from clowder_aimage.node.peer_upstream import PeerUpstream
from clowder_aimage.node.piece import LoadedPiece, Piece, hashed
from clowder_aimage.node.range_file import RangeFile
from clowder_aimage.node.rendezvous import BlobRange
from clowder_aimage.oci import Digest, Reference

AT_ONCE = 4  # ranges that are fetched for others at a time: each is in memory meanwhile
_KNOWN = 32768  # ranges whose SHA-256 is remembered: those of half a tebibyte
_LOOK = 0.2  # seconds between looks at whether we are to end

_log = structlog.get_logger("aimage.worker")


@dataclass(slots=True)
class _Known:
    digest: bytes
    giver: str | None = None  # the node that told us; nobody where it is first hand
    inode: int = 0  # of the file in which it was found to be so

    @property
    def is_first_hand(self) -> bool:
        return self.giver is None


class Ranges:
    """Threads may share it."""

    def __init__(self, layout: ImageLayout, kept: RangeFile, upstream: PeerUpstream) -> None:
        self._layout, self._kept, self._upstream = layout, kept, upstream
        self._lock = threading.Lock()
        self._known: OrderedDict[BlobRange, _Known] = OrderedDict()
        self._flights = Flights()
        self._room = threading.BoundedSemaphore(AT_ONCE)
        self.closed = threading.Event()

    def close(self) -> None:
        """Those who wait for something hear that it does not come."""
        self.closed.set()

    # -- what is known

    def know(self, part: BlobRange, digest: bytes, *, giver: str | None = None) -> None:
        """What the SHA-256 of a range is, and which node told us, if one did."""
        with self._lock:
            self._known[part] = _Known(digest, giver)
            self._known.move_to_end(part)
            while len(self._known) > _KNOWN:
                self._known.popitem(last=False)

    def word(self, part: BlobRange) -> bytes | None:
        """The SHA-256 of a range that we answer for."""
        with self._lock:
            known = self._known.get(part)
        return known.digest if known is not None and known.is_first_hand else None

    def giver(self, part: BlobRange) -> str | None:
        """The node by whose word we have a range; it answers for it."""
        with self._lock:
            known = self._known.get(part)
        return known.giver if known is not None else None

    def forget(self, digest: Digest) -> None:
        """What came of a blob was wrong, whoever it was: nothing is known of it any more."""
        with self._lock:
            for part in [part for part in self._known if part.digest == digest]:
                del self._known[part]
        self._flights.forget(digest)
        self._kept.forget(digest)

    # -- for others

    def find(self, part: BlobRange, word: bytes | None = None) -> Piece | None:
        """A range that is here: one that we answer for, or the one whose SHA-256 is ``word``.
        What is read for that is read now: it takes a moment."""
        for place in (self._in_blob, self._in_file, self._in_ingest):
            piece = place(part, word)
            if piece is not None:
                if word in (None, piece.digest):
                    return piece
                piece.close()
        return None

    def fetch(self, reference: Reference, part: BlobRange, seconds: float) -> Piece | int:
        """A range from the registry, for another node: fetched once, however many ask. Where it
        takes longer, how many bytes have come by then; it goes on coming.

        Raises:
            AImageError: it cannot be had.
        """
        has_room = self._room.acquire(blocking=False)
        flight, is_new = self._flights.board(part, may_begin=has_room)
        if has_room and not is_new:
            self._room.release()
        if flight is None:
            return 0
        if is_new:
            threading.Thread(
                target=self._bring, args=(reference, flight), name="aimage-range", daemon=True
            ).start()
        if not flight.landed.wait(seconds):
            return flight.come
        if flight.error is not None:
            raise _again(flight.error)
        if flight.data:
            return Piece(flight.digest, part.length, data=flight.data)
        return self.find(part) or 0

    def is_coming(self, part: BlobRange) -> bool:
        """Whether a range is on its way here from the registry."""
        return self._flights.board(part, may_begin=False)[0] is not None

    def coming(self, part: BlobRange, seconds: float) -> Piece | int | None:
        """A range that is on its way here from the registry, as ``fetch`` gives it; None where it
        is not."""
        flight, _ = self._flights.board(part, may_begin=False)
        if flight is None:
            return None
        if not flight.landed.wait(seconds):
            return flight.come
        if flight.data:
            return Piece(flight.digest, part.length, data=flight.data)
        return self.find(part)

    def _bring(self, reference: Reference, flight: Flight) -> None:
        """Fetch a range for others, and keep it."""
        part = flight.part
        try:
            if (piece := self.find(part)) is not None:  # it has come since we looked
                piece.close()
                return
            flight.run(lambda part: self._upstream.open(reference, part))
            self.know(part, flight.digest)
            self._kept.add(part, flight.data, flight.digest)
        except AImageError as error:
            _log.warning("cannot fetch for a neighbour", reason=error.message)
            if isinstance(error, VerificationError):
                with contextlib.suppress(AImageError):
                    self._upstream.distrust(reference, part)
        finally:
            flight.cancel()
            self._flights.leave(flight)
            self._room.release()

    # -- for a pull of our own

    def take(self, part: BlobRange) -> LoadedPiece | None:
        """A range that was fetched for others before."""
        found = self._kept.open(part)
        if found is None:
            return None
        file, digest = found
        with file, contextlib.suppress(OSError):
            data = file.read(part.length + 1)
            if hashlib.sha256(data).digest() == digest:
                self.know(part, digest)
                return LoadedPiece(data, digest)
        return None

    def load(self, part: BlobRange, opened: Opened) -> LoadedPiece:
        """A range from the registry, which others may then have from us.

        Raises:
            AImageError: as ``opened`` does; NetworkError when we are to end.
        """
        while not self.closed.is_set():
            flight, is_new = self._flights.board(part)
            assert flight is not None
            if not is_new:
                while not flight.landed.wait(_LOOK) and not self.closed.is_set():
                    pass
                if flight.data:
                    return LoadedPiece(flight.data, flight.digest)
                if (kept := self.take(part)) is not None:
                    return kept
                continue  # it failed for somebody else; we have our own way to the registry
            if (kept := self.take(part)) is not None:  # it has come since the caller looked
                flight.cancel()
                self._flights.leave(flight)
                return kept
            try:
                flight.run(opened)
            except BaseException:
                self._flights.leave(flight)
                raise
            self.know(part, flight.digest)
            return LoadedPiece(flight.data, flight.digest, partial(self._released, flight))
        raise NetworkError("this node is about to end", hint="try again")

    def _released(self, flight: Flight, is_used: bool) -> None:
        """A pull is done with what it fetched: it lies in the pull's own file, if all of it was
        used; else it is kept for those who may ask for it."""
        if not is_used and self.word(flight.part) == flight.digest:
            self._kept.add(flight.part, flight.data, flight.digest)
        self._flights.leave(flight)

    # -- the places

    def _in_blob(self, part: BlobRange, _: bytes | None) -> Piece | None:
        with contextlib.suppress(OSError, AImageError):
            file = cast(BinaryIO, io.FileIO(open_regular(self._layout.path(part.content))))
            try:
                status = os.fstat(file.fileno())
                if status.st_size == part.size:
                    digest = self._digest(part, file, status.st_ino)
                    if digest is not None:
                        return Piece(digest, part.length, file, part.start)
            except BaseException:
                file.close()
                raise
            file.close()
        return None

    def _digest(self, part: BlobRange, file: BinaryIO, inode: int) -> bytes | None:
        """The SHA-256 of a range of a blob that was verified when it came."""
        with self._lock:
            known = self._known.get(part)
            if known is not None and known.is_first_hand and known.inode == inode:
                return known.digest
        digest = hashed(file, part)
        if digest is not None:
            self.know(part, digest)
            with self._lock:
                if part in self._known:
                    self._known[part].inode = inode
        return digest

    def _in_file(self, part: BlobRange, _: bytes | None) -> Piece | None:
        found = self._kept.open(part)
        return Piece(found[1], part.length, found[0]) if found is not None else None

    def _in_ingest(self, part: BlobRange, word: bytes | None) -> Piece | None:
        """In the file that a pull of ours gathers the blob in. What we know of it may not be
        written yet, or be written over: so it is read before it is sent, the first time."""
        with self._lock:
            known = self._known.get(part)
        if known is None or not (known.is_first_hand or word == known.digest):
            return None
        with contextlib.suppress(OSError, StoreError):
            directory = check_own(self._layout.root, "ingest")
            path = os.path.join(directory, part.digest.encoded)
            file = cast(BinaryIO, io.FileIO(open_regular(path)))
            with contextlib.ExitStack() as stack:
                stack.callback(file.close)
                inode = os.fstat(file.fileno()).st_ino
                if known.inode != inode or part.is_whole:
                    if hashed(file, part) != known.digest:
                        return None
                    known.inode = inode
                stack.pop_all()
                return Piece(known.digest, part.length, file, part.start)
        return None


def _again(error: BaseException) -> AImageError:
    """What another thread has raised, to be raised anew."""
    message = error.message if isinstance(error, AImageError) else str(error)
    return NotFoundError(message) if isinstance(error, NotFoundError) else AImageError(message)
