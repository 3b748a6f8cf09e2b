"""Frames to the worker. Tokens of fast texts, and of several texts, are gathered for a short time.

A write for each token would wake the worker and its client for each token. Their work takes CPU
time from the computation of the next token.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from clowder_aimage.engine import frame
from clowder_aimage.model.text.language_model import TextDelta, join_deltas

# Seconds between two frames of a text
MIN_INTERVAL = 0.01


class FrameWriter:
    """Writes frames to a file, from any thread. ``clock`` measures the intervals.

    A token is held back until ``flush``, and if its text had a frame just before, until a later
    one: for ``MIN_INTERVAL`` seconds at most while ``write_in_time`` runs. Tokens of a text that
    are held back are joined.
    """

    def __init__(self, target: BinaryIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._target, self._clock = target, clock
        # Guards the fields below
        self._lock = threading.Lock()
        # Time of the last frame of a text, by the number of the request
        self._written: dict[int, float] = {}
        self._held: dict[int, list[TextDelta]] = {}
        self._is_held = threading.Event()

    def write(self, message: frame.Message, data: bytes = b"") -> None:
        """Write a frame, after the pieces that are held back. Raises BrokenPipeError."""
        with self._lock:
            self._write(self._release() + frame.encode(message, data))
            if message["is"] in ("done", "error"):
                self._written.pop(message["id"], None)

    def hold(self, number: int, piece: TextDelta) -> None:
        """Hold back a piece of the text of a request."""
        with self._lock:
            self._held.setdefault(number, []).append(piece)
            if not self._is_held.is_set():
                self._is_held.set()

    def flush(self) -> None:
        """Write the pieces if some text had no frame just before. Raises BrokenPipeError."""
        with self._lock:
            due = self._clock() - MIN_INTERVAL
            if any(self._written.get(number, due) <= due for number in self._held):
                self._write(self._release())

    def write_in_time(self) -> None:
        """Write pieces that are held back too long, until the worker has exited."""
        with contextlib.suppress(BrokenPipeError):
            while self._is_held.wait():
                time.sleep(MIN_INTERVAL)
                with self._lock:
                    self._is_held.clear()
                    self._write(self._release())

    def _release(self) -> bytes:
        """Return the frames of the pieces that are held back: one for each text and kind."""
        frames, timestamp = [], self._clock()
        for number, pieces in self._held.items():
            self._written[number] = timestamp
            for piece in join_deltas(pieces):
                fields = piece.to_json() if isinstance(piece, TextDelta) else {}
                frames.append(frame.encode({"is": "piece", "id": number, **fields}))
        self._held.clear()
        return b"".join(frames)

    def _write(self, data: bytes) -> None:
        if data:
            self._target.write(data)
            self._target.flush()
