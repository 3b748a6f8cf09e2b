"""What hangs below a manifest or an index, as far as a store has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clowder_aimage.content.graph import MAX_DEPTH
from clowder_aimage.content.store import Source
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.errors import FormatError, VerificationError
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, mediatype, parse_document

DOCUMENTS = mediatype.MANIFESTS | mediatype.INDEXES


@dataclass(slots=True)
class StoredGraph:
    """``documents`` that are there, parents before children; the ``blobs`` that they need, there or
    not; and the manifests that an index lists but the store lacks: variants not fetched."""

    documents: dict[Digest, Descriptor] = field(default_factory=dict)
    blobs: dict[Digest, Descriptor] = field(default_factory=dict)
    absent: dict[Digest, Descriptor] = field(default_factory=dict)

    @property
    def digests(self) -> set[Digest]:
        """Of all that must be there."""
        return self.documents.keys() | self.blobs.keys()

    @property
    def is_hollow(self) -> bool:
        """Whether it is an index of which nothing is there."""
        return bool(self.absent) and all(
            document.media_type in mediatype.INDEXES for document in self.documents.values()
        )


def read_document(store: Source, descriptor: Descriptor) -> Manifest | Index:
    """The manifest or the index, verified.

    Raises:
        NotFoundError: it is not there.
        VerificationError, FormatError: it is another one, or means nothing.
    """
    with store.open(descriptor) as source:
        raw = read_all(source, descriptor)
    try:
        return parse_document(raw, descriptor.media_type)
    except FormatError as error:
        raise FormatError(f"{descriptor.digest}: {error.message}", hint=error.hint) from None


def read_tree(store: Source, root: Descriptor) -> StoredGraph:
    """What ``root`` needs. Only documents are read. Raises as ``read_document`` does."""
    tree = StoredGraph()
    _read(store, root, tree, 0)
    return tree


def _read(store: Source, descriptor: Descriptor, tree: StoredGraph, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise FormatError(f"{descriptor.digest}: indexes are nested more than {MAX_DEPTH} deep")
    if not add(tree.documents, descriptor):
        return
    document = read_document(store, descriptor)
    for child in document.children:
        # A layer is a blob whatever it calls itself.
        if isinstance(document, Manifest) or child.media_type not in DOCUMENTS:
            add(tree.blobs, child)
        elif store.exists(child):
            _read(store, child, tree, depth + 1)
        else:
            add(tree.absent, child)


def add(known: dict[Digest, Descriptor], content: Descriptor) -> bool:
    """Add it, once; whether it is new. Raises VerificationError where its size is another."""
    is_new = content.digest not in known
    before = known.setdefault(content.digest, content)
    if before.size != content.size:
        raise VerificationError(
            f"{content.digest} is said to have {before.size} bytes, and {content.size}"
        )
    return is_new


def blob_name(digest: Digest) -> str:
    """Where a layout keeps a blob."""
    return f"blobs/{digest.algorithm}/{digest.encoded}"


def lacking(store: Source, wanted: Mapping[Digest, Descriptor]) -> list[Descriptor]:
    """What of ``wanted`` is not there in full."""
    return [content for content in wanted.values() if not store.exists(content)]
