"""Which dialects a registry refused, so that the next push does not begin with them."""

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
    """A small file of what hosts refused while they took another dialect.

    It is a memory, not a truth: unreadable, it is empty, and where it cannot be written (or has
    no ``path``), nothing is remembered. Of two processes that write it at once, one is heard.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock

    def refused(self, host: str) -> frozenset[str]:
        """The dialects that ``host`` refused within the last 30 days."""
        return frozenset(self._read().get(host, {}))

    def learn(self, host: str, refused: Collection[str], taken: str) -> None:
        """Keep that ``host`` refused some dialects, and then took another."""
        known = self._read()
        old = known.get(host, {})
        if not refused and taken not in old:
            return
        now = int(self._clock())
        new = {name: at for name, at in old.items() if name != taken}
        self._write(known | {host: new | dict.fromkeys(refused, now)})

    def forget(self, host: str) -> None:
        """``host`` takes nothing that it took before: begin anew."""
        known = self._read()
        if known.pop(host, None) is not None:
            self._write(known)

    def _read(self) -> dict[str, dict[str, float]]:
        """What was refused lately, and when, by host; whatever else stands there is passed over."""
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
