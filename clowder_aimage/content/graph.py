"""The graph of manifests: an index lists manifests, a manifest its config and layers.

Every traversal of documents is ``walk``, and every depth is bounded by ``MAX_DEPTH``. The scan of
documents for digests is another mechanism (docs/adr/0010).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from clowder_aimage.content.store import Source
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.errors import AccessError, ContentError, FormatError
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, mediatype, parse_document

# Levels of indexes below the root
MAX_DEPTH = 4
# The media type of a blob without a descriptor
UNKNOWN = "application/octet-stream"

ReadDocument = Callable[[Descriptor], Manifest | Index | None]


@dataclass(frozen=True, slots=True)
class GraphNode:
    """Content that the graph reaches, and the node that lists it (None for the root).

    ``document`` is None for a blob, for a document that was not read, and for one that the walk
    has already visited.
    """

    content: Descriptor
    document: Manifest | Index | None
    parent: GraphNode | None

    @property
    def is_document(self) -> bool:
        return is_document(self.content)


def is_document(content: Descriptor) -> bool:
    """Return True if the descriptor is of a manifest or an index."""
    return content.media_type in mediatype.DOCUMENTS


def read_document(source: Source, content: Descriptor) -> Manifest | Index:
    """Read and parse a manifest or an index, verified.

    Raises NotFoundError, AccessError, or, for wrong or malformed bytes, VerificationError and
    FormatError.
    """
    return parse_content(read_all(source.open(content), content), content)


def parse_content(raw: bytes, content: Descriptor) -> Manifest | Index:
    """Parse the bytes of a manifest or an index. Raises FormatError with its digest."""
    try:
        return parse_document(raw, content.media_type)
    except FormatError as error:
        raise FormatError(f"{content.digest}: {error.message}", **error.advice) from None


def list_successors(document: Manifest | Index) -> tuple[Descriptor, ...]:
    """Return the descriptors that a document refers to, in its order.

    A config or a layer is a blob of any media type; the ``subject`` is not included.
    """
    if isinstance(document, Index):
        return document.manifests
    return tuple(
        replace(child, media_type=UNKNOWN) if is_document(child) else child
        for child in document.children
    )


def build_referrer_entry(content: Descriptor, document: Manifest | Index) -> Descriptor:
    """Return the descriptor of a referrer in a list, with its type and annotations."""
    kind = document.artifact_type
    if not kind and isinstance(document, Manifest):
        # Without an artifactType it is the config's media type (image-spec, manifest.md).
        kind = document.config.media_type
    extra = {"artifactType": kind} if kind else {}
    return replace(content, annotations=document.annotations, extra=extra)


def list_documents(source: Source, root: Descriptor) -> tuple[frozenset[Digest], bool]:
    """Return all manifests and indexes below an index, and False if one could not be read.

    What is missing or damaged, or nested too deep, has nothing below it, and hides no others.
    """
    found, visited, is_complete = set[Digest](), set[tuple[Digest, int]](), True
    level = [root]
    for _ in range(MAX_DEPTH + 1):
        below = list[Descriptor]()
        for index in level:
            if (index.digest, index.size) in visited:
                continue
            visited.add((index.digest, index.size))
            try:
                below += filter(is_document, list_successors(read_document(source, index)))
            except (AccessError, ContentError):
                is_complete = False
        found.update(content.digest for content in below)
        level = [content for content in below if content.media_type in mediatype.INDEXES]
    return frozenset(found), is_complete


def walk(
    read: ReadDocument, root: Descriptor, *, children_first: bool = False
) -> Iterator[GraphNode]:
    """Yield ``root`` and all content below it, in the order of the documents.

    ``read`` returns a document, or None to skip its children; it is called once for each digest and
    size. A blob is yielded each time it is listed. Parents come before their children, or after
    them with ``children_first``. Raises the errors of ``read``, and FormatError if indexes are
    nested more than ``MAX_DEPTH`` levels deep.
    """
    return _walk(read, root, None, children_first, set(), 0)


def _walk(
    read: ReadDocument,
    content: Descriptor,
    parent: GraphNode | None,
    children_first: bool,
    visited: set[tuple[Digest, int]],
    depth: int,
) -> Iterator[GraphNode]:
    document, key = None, (content.digest, content.size)
    if (parent is None or is_document(content)) and key not in visited:
        if depth > MAX_DEPTH and content.media_type in mediatype.INDEXES:
            raise FormatError(f"{content.digest}: indexes are nested over {MAX_DEPTH} levels deep")
        visited.add(key)
        document = read(content)
    node = GraphNode(content, document, parent)
    if not children_first:
        yield node
    for child in list_successors(document) if document else ():
        # Most children are blobs.
        if is_document(child):
            yield from _walk(read, child, node, children_first, visited, depth + 1)
        else:
            yield GraphNode(child, None, node)
    if children_first:
        yield node
