"""What a copy will move, decided from the manifests alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from clowder_aimage.content.store import ContentStore, Source
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.errors import FormatError, NoSpaceError
from clowder_aimage.oci import (
    Descriptor,
    Digest,
    Index,
    Manifest,
    Reference,
    mediatype,
    parse_document,
)

RESERVE = 16 * 1024 * 1024  # bytes that a copy leaves free
MAX_DEPTH = 4  # an index of indexes of ... ends somewhere
_DOCUMENTS = mediatype.MANIFESTS | mediatype.INDEXES


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
    root = source.resolve(reference)
    documents: dict[Digest, tuple[Descriptor, Manifest | Index]] = {}
    _read_documents(source, root, documents)
    return CopyPlan(
        tuple(documents.values()), tuple(_blobs(document for _, document in documents.values()))
    )


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


def _read_documents(
    source: Source,
    descriptor: Descriptor,
    found: dict[Digest, tuple[Descriptor, Manifest | Index]],
    depth: int = 0,
) -> None:
    """Read a document and all below it into ``found``, each once, children before parents."""
    if descriptor.digest in found:
        return
    if depth > MAX_DEPTH:
        raise FormatError(f"{descriptor.digest}: indexes are nested more than {MAX_DEPTH} deep")
    raw = read_all(source.open(descriptor), descriptor)
    document = parse_document(raw, descriptor.media_type)
    if isinstance(document, Index):
        for child in document.manifests:
            if child.media_type in _DOCUMENTS:
                _read_documents(source, child, found, depth + 1)
    found[descriptor.digest] = (descriptor, document)


def _blobs(documents: Iterable[Manifest | Index]) -> list[Descriptor]:
    """Every blob once, the largest first: a long one must not be what all others waited for."""
    blobs = {
        (blob.digest, blob.size): blob  # two sizes for one digest: one of them will be refused
        for document in documents
        for blob in _blobs_of(document)
    }
    return sorted(blobs.values(), key=lambda blob: (-blob.size, blob.digest))


def _blobs_of(document: Manifest | Index) -> Iterator[Descriptor]:
    """What is no document of its own. A layer is a blob whatever it calls itself."""
    for child in document.children:
        if child.media_type not in _DOCUMENTS:
            yield child
        elif isinstance(document, Manifest):
            yield replace(child, media_type="application/octet-stream")
