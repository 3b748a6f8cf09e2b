"""The digests of the configs and layers of manifests, in memory."""

from __future__ import annotations

from collections.abc import Callable

from clowder_aimage.content.graph import parse_content
from clowder_aimage.errors import AImageError
from clowder_aimage.oci import Descriptor, Digest, mediatype

# Digests in the cache, about 200 bytes each where manifests share none
MAX_CACHED = 500_000


class ManifestChildren:
    """A cache by the digest of the manifest. Thread-safe: its values never change.

    Args:
        read: Returns the bytes of a manifest, verified.
    """

    def __init__(self, read: Callable[[Descriptor], bytes]) -> None:
        self._read = read
        self._children: dict[Digest, frozenset[Digest]] = {}
        # Manifests share blobs, and thus digests
        self._interned: dict[Digest, Digest] = {}
        self._count = 0

    def get(self, content: Descriptor) -> frozenset[Digest]:
        """Return the digests; none of other content, nor while a manifest cannot be read."""
        if content.media_type not in mediatype.MANIFESTS:
            return frozenset()
        children = self._children.get(content.digest)
        return self._load(content) if children is None else children

    def _load(self, manifest: Descriptor) -> frozenset[Digest]:
        try:
            document = parse_content(self._read(manifest), manifest)
        except AImageError:
            return frozenset()
        digests = (child.digest for child in document.children)
        children = frozenset(self._interned.setdefault(digest, digest) for digest in digests)
        if self._count > MAX_CACHED:
            self._children, self._interned, self._count = {}, {}, 0
        self._children[manifest.digest] = children
        self._count += len(children) + 1
        return children
