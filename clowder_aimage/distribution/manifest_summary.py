"""Summaries of manifests, kept by digest: the bytes of a digest never change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, parse_document

MAX_SUMMARIES = 20_000  # manifests remembered
MAX_KEPT_SIZE = 64 * 1024  # bytes of a manifest with references whose summary is kept


@dataclass(frozen=True, slots=True)
class ManifestSummary:
    """``listed``: the entry in a list of referrers; ``manifests``: the entries of an index."""

    listed: Descriptor
    subject: Digest | None
    manifests: tuple[Descriptor, ...]


class ManifestSummaries:
    """The summaries of manifests that ``read`` reads. Threads may share it."""

    def __init__(self, read: Callable[[Descriptor], bytes]) -> None:
        self._read = read
        self._known: OrderedDict[Digest, ManifestSummary] = OrderedDict()

    def of(self, descriptor: Descriptor) -> ManifestSummary:
        """Return the summary of a manifest.

        Raises:
            NotFoundError: It is not in the layout.
            VerificationError, FormatError: It is damaged.
        """
        known = self._known.get(descriptor.digest)
        if known is not None:
            return known
        raw = self._read(descriptor)
        summary = _summary(parse_document(raw, descriptor.media_type), descriptor.digest)
        if len(raw) <= MAX_KEPT_SIZE or (summary.subject is None and not summary.manifests):
            self._known[descriptor.digest] = summary
            if len(self._known) > MAX_SUMMARIES:
                self._known.popitem(last=False)
        return summary


def _summary(document: Manifest | Index, digest: Digest) -> ManifestSummary:
    """Return the summary; annotations and type only if the manifest has a subject."""
    manifests = document.manifests if isinstance(document, Index) else ()
    size = len(document.raw)
    if document.subject is None:
        return ManifestSummary(Descriptor(document.media_type, digest, size), None, manifests)
    kind = document.artifact_type
    if not kind and isinstance(document, Manifest):
        kind = document.config.media_type  # image-spec, manifest.md: where there is no artifactType
    extra = {"artifactType": kind} if kind else {}
    listed = Descriptor(document.media_type, digest, size, document.annotations, extra)
    return ManifestSummary(listed, document.subject.digest, manifests)
