"""Blobs that are read while they are being fetched."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from clowder_aimage.content.store import BlobFiles, ContentStore, Reader
from clowder_aimage.errors import NotFoundError
from clowder_aimage.oci import Descriptor

_T = TypeVar("_T")
# Seconds between two checks for a blob.
_INTERVAL = 0.01
# Checks before a read ends a group commit. A sync may cost as much as all of its blobs.
_ATTEMPTS = 25


class ArrivingFiles(BlobFiles):
    """The blobs of ``store``; a read waits until its blob is verified and stored.

    ``is_over`` returns True if no more blobs will arrive, or raises the error of their fetch. The
    reads then raise it, too. Another process may fetch them.
    """

    def __init__(self, store: ContentStore, is_over: Callable[[], bool]) -> None:
        self._store, self._is_over = store, is_over

    def exists(self, content: Descriptor) -> bool:
        """Return True if the blob has arrived."""
        return self._store.is_durable(content)

    def open(self, content: Descriptor, /) -> Reader:
        return self._read_when_stored(content, self._store.open)

    def find_path(self, content: Descriptor, /) -> Path:
        return self._read_when_stored(content, self._store.find_path)

    def _read_when_stored(self, content: Descriptor, read: Callable[[Descriptor], _T]) -> _T:
        for attempts in itertools.count():
            # Read before the check: a blob that arrives in between is not missed.
            is_last = self._is_over()
            has_arrived = self.exists(content) or (
                attempts >= _ATTEMPTS and self._store.exists(content)
            )
            with contextlib.suppress(*(() if is_last else (NotFoundError,))):
                if is_last or has_arrived:
                    return read(content)
            time.sleep(_INTERVAL)
        raise AssertionError
