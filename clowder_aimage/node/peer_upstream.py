"""The registries, as this node asks them on its neighbours' behalf: with its own credentials."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from clowder_aimage.content.rate import Rate
from clowder_aimage.content.verified_reader import readinto
from clowder_aimage.distribution.client_pool import ClientPool
from clowder_aimage.errors import NotFoundError
from clowder_aimage.node.rendezvous import BlobRange
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import ClientOptions

USES = 4096  # of one, after which it begins anew: credentials may have changed
_SIZES = 4096  # blobs whose size is known to be true
_REST = 600.0  # seconds for which a registry that ignores ranges is not asked for any

OnBytes = Callable[[str, int], object]


class PeerUpstream:
    """Threads may share it. ``on_bytes`` hears how many bytes came from a "registry", and how many
    from a "mirror" of it."""

    def __init__(
        self,
        connection: ClientOptions,
        on_bytes: OnBytes,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection, self._on_bytes, self._clock = connection, on_bytes, clock
        self._lock = threading.Lock()
        self._lending = ClientPool(connection, uses=USES)
        self._sizes: OrderedDict[Descriptor, None] = OrderedDict()
        self._rates: dict[str, Rate] = {}
        self._whole_only: dict[str, float] = {}  # registries that ignore ranges, until when

    def close(self) -> None:
        """Close all connections; requests under way fail."""
        self._lending.close()

    def knows(self, content: Descriptor) -> None:
        """That a manifest says of a blob how large it is."""
        with self._lock:
            self._sizes[_plain(content)] = None
            while len(self._sizes) > _SIZES:
                self._sizes.popitem(last=False)

    def gives_ranges(self, registry: str) -> bool:
        """Whether it has not been seen to ignore what part of a blob is wanted."""
        return self._whole_only.get(registry, 0.0) <= self._clock()

    def ignores_ranges(self, registry: str) -> None:
        """That it gives all of a blob to who asks for a part: each would cost the whole."""
        self._whole_only[registry] = self._clock() + _REST

    @contextlib.contextmanager
    def open(self, reference: Reference, part: BlobRange) -> Iterator[BinaryIO]:
        """A range of a blob in the repository of ``reference``.

        Raises:
            NotFoundError: there is no such blob, or none of that size.
            UnauthorizedError, NetworkError, RegistryError: it cannot be had.
        """
        rate = self._rate(reference.registry or "")
        with self._lending.lend(reference) as repository:
            content = part.content
            if not part.is_whole and _plain(content) not in self._sizes:
                # a size that nobody checked could have us read past the end, time and again
                if not repository.exists(content):
                    raise NotFoundError(f"there is no {part.digest} of {part.size} bytes")
                self.knows(content)
            with repository.open(content, part.start, part.length) as reader:
                if not repository.supports_ranges(content) and not part.is_whole:
                    self.ignores_ranges(reference.registry or "")
                yield cast(BinaryIO, _Slow(reader, rate)) if rate else reader
            is_mirrored = repository.was_mirrored(content)
            self._on_bytes("mirror" if is_mirrored else "registry", part.length)

    def distrust(self, reference: Reference, part: BlobRange) -> None:
        """What came was wrong: the next time, another place may be asked. Not where it is merely
        not what an asker takes it for.

        Raises:
            UnauthorizedError, NetworkError, RegistryError: the registry cannot be asked.
        """
        with self._lending.lend(reference) as repository:
            if _plain(part.content) in self._sizes or repository.exists(part.content):
                repository.distrust(part.content)

    def _rate(self, registry: str) -> Rate | None:
        """How many bytes a second the registry may be asked for, as the configuration says."""
        limit = self._connection.limit(registry)
        with self._lock:
            return self._rates.setdefault(registry, Rate(limit)) if limit else None


class _Slow(io.RawIOBase):
    """Bytes of a reader, no more of them in a second than a rate lets pass."""

    def __init__(self, source: BinaryIO, rate: Rate) -> None:
        self._source, self._rate = source, rate

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = readinto(self._source, memoryview(buffer)[: self._rate.burst])
        self._rate.passed(count)
        return count


def _plain(content: Descriptor) -> Descriptor:
    return Descriptor("", content.digest, content.size)
