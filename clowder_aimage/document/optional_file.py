"""Files of the user that a command works without: configuration, credentials, state.

Such a file counts as absent if it is missing, unreadable, empty or malformed. If it exists and
cannot be used, a warning names it and the reason, once in a process.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from clowder_aimage.document.unicode_text import recode_file
from clowder_aimage.errors import FormatError

_T = TypeVar("_T")
_listeners: list[Callable[[str], object]] = []
_issued: set[str] = set()


def read_optional(path: Path | None, parse: Callable[[bytes], _T]) -> _T | None:
    """Return the parsed content of a file, or None if the file counts as absent.

    ``parse`` raises ValueError, RecursionError or FormatError for empty and malformed content.
    """
    try:
        return None if path is None else parse(recode_file(_read(path)))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, RecursionError, FormatError) as error:
        warn(f"{path} is ignored: {getattr(error, 'strerror', None) or error}")
    return None


def _read(path: Path) -> bytes:
    # A FIFO would be waited for.
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")
    return path.read_bytes()


def report_warnings(listener: Callable[[str], object] | None = None) -> None:
    """Call ``listener`` with each new warning, from any thread; without one, log them."""
    _listeners[:] = [] if listener is None else [listener]
    _issued.clear()


def warn(message: str) -> None:
    """Issue a warning, once in a process."""
    if message in _issued:
        return
    _issued.add(message)
    for listener in _listeners:
        listener(message)
    if not _listeners:
        import logging

        logging.getLogger("aimage.config").warning(message)
