"""Ctrl-C, remembered: an import that it ends may report it as another error."""

from __future__ import annotations

import signal


class Interruption:
    """The signal SIGINT: it raises KeyboardInterrupt and stays pending until it is cleared.

    Python's parser, for example, turns an exception inside it into a SyntaxError.
    """

    is_pending = False

    def install(self) -> None:
        """Handle SIGINT from now on, unless it is ignored, as in a shell's background jobs."""
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._raise)

    def _raise(self, *_: object) -> None:
        self.is_pending = True
        raise KeyboardInterrupt


interruption = Interruption()
