"""The plan of a copy, made from the manifests alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from clowder_aimage.content.graph import read_document, walk
from clowder_aimage.content.store import Source
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The documents and blobs to copy.

    ``documents`` are children before parents, the root last; ``blobs`` are each listed once.
    ``left_out`` are blobs that the documents need, and that are not copied; ``absent`` are
    manifests of an index that the source does not have.
    """

    documents: tuple[tuple[Descriptor, Manifest | Index], ...]
    blobs: tuple[Descriptor, ...]
    left_out: tuple[Descriptor, ...] = ()
    absent: tuple[Descriptor, ...] = ()

    @property
    def root(self) -> Descriptor:
        return self.documents[-1][0]

    @property
    def size(self) -> int:
        """Return the bytes of all blobs."""
        return sum(blob.size for blob in self.blobs)

    @property
    def digests(self) -> set[Digest]:
        """Return the digests of all documents and blobs, those that are left out included."""
        blobs = (*self.blobs, *self.left_out)
        return {content.digest for content, _ in self.documents} | {b.digest for b in blobs}

    def missing(self, target: Source) -> list[Descriptor]:
        """Return the blobs that ``target`` does not have in full."""
        return [blob for blob in self.blobs if not target.exists(blob)]

    def missing_left_out(self, target: Source) -> list[Descriptor]:
        """Return the blobs that are left out and that ``target`` does not have either."""
        return [blob for blob in self.left_out if not target.exists(blob)]

    def part(self, digests: Collection[Digest]) -> CopyPlan:
        """Return a plan for these blobs alone; the others are left out."""
        chosen = tuple(blob for blob in self.blobs if blob.digest in digests)
        others = tuple(blob for blob in self.blobs if blob.digest not in digests)
        return replace(self, blobs=chosen, left_out=self.left_out + others)

    def beginning(self, digests: Collection[Digest]) -> CopyPlan:
        """Return the same plan with these blobs before the others."""
        blobs = sorted(self.blobs, key=lambda blob: blob.digest not in digests)
        return replace(self, blobs=tuple(blobs))


def plan_copy(
    source: Source,
    root: Descriptor,
    document: Manifest | Index | None = None,
    *,
    is_sparse: bool = False,
) -> CopyPlan:
    """Read ``root`` and all documents below it; ``document`` is the root where it is known.

    With ``is_sparse``, the source may lack manifests of an index.

    Raises:
        NotFoundError, AccessError: a document cannot be read.
        VerificationError, FormatError: it differs from its descriptor, or is malformed.
    """
    documents: list[tuple[Descriptor, Manifest | Index]] = []
    absent: dict[Digest, Descriptor] = {}
    # Two sizes for one digest are two blobs here: one of them will be refused.
    blobs: dict[tuple[Digest, int], Descriptor] = {}

    def read(content: Descriptor) -> Manifest | Index | None:
        if is_sparse and content is not root and not source.exists(content):
            absent[content.digest] = content
            return None
        return document if document and content is root else read_document(source, content)

    for node in walk(read, root, children_first=True):
        if node.document is not None:
            documents.append((node.content, node.document))
        elif not node.is_document:
            blobs[node.content.digest, node.content.size] = node.content
    # The largest first, so that the last blob to arrive is not one that all others wait for.
    order = sorted(blobs.values(), key=lambda blob: (-blob.size, blob.digest))
    return CopyPlan(tuple(documents), tuple(order), absent=tuple(absent.values()))
