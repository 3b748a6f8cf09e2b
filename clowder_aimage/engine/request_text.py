"""The texts of requests, so that lines of a model process that repeat one are not logged.

Libraries write to standard error as they like: a prompt that they cannot parse, or a traceback.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

# Requests whose texts are known
_REQUESTS = 32
# Characters of a text or a line that is compared: shorter ones occur by chance, and longer ones
# would take memory
_LEAST, _MOST = 4, 1 << 16


class RequestTexts:
    """The texts of the last requests of a process."""

    def __init__(self) -> None:
        self._texts = deque[frozenset[str]](maxlen=_REQUESTS)

    def add(self, request: dict[str, Any]) -> None:
        """Remember the texts of a request, also the keys of nested objects."""
        self._texts.append(
            frozenset(
                part
                for field in request.values()
                for text in _iter_texts(field)
                for part in (text, *text.splitlines())
                if _LEAST <= len(part.strip()) <= _MOST
            )
        )

    def occur_in(self, line: str) -> bool:
        """Return True if a line has a text of a request, or is a part of one."""
        return any(
            text in line or (len(line) >= _LEAST and line in text)
            for texts in self._texts
            for text in texts
        )


def _iter_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, nested in value.items():
            yield from (*_iter_texts(key), *_iter_texts(nested))
    elif isinstance(value, list | tuple):
        for nested in value:
            yield from _iter_texts(nested)
