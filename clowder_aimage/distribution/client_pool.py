"""Repositories that threads share, so that each need not connect and authenticate anew."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions, Repository

MOST = 32  # repositories whose connections are kept


@dataclass(eq=False)
class _Lent:
    """A repository that several threads may use; the last one closes it if it is retired."""

    repository: Repository
    uses: int = 0
    users: int = 0
    is_retired: bool = False


class ClientPool:
    """Repositories reached by ``connection``. One that was lent ``uses`` times begins anew: it
    remembers every manifest it has fetched, and credentials may have changed."""

    def __init__(self, connection: ClientOptions, *, uses: int) -> None:
        self._connection, self._uses = connection, uses
        self._lock = threading.Lock()
        self._lent: OrderedDict[str, _Lent] = OrderedDict()

    @contextlib.contextmanager
    def lend(self, reference: Reference) -> Iterator[Repository]:
        """The repository that ``reference`` is in."""
        name = reference.name
        with self._lock:
            lent = self._lent.get(name)
            if lent is None:
                lent = self._lent[name] = _Lent(Repository(reference, self._connection))
            self._lent.move_to_end(name)
            lent.users += 1
            lent.uses += 1
            if lent.uses >= self._uses:
                self._retire(name)
            while len(self._lent) > MOST:
                self._retire(next(iter(self._lent)))
        try:
            yield lent.repository
        finally:
            with self._lock:
                lent.users -= 1
                is_over = lent.is_retired and not lent.users
            if is_over:
                lent.repository.__exit__(None, None, None)

    def close(self) -> None:
        """Close all connections; requests under way fail."""
        with self._lock:
            lent = list(self._lent.values())
            self._lent.clear()
        for each in lent:
            each.repository.__exit__(None, None, None)

    def _retire(self, name: str) -> None:
        lent = self._lent.pop(name)
        lent.is_retired = True
        if not lent.users:
            lent.repository.__exit__(None, None, None)
