"""Frames to the worker. The pieces of fast texts are gathered, and written a few times a second.

A frame for each token would wake the worker and its client for each token, and their work takes
the cores on which the next token is computed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import BinaryIO

from clowder_aimage.engine import frame
from clowder_aimage.model.text.language_model import TextPiece, join_pieces

GATHERED = 0.01  # seconds between two frames of a text


class FrameWriter:
    """Writes frames to a file, from any thread. ``clock`` measures what is held back.

    A piece is written at once, unless its text had one just before: then it is held back, for
    ``GATHERED`` seconds at most while ``write_in_time`` runs, and joined to those that follow.
    """

    def __init__(self, target: BinaryIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._target, self._clock = target, clock
        self._lock = threading.Lock()  # guards all below
        self._written: dict[int, float] = {}  # when a text had its last frame, by its request
        self._held: dict[int, list[TextPiece]] = {}
        self._is_held = threading.Event()

    def write(self, message: frame.Message, data: bytes = b"") -> None:
        """Write a frame, after the pieces that are held back. Raises BrokenPipeError."""
        with self._lock:
            self._write(self._release() + frame.encode(message, data))
            if message["is"] in ("done", "error"):
                self._written.pop(message["id"], None)

    def write_piece(self, number: int, piece: TextPiece) -> None:
        """Write a piece of the text of a request, or hold it back. Raises BrokenPipeError."""
        with self._lock:
            self._held.setdefault(number, []).append(piece)
            if self._clock() - self._written.get(number, -GATHERED) >= GATHERED:
                self._write(self._release())
            elif not self._is_held.is_set():
                self._is_held.set()

    def write_in_time(self) -> None:
        """Write pieces that are held back too long, until the worker has exited."""
        with contextlib.suppress(BrokenPipeError):
            while self._is_held.wait():
                time.sleep(GATHERED)
                with self._lock:
                    self._is_held.clear()
                    self._write(self._release())

    def _release(self) -> bytes:
        """Return the frames of the pieces that are held back: one for each text and kind."""
        frames, now = [], self._clock()
        for number, pieces in self._held.items():
            self._written[number] = now
            for piece in join_pieces(pieces):
                frames.append(frame.encode({"is": "piece", "id": number, **asdict(piece)}))
        self._held.clear()
        return b"".join(frames)

    def _write(self, data: bytes) -> None:
        if data:
            self._target.write(data)
            self._target.flush()
