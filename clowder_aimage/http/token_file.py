"""The file of a server's tokens, which is read again when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from pathlib import Path

from clowder_aimage.config.token_file import WORKER_SCOPES, parse_tokens, read_tokens
from clowder_aimage.errors import UsageError

# Seconds between two looks at the file
INTERVAL = 1.0
_log = logging.getLogger("aimage.http")


class TokenFile(Mapping[str, str]):
    """The tokens in a file with their scopes; one without tokens admits nobody.

    While it cannot be read, its last tokens are valid. Raises UsageError if the first read fails.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        scopes: Collection[str] = WORKER_SCOPES,
    ) -> None:
        self._path, self._clock, self._scopes = path, clock, scopes
        self._version, self._tokens = _identify(path), read_tokens(path, scopes)
        self._due = clock() + INTERVAL

    def _read(self) -> dict[str, str]:
        if self._clock() >= self._due:
            self._due = self._clock() + INTERVAL
            version = _identify(self._path)
            if version != self._version:
                self._version = version
                try:
                    self._tokens = parse_tokens(self._path, self._scopes)
                except UsageError as error:
                    _log.warning("the tokens are not read again", extra={"reason": error.message})
        return self._tokens

    def __bool__(self) -> bool:
        # Without tokens in it nobody is admitted; a server without a file admits everybody
        return True

    def __getitem__(self, token: str) -> str:
        return self._read()[token]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


def _identify(path: Path) -> Hashable:
    """Return a value that changes when the file is changed or replaced."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
