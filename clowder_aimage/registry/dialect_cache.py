"""A cache of the dialects that registries refuse."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from clowder_aimage.content.atomic_file import write_file

_LIFE = 30 * 24 * 3600.0  # seconds; registries learn: then the usual order is tried again
_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class DialectCache:
    """A file with the dialects that hosts refused, so that a push does not begin with them.

    An unreadable file is empty, and one that cannot be written (or has no ``path``) is ignored. Of
    two processes that write at once, the last one wins.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock

    def refused(self, host: str) -> frozenset[str]:
        """Return the dialects that ``host`` refused within the last 30 days."""
        return frozenset(self._read().get(host, {}))

    def learn(self, host: str, refused: Collection[str], taken: str) -> None:
        """Store that ``host`` refused some dialects, and then accepted another."""
        known = self._read()
        old = known.get(host, {})
        if not refused and taken not in old:
            return
        now = int(self._clock())
        new = {name: at for name, at in old.items() if name != taken}
        self._write(known | {host: new | dict.fromkeys(refused, now)})

    def forget(self, host: str) -> None:
        """Remove the entry of ``host``."""
        known = self._read()
        if known.pop(host, None) is not None:
            self._write(known)

    def _read(self) -> dict[str, dict[str, float]]:
        """Return the refused dialects with their times by host; other content is ignored."""
        if self._path is None:
            return {}
        try:
            hosts = json.loads(self._path.read_bytes())["registries"]
            return {host: self._fresh(entry["refused"]) for host, entry in hosts.items()}
        except (OSError, *_DAMAGED):
            return {}

    def _fresh(self, refused: dict[str, Any]) -> dict[str, float]:
        now = self._clock()
        return {name: at for name, at in refused.items() if 0 <= now - at < _LIFE}

    def _write(self, known: dict[str, dict[str, float]]) -> None:
        if self._path is None:
            return
        hosts = {host: {"refused": entry} for host, entry in known.items() if entry}
        data = json.dumps({"registries": hosts}, indent=1) + "\n"
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._path, data.encode(), durable=False)
