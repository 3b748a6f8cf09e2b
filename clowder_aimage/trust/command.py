"""Commands of the user that sign or stamp: a key or an authority is reached by them."""

from __future__ import annotations

import shlex
import subprocess

from clowder_aimage.errors import UnauthorizedError, UsageError

# Seconds: a person may have to touch a token.
_TIMEOUT = 120.0


class Command:
    """A command that reads bytes on stdin and writes an answer of at most ``limit`` bytes.

    ``done`` is what it has done, for errors: ``signed``.
    """

    def __init__(self, text: str, done: str, limit: int) -> None:
        try:
            self._words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"invalid command {text!r}: {error}") from None
        if not self._words:
            raise UsageError("the command is empty")
        self._done, self._limit = done, limit

    @property
    def name(self) -> str:
        """The program."""
        return self._words[0]

    def run(self, data: bytes) -> bytes:
        """Return the answer to ``data``. Raises UsageError, UnauthorizedError."""
        try:
            done = subprocess.run(
                self._words, input=data, capture_output=True, timeout=_TIMEOUT, check=False
            )
        except FileNotFoundError:
            raise UsageError(f"the command {self.name} is not installed") from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise self.build_error(str(error)) from None
        if done.returncode or not done.stdout:
            said = done.stderr.decode(errors="replace").strip()[-300:]
            raise self.build_error(f"exit code {done.returncode}" + (f", {said}" if said else ""))
        if len(done.stdout) > self._limit:
            raise self.build_error(f"it has written more than {self._limit} bytes")
        return done.stdout

    def build_error(self, reason: str) -> UnauthorizedError:
        """Return the error for an answer that is none."""
        return UnauthorizedError(f"the command {self.name} has not {self._done}: {reason}")
