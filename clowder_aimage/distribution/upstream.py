"""The registry behind a cache. Everything here blocks, and is called in threads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import BinaryIO, TypeVar

from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.distribution.client_pool import ClientPool
from clowder_aimage.distribution.repository_name import PEER
from clowder_aimage.errors import NetworkError, UsageError
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry import ClientOptions, Repository

REST = 10.0  # seconds in which a registry that did not answer is not asked again
USES = 256  # of one, after which it begins anew: it remembers every manifest it has fetched
_T = TypeVar("_T")


class _OfCache(ClientOptions):
    """A connection that tells mirrors who asks.

    Caches that are mirrors of each other would else ask each other in a circle: what a peer asks
    for is answered from what is stored.
    """

    def to_mirror(self, host: str) -> ClientOptions:
        found = super().to_mirror(host)
        return replace(found, user_agent=f"{found.user_agent} {PEER}")


class UpstreamRegistry:
    """The registry ``host``, below ``prefix`` where there is one."""

    def __init__(self, host: str, prefix: str, connection: ClientOptions) -> None:
        self.host = host
        self._prefix = f"{prefix}/" if prefix else ""
        known = {each.name: getattr(connection, each.name) for each in fields(connection)}
        self._connection = _OfCache(**known)
        self._lending = ClientPool(self._connection, uses=USES)
        self._down: tuple[float, NetworkError] | None = None

    @classmethod
    def parse(cls, text: str, connection: ClientOptions) -> UpstreamRegistry:
        """``HOST[/PREFIX]``.

        Raises:
            UsageError: it is no such thing.
        """
        try:
            reference = Reference.parse(f"{text.rstrip('/')}/x:latest")
        except UsageError:
            reference = None
        if reference is None or reference.registry is None:
            raise UsageError(
                f"{text!r} is not a registry",
                hint="name its host, such as registry.example.com or localhost:5000/mirror",
            )
        return cls(reference.registry, reference.repository.rpartition("/")[0], connection)

    @property
    def name(self) -> str:
        """What stands before the repositories in the names of the layout."""
        return f"{self.host}/{self._prefix}".rstrip("/")

    def reference(self, repository: str, tag: str | None, digest: Digest | None) -> Reference:
        """What the upstream calls a manifest."""
        return Reference(self.host, self._prefix + repository, tag, digest)

    # All of these raise NotFoundError, UnauthorizedError, NetworkError or RegistryError, and
    # VerificationError or FormatError where what came is not what it should be.

    def manifest(self, reference: Reference) -> tuple[Descriptor, bytes]:
        """A manifest by its name in the API, verified."""
        named = self.reference(reference.repository, reference.tag, reference.digest)
        with self._lend(reference.repository) as repository:
            descriptor = self._asked(lambda: repository.resolve(named))
            return descriptor, read_all(repository.open(descriptor), descriptor)

    @contextlib.contextmanager
    def blob(self, repository: str, content: Descriptor) -> Iterator[BlobSource]:
        """A blob to be read, from any offset; its bytes are not verified."""
        with self._lend(repository) as lent:
            yield BlobSource(lent, content, self._asked)

    def size(self, repository: str, digest: Digest) -> int:
        """How many bytes a blob has there (HEAD)."""
        with self._lend(repository) as lent:
            return self._asked(lambda: lent.size(digest))

    def tags(self, repository: str) -> list[str]:
        """The tags of a repository."""
        with self._lend(repository) as lent:
            return self._asked(lent.tag_names)

    def referrers(self, repository: str, subject: Digest) -> list[Descriptor]:
        """What refers to a manifest."""
        with self._lend(repository) as lent:
            return self._asked(lambda: lent.referrers(subject))

    def close(self) -> None:
        """Close all connections; requests under way fail."""
        self._lending.close()

    def _asked(self, call: Callable[[], _T]) -> _T:
        """``call()``, unless the registry has just not answered another one."""
        down = self._down
        if down is not None and time.monotonic() < down[0]:
            raise NetworkError(down[1].message)
        try:
            answer = call()
        except NetworkError as error:
            self._down = (time.monotonic() + REST, error)
            raise
        self._down = None
        return answer

    def _lend(self, name: str) -> AbstractContextManager[Repository]:
        return self._lending.lend(self.reference(name, "latest", None))


@dataclass(frozen=True, slots=True)
class BlobSource:
    """One blob of the upstream."""

    _repository: Repository
    _content: Descriptor
    _asked: Callable[[Callable[[], BinaryIO]], BinaryIO]

    def open(self, start: int, end: int) -> BinaryIO:
        """Bytes [start, end) of it."""
        return self._asked(lambda: self._repository.open(self._content, start, end - start))

    def distrust(self) -> None:
        """What came was wrong: the next time, another place may be asked."""
        self._repository.distrust(self._content)
