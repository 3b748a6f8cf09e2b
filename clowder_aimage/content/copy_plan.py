"""What a copy will move, decided from the manifests alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from clowder_aimage.content.graph import read_document, walk
from clowder_aimage.content.store import ContentStore, Source
from clowder_aimage.errors import NoSpaceError
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, Reference

RESERVE = 16 * 1024 * 1024  # bytes that a copy leaves free


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The manifests, children before parents and the root last; and every blob once. What is
    needed too, but is not to be moved, is ``left_out``."""

    documents: tuple[tuple[Descriptor, Manifest | Index], ...]
    blobs: tuple[Descriptor, ...]
    left_out: tuple[Descriptor, ...] = ()

    @property
    def root(self) -> Descriptor:
        return self.documents[-1][0]

    @property
    def size(self) -> int:
        """The bytes of all blobs."""
        return sum(blob.size for blob in self.blobs)

    @property
    def digests(self) -> set[Digest]:
        """Of all that it is made of."""
        blobs = (*self.blobs, *self.left_out)
        return {content.digest for content, _ in self.documents} | {b.digest for b in blobs}

    def missing(self, target: ContentStore) -> list[Descriptor]:
        """The blobs that ``target`` lacks, in whole or in part."""
        return [blob for blob in self.blobs if not target.exists(blob)]

    def missing_left_out(self, target: Source) -> list[Descriptor]:
        """Return what was left out of the copy and is missing in ``target``."""
        return [blob for blob in self.left_out if not target.exists(blob)]

    def part(self, wanted: Collection[Digest]) -> CopyPlan:
        """Of the blobs the ``wanted`` alone; the others are left out."""
        chosen = tuple(blob for blob in self.blobs if blob.digest in wanted)
        others = tuple(blob for blob in self.blobs if blob.digest not in wanted)
        return replace(self, blobs=chosen, left_out=self.left_out + others)

    def beginning(self, first: Collection[Digest]) -> CopyPlan:
        """The same in another order: these blobs before the others."""
        blobs = sorted(self.blobs, key=lambda blob: blob.digest not in first)
        return replace(self, blobs=tuple(blobs))


def plan_copy(source: Source, reference: Reference) -> CopyPlan:
    """Read the manifests that ``reference`` names. Raises as ``copy`` does."""
    documents: list[tuple[Descriptor, Manifest | Index]] = []
    # Two sizes for one digest are two blobs here: one of them will be refused.
    blobs: dict[tuple[Digest, int], Descriptor] = {}
    read = partial(read_document, source)
    for node in walk(read, source.resolve(reference), children_first=True):
        if node.document is not None:
            documents.append((node.content, node.document))
        elif not node.is_document:
            blobs[node.content.digest, node.content.size] = node.content
    # The largest first, so that the last blob to arrive is not one that all others wait for.
    order = sorted(blobs.values(), key=lambda blob: (-blob.size, blob.digest))
    return CopyPlan(tuple(documents), tuple(order))


def check_space(missing: Sequence[Descriptor], target: ContentStore) -> None:
    """Raise NoSpaceError before the first byte where blobs that ``target`` lacks cannot fit."""
    needed = sum(target.missing_size(blob) for blob in missing)
    free = target.free()
    if needed and needed + RESERVE > free:
        raise NoSpaceError(
            f"{needed} bytes are to be fetched, and {max(0, free - RESERVE)} would fit: "
            f"{needed + RESERVE - free} are missing",
            missing_size=needed + RESERVE - free,
            hint="free some space, or point --store at another disk",
        )
