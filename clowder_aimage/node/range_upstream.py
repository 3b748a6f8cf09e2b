"""The registries, as this node asks them for its peers: with its own credentials."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import BinaryIO

from clowder_aimage.content.copy_option import Rate
from clowder_aimage.distribution.upstream import ClientPool
from clowder_aimage.errors import AImageError
from clowder_aimage.node.rendezvous import BlobRange
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry import ClientOptions

MAX_USES = 4096  # of one connection, which then begins anew: credentials may have changed
_MAX_SIZES = 32768  # blobs whose sizes are remembered
_PAUSE = 600.0  # seconds for which a registry that ignores ranges is not asked for any

OnBytes = Callable[[str, int], object]


class RangeUpstream:
    """The registries of ``options``. Threads may share it.

    ``on_bytes`` is called with the bytes that came from a "registry", or from a "mirror" of it.
    """

    def __init__(
        self,
        options: ClientOptions,
        on_bytes: OnBytes,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._on_bytes, self._clock = options, on_bytes, clock
        self._lock = threading.Lock()
        self._pool = ClientPool(options, uses=MAX_USES)
        self._sizes: OrderedDict[Digest, int] = OrderedDict()
        self._rates: dict[str, Rate] = {}
        self._whole_only: dict[str, float] = {}  # registries that ignore ranges, until when

    def close(self) -> None:
        """Close all connections; requests under way fail."""
        self._pool.close()

    def note_size(self, content: Descriptor) -> None:
        """Remember the size of a blob, as a manifest states it."""
        with self._lock:
            self._sizes[content.digest] = content.size
            self._sizes.move_to_end(content.digest)
            while len(self._sizes) > _MAX_SIZES:
                self._sizes.popitem(last=False)

    def known_size(self, digest: Digest) -> int | None:
        """Return the size of a blob if it is known without a request."""
        return self._sizes.get(digest)

    def size(self, reference: Reference, digest: Digest) -> int:
        """Return the size of a blob in the repository of ``reference``.

        Raises:
            NotFoundError: there is no such blob.
            UnauthorizedError, NetworkError, RegistryError: the registry does not tell.
        """
        known = self.known_size(digest)
        if known is None:
            with self._pool.lend(reference) as repository:
                known = repository.size(digest)
            self.note_size(Descriptor("", digest, known))
        return known

    def has_ranges(self, registry: str) -> bool:
        """Return False if a registry was seen to ignore ranges."""
        return self._whole_only.get(registry, 0.0) <= self._clock()

    def ignores_ranges(self, registry: str) -> None:
        """Note that a registry sends all of a blob for each range."""
        self._whole_only[registry] = self._clock() + _PAUSE

    @contextlib.contextmanager
    def open(self, reference: Reference, part: BlobRange) -> Iterator[BinaryIO]:
        """Open a range of a blob in the repository of ``reference``.

        Raises:
            NotFoundError, UnauthorizedError, NetworkError, RegistryError: it cannot be fetched.
        """
        with self._pool.lend(reference) as repository:
            content = part.content
            with repository.open(content, part.start, part.length) as reader:
                if not repository.supports_ranges(content) and not part.is_whole:
                    self.ignores_ranges(reference.registry or "")
                yield reader
            is_mirrored = repository.was_mirrored(content)
            self._on_bytes("mirror" if is_mirrored else "registry", part.length)

    def distrust(self, reference: Reference, content: Descriptor) -> None:
        """Note that what came for a blob is wrong: the next time, another place may be asked."""
        with contextlib.suppress(AImageError), self._pool.lend(reference) as repository:
            repository.distrust(content)

    def rate(self, registry: str) -> Rate | None:
        """Return the limit of bytes a second that is configured for a registry."""
        limit = self._options.limit(registry)
        with self._lock:
            return self._rates.setdefault(registry, Rate(limit)) if limit else None
