"""Frames to the worker. Tokens of fast texts are gathered for a short time.

A frame for each token would wake the worker and its client for each token. Their work takes CPU
time from the computation of the next token.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import BinaryIO

from clowder_aimage.engine import frame
from clowder_aimage.model.text.language_model import TextDelta, join_deltas

# Seconds between two frames of a text
MIN_INTERVAL = 0.01


class FrameWriter:
    """Writes frames to a file, from any thread. ``clock`` measures the intervals.

    A token is written at once, unless its text had a frame just before: then it is held back, for
    ``MIN_INTERVAL`` seconds at most while ``write_in_time`` runs, and joined to the next tokens.
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

    def write_piece(self, number: int, piece: TextDelta) -> None:
        """Write a piece of the text of a request, or hold it back. Raises BrokenPipeError."""
        with self._lock:
            self._held.setdefault(number, []).append(piece)
            if self._clock() - self._written.get(number, -MIN_INTERVAL) >= MIN_INTERVAL:
                self._write(self._release())
            elif not self._is_held.is_set():
                self._is_held.set()

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
                frames.append(frame.encode({"is": "piece", "id": number, **asdict(piece)}))
        self._held.clear()
        return b"".join(frames)

    def _write(self, data: bytes) -> None:
        if data:
            self._target.write(data)
            self._target.flush()
