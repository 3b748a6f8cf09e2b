"""Ctrl-C, remembered: an import that it ends may report it as another error."""

from __future__ import annotations

import signal
from collections.abc import Callable


class Interruption:
    """The signal SIGINT: it raises KeyboardInterrupt and stays pending until it is cleared.

    Python's parser, for example, turns an exception inside it into a SyntaxError. ``copies`` are
    those of the command, each as a function that returns True while it transfers blobs.
    """

    is_pending = False
    # True if it came during such a copy
    has_stopped_copy = False

    def __init__(self) -> None:
        self.copies: list[Callable[[], bool]] = []

    def install(self) -> None:
        """Handle SIGINT from now on, unless it is ignored, as in a shell's background jobs."""
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._raise)

    def _raise(self, *_: object) -> None:
        self.is_pending = True
        self.has_stopped_copy = any(is_copying() for is_copying in self.copies)
        raise KeyboardInterrupt


interruption = Interruption()
