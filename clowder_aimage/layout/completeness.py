"""What a store lacks of an AImage that is here in part, for people to read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from clowder_aimage.content.store import ContentStore
from clowder_aimage.dialect.selection import listed
from clowder_aimage.errors import AImageError, UsageError
from clowder_aimage.layout.stored_aimage import StoredAImage, read_manifest
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype


@dataclass(frozen=True, slots=True)
class MissingContent:
    """The ``blobs`` that are missing, each once, and what of the AImage is in them, in ``words``.
    False where nothing is missing."""

    blobs: tuple[Descriptor, ...]
    words: str

    def __bool__(self) -> bool:
        return bool(self.blobs)

    @property
    def size(self) -> int:
        """The bytes of the blobs."""
        return sum(blob.size for blob in self.blobs)


def absence(store: ContentStore, stored: StoredAImage) -> MissingContent:
    """What ``store`` lacks of the blobs that the manifest names. Raises AccessError."""
    children = {blob.digest: blob for blob in stored.manifest.children}
    blobs = tuple(blob for blob in children.values() if not store.exists(blob))
    missing = {blob.digest for blob in blobs}
    return MissingContent(blobs, listed(_words(stored, missing)) if blobs else "")


def _words(stored: StoredAImage, missing: set[Digest]) -> Iterator[str]:
    """The parts in the order of the manifest: a component with a count, a file at the top alone."""
    if stored.manifest.config.digest in missing:
        yield "its config"
    counts: dict[str, tuple[int, int]] = {}
    for blob, layer in zip(stored.manifest.layers, stored.aimage.layers, strict=True):
        is_missing = blob.digest in missing
        if not layer.component and is_missing:
            yield layer.name
        lacking, total = counts.get(layer.component, (0, 0))
        counts[layer.component] = (lacking + is_missing, total + 1)
    for component, (lacking, total) in counts.items():
        if component and lacking:
            count = f"{lacking} of {total}" if lacking < total else str(total)
            yield f"{component} ({count} layer{'' if total == 1 else 's'})"


def is_partial(store: ContentStore, descriptor: Descriptor) -> bool:
    """Whether an entry of the index is marked as one of which only a part is here, and something
    is missing indeed: other names may have brought it."""
    if descriptor.annotations.get(mediatype.PARTIAL) != "true":
        return False
    try:
        children = read_manifest(store, descriptor).children
    except AImageError:
        return True
    return any(not store.exists(blob) for blob in children)


def remedy(
    store: ContentStore, reference: Reference, root: Descriptor, *, elsewhere: bool = False
) -> str:
    """The command that completes it: by this name, or by another one that has a registry; with
    ``elsewhere`` the other one is better."""
    names = []
    for name, descriptor in store.tags():
        with contextlib.suppress(UsageError):  # another tool's name
            names += [Reference.parse(name)] if descriptor.digest == root.digest else []
    for known in sorted([reference, *names], key=lambda one: (one == reference) == elsewhere):
        if known.registry is not None:
            return f"to complete it: aimage pull {known}"
    return "pull or create it again"
