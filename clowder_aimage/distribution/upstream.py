"""The upstream registry of a cache. All calls block: they run in threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from clowder_aimage.content.store import Reader, Source, WrappedSource
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.distribution.repository_name import PEER
from clowder_aimage.errors import NetworkError, UsageError
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.pace import FIRST_PATIENCE

# Seconds without requests to a registry that did not respond
DOWN_PAUSE = 10.0
# Uses of a repository until it is reopened
MAX_USES = 256
# Repositories with open connections
MAX_REPOSITORIES = 32
_T = TypeVar("_T")


class _CacheOptions(ClientOptions):
    """Options that mark requests to mirrors as those of a cache.

    Mirrors answer them from the store only: caches of each other would loop.
    """

    def to_mirror(self, host: str) -> ClientOptions:
        options = super().to_mirror(host)
        return replace(options, user_agent=f"{options.user_agent} {PEER}")


@dataclass(eq=False)
class _PoolEntry:
    """A repository shared by several threads; the last one closes it if it is retired."""

    repository: Repository
    uses: int = 0
    users: int = 0
    is_retired: bool = False


class ClientPool:
    """Repositories shared by threads. One that was used ``uses`` times is reopened.

    A repository caches all fetched manifests, and credentials may have changed.
    """

    def __init__(self, connection: ClientOptions, *, uses: int) -> None:
        self._connection, self._uses = connection, uses
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _PoolEntry] = OrderedDict()

    @contextlib.contextmanager
    def connect(self, reference: Reference) -> Iterator[Repository]:
        """Yield the repository of ``reference``."""
        name = reference.name
        with self._lock:
            shared = self._open.get(name)
            if shared is None:
                shared = self._open[name] = _PoolEntry(Repository(reference, self._connection))
            self._open.move_to_end(name)
            shared.users += 1
            shared.uses += 1
            if shared.uses >= self._uses:
                self._retire(name)
            while len(self._open) > MAX_REPOSITORIES:
                self._retire(next(iter(self._open)))
        try:
            yield shared.repository
        finally:
            with self._lock:
                shared.users -= 1
                is_over = shared.is_retired and not shared.users
            if is_over:
                shared.repository.__exit__(None, None, None)

    def close(self) -> None:
        """Close all connections; running requests fail."""
        with self._lock:
            shared, self._open = self._open, OrderedDict()
        for entry in shared.values():
            entry.repository.__exit__(None, None, None)

    def _retire(self, name: str) -> None:
        shared = self._open.pop(name)
        shared.is_retired = True
        if not shared.users:
            shared.repository.__exit__(None, None, None)


class UpstreamRegistry:
    """The registry ``host``, or the part of it below ``prefix``."""

    def __init__(self, host: str, prefix: str, connection: ClientOptions) -> None:
        self.host = host
        self._prefix = f"{prefix}/" if prefix else ""
        options = {option.name: getattr(connection, option.name) for option in fields(connection)}
        # Clients of a cache wait for it, and it may have an older answer
        self._pool = ClientPool(
            _CacheOptions(**options | {"patience": FIRST_PATIENCE}), uses=MAX_USES
        )
        self._down: tuple[float, NetworkError] | None = None

    @classmethod
    def parse(cls, text: str, connection: ClientOptions) -> UpstreamRegistry:
        """Parse ``HOST[/PREFIX]``. Raises UsageError."""
        try:
            reference = Reference.parse(f"{text.rstrip('/')}/x:latest")
        except UsageError:
            reference = None
        if reference is None or reference.registry is None:
            raise UsageError(
                f"invalid registry {text!r}",
                hint="expected a host, such as registry.example.com or localhost:5005/mirror",
            )
        return cls(reference.registry, reference.repository.rpartition("/")[0], connection)

    @property
    def name(self) -> str:
        """The prefix of its repositories in the names of the layout."""
        return f"{self.host}/{self._prefix}".rstrip("/")

    # The methods below raise NotFoundError, UnauthorizedError, NetworkError, RegistryError and
    # ContentError.

    def fetch_manifest(self, reference: Reference) -> tuple[Descriptor, bytes]:
        """Return a manifest by its name in the API, verified."""
        name = self._prefix + reference.repository
        upstream_reference = Reference(self.host, name, reference.tag, reference.digest)
        with self._connect(reference.repository) as repository:
            descriptor = self._guard(lambda: repository.resolve(upstream_reference))
            return descriptor, read_all(repository.open(descriptor), descriptor)

    @contextlib.contextmanager
    def open_source(self, repository: str) -> Iterator[Source]:
        """Yield a repository as a source of blobs."""
        with self._connect(repository) as shared:
            yield _GuardedSource(shared, self._guard)

    def call(self, repository: str, call: Callable[[Repository], _T]) -> _T:
        """Return the result of ``call`` with a repository."""
        with self._connect(repository) as shared:
            return self._guard(lambda: call(shared))

    def close(self) -> None:
        """Close all connections; running requests fail."""
        self._pool.close()

    def _guard(self, call: Callable[[], _T]) -> _T:
        """Return ``call()``. Raises NetworkError at once shortly after the registry was down."""
        down = self._down
        if down is not None and time.monotonic() < down[0]:
            raise NetworkError(down[1].message)
        try:
            answer = call()
        except NetworkError as error:
            self._down = (time.monotonic() + DOWN_PAUSE, error)
            raise
        self._down = None
        return answer

    def _connect(self, name: str) -> AbstractContextManager[Repository]:
        return self._pool.connect(Reference(self.host, self._prefix + name, "latest"))


class _GuardedSource(WrappedSource):
    """A source whose ``open`` runs through ``guard``."""

    def __init__(self, source: Source, guard: Callable[[Callable[[], Reader]], Reader]) -> None:
        super().__init__(source)
        self._guard = guard

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        return self._guard(lambda: self._source.open(content, offset, length))
