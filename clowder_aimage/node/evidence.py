"""Who gave which range of a blob, kept until the whole of it is known to be right or wrong.

That a blob is wrong is seen only when all of it has come, and not who is to blame. So it is then
fetched from the registry alone; whoever gave another range than the right one is found so.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from clowder_aimage.node.peer_state import Peer
from clowder_aimage.node.rendezvous import BlobRange
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.registry.peer_response import BYTES

_BLOBS = 64
_Given = tuple[Peer | None, bytes]


class Evidence:
    """Threads may share it. ``ban(neighbour, reason)`` is called for who gave something wrong."""

    def __init__(self, ban: Callable[[Peer, str], object]) -> None:
        self._ban = ban
        self._lock = threading.Lock()
        self._given: OrderedDict[Digest, dict[BlobRange, tuple[Peer | None, bytes]]] = OrderedDict()
        self._doubted: OrderedDict[Digest, None] = OrderedDict()
        self._suspects: dict[Digest, dict[Peer, BlobRange]] = {}

    def note(self, part: BlobRange, giver: Peer | None, digest: bytes) -> None:
        """A range came by the word of a neighbour, or (None) from what was kept here. One that is
        all of its blob is verified by then."""
        if part.is_whole:
            return
        with self._lock:
            self._given.setdefault(part.digest, {})[part] = giver, digest
            self._given.move_to_end(part.digest)
            while len(self._given) > _BLOBS:
                self._given.popitem(last=False)

    def doubt(self, digest: Digest) -> bool:
        """The blob was wrong: from now on the registry alone is asked for it. Whether it was in
        part from elsewhere, and may be right the next time."""
        with self._lock:
            self._suspects.pop(digest, None)  # the registry's was not right either
            is_news = digest in self._given and digest not in self._doubted
            if is_news:
                self._doubted[digest] = None
                while len(self._doubted) > _BLOBS:
                    self._doubted.popitem(last=False)
            return is_news

    def is_doubted(self, digest: Digest) -> bool:
        """Whether the registry alone is asked for the blob."""
        with self._lock:
            return digest in self._doubted

    def compare(self, part: BlobRange, digest: bytes) -> None:
        """What has come from the registry: whoever gave another range is to blame if the blob turns
        out right now. Not before: it may be a mirror that is wrong."""
        with self._lock:
            giver, given = self._given.get(part.digest, {}).pop(part, (None, digest))
            if giver is not None and given != digest:
                self._suspects.setdefault(part.digest, {})[giver] = part

    def settle(self, is_here: Callable[[Descriptor], bool]) -> None:
        """Ban who gave something else for what is verified by now."""
        with self._lock:
            suspects = list(self._suspects.items())
        for digest, found in suspects:
            if is_here(next(iter(found.values())).content):
                with self._lock:
                    self._suspects.pop(digest, None)
                for giver in found:
                    self._ban(giver, BYTES)
