"""The one way to move an artifact from a store to another."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import BinaryIO, cast

from clowder_aimage.content.event import Event, OnEvent, ignore
from clowder_aimage.content.fetch import Fetch
from clowder_aimage.content.parallel import StoppedError, in_parallel
from clowder_aimage.content.rate import Rate
from clowder_aimage.content.store import ContentStore, Source, Target, bytes_body
from clowder_aimage.content.verify import read_all, readinto
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import (
    Descriptor,
    Digest,
    Index,
    Manifest,
    Reference,
    mediatype,
    parse_document,
)

DEFAULT_CONCURRENCY = 8
_MAX_DEPTH = 4  # an index of indexes of ... ends somewhere
_DOCUMENTS = mediatype.MANIFESTS | mediatype.INDEXES


def copy(
    source: Source,
    reference: Reference,
    target: Target,
    target_reference: Reference | None = None,
    *,
    concurrency: int = DEFAULT_CONCURRENCY,
    on_event: OnEvent = ignore,
    rate: Rate | None = None,
) -> Descriptor:
    """Copy what ``reference`` names, children before parents, and name it in ``target``.

    Blobs that the target has are skipped, the others move ``concurrency`` at a time. The first
    failure stops the rest. The root is pushed and named last, so a target never names what it
    does not have in full.

    Returns:
        the descriptor of the root manifest or index.

    Raises:
        ContentError: what the source gave is not what it promised.
        AccessError: it could not be read, or could not be kept.
    """
    root = source.resolve(reference)
    documents: dict[Digest, tuple[Descriptor, Manifest | Index]] = {}
    _read_documents(source, root, documents)
    blobs = _blobs(document for _, document in documents.values())
    on_event(Event("plan", root, sum(blob.size for blob in blobs), len(blobs)))
    if isinstance(target, ContentStore):
        Fetch(source, target, blobs, connections=concurrency, on_event=on_event, rate=rate).run()
    else:
        _push_blobs(source, target, blobs, concurrency, on_event)
    _, last = documents.pop(root.digest)
    for descriptor, document in documents.values():
        if not target.exists(descriptor):
            target.push(descriptor, bytes_body(document.raw))
    target.push(root, bytes_body(last.raw), target_reference or reference)
    return root


def _read_documents(
    source: Source,
    descriptor: Descriptor,
    found: dict[Digest, tuple[Descriptor, Manifest | Index]],
    depth: int = 0,
) -> None:
    """Read a document and all below it into ``found``, each once, children before parents."""
    if descriptor.digest in found:
        return
    if depth > _MAX_DEPTH:
        raise FormatError(f"{descriptor.digest}: indexes are nested more than {_MAX_DEPTH} deep")
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


def _push_blobs(
    source: Source,
    target: Target,
    blobs: list[Descriptor],
    concurrency: int,
    on_event: OnEvent,
) -> None:
    """Blobs to a target that takes each as one stream, several side by side."""
    stopped = threading.Event()

    def one(blob: Descriptor) -> None:
        if stopped.is_set():
            raise StoppedError
        if target.exists(blob):
            on_event(Event("skip", blob, blob.size))
            return
        on_event(Event("start", blob, blob.size))
        target.push(blob, _Watch(source, blob, stopped, on_event))
        on_event(Event("done", blob, blob.size))

    in_parallel([partial(one, blob) for blob in blobs], concurrency, stopped.set)


class _Watch:
    """A blob's body, counted as it passes and cut short when the copy stops."""

    def __init__(
        self, source: Source, blob: Descriptor, stopped: threading.Event, on_event: OnEvent
    ) -> None:
        self._source = source
        self._blob = blob
        self._stopped = stopped
        self._on_event = on_event
        self._passed = 0

    def __call__(self, offset: int = 0, /) -> BinaryIO:
        self._count(offset - self._passed)  # a retry begins again: progress must say so
        return cast(BinaryIO, _WatchedReader(self._source.open(self._blob, offset), self))

    def _count(self, count: int) -> None:
        if count:
            self._passed += count
            self._on_event(Event("progress", self._blob, count))

    def passed(self, count: int) -> None:
        if self._stopped.is_set():
            raise StoppedError
        self._count(count)


class _WatchedReader(io.RawIOBase):
    def __init__(self, source: BinaryIO, watch: _Watch) -> None:
        self._source = source
        self._watch = watch

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = readinto(self._source, buffer)
        self._watch.passed(count)
        return count

    def close(self) -> None:
        self._source.close()
        super().close()
