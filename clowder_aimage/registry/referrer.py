"""Referrers: the manifests with another one as their ``subject``.

A registry with the referrers API keeps the list itself. For one without it, clients keep an index
under the tag ``<algorithm>-<encoded>`` of the subject's digest (distribution-spec, "Listing
Referrers", end-12a and end-12b, and "Referrers Tag Schema").
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlencode

from clowder_aimage.errors import FormatError, NotFoundError, RegistryError
from clowder_aimage.oci import (
    MAX_MANIFEST_SIZE,
    Descriptor,
    Digest,
    Index,
    Manifest,
    mediatype,
    parse_document,
)
from clowder_aimage.oci.manifest import encode
from clowder_aimage.registry.pagination import pages
from clowder_aimage.registry.response_error import failure, manifest_failure
from clowder_aimage.registry.retry import retrying
from clowder_aimage.registry.session import Session

_NO_API = frozenset({405, 501})  # besides 404
_ATTEMPTS = 4  # of putting an entry into an index that others write to at the same time


def tag_of(subject: Digest) -> str:
    """Return the tag of the index with the referrers of ``subject``."""
    return f"{subject.algorithm[:32]}-{subject.encoded[:64]}"


def entry_of(content: Descriptor, document: Manifest | Index) -> Descriptor:
    """Return the descriptor of a referrer in a list, with its type and annotations."""
    kind = document.artifact_type
    if not kind and isinstance(document, Manifest):
        kind = document.config.media_type
    extra = {"artifactType": kind} if kind else {}
    return Descriptor(content.media_type, content.digest, content.size, document.annotations, extra)


def referrers(session: Session, subject: Digest, artifact_type: str = "") -> list[Descriptor]:
    """Return the referrers of ``subject``, of one artifact type where one is given.

    Raises:
        RegistryError, NetworkError, UnauthorizedError: they cannot be read.
        FormatError: the response is not a list of referrers.
    """
    listed = _listed(session, subject, artifact_type)
    if listed is None:
        raw = _tagged(session, subject)
        listed = [] if raw is None else _entries(raw)
    unique = {entry.digest: entry for entry in listed}
    return [
        entry
        for entry in unique.values()  # a registry may leave the filtering to us
        if not artifact_type or entry.extra.get("artifactType") == artifact_type
    ]


def _listed(session: Session, subject: Digest, artifact_type: str) -> list[Descriptor] | None:
    """Return the list of the referrers API, or None if the registry does not have it."""
    query = f"?{urlencode({'artifactType': artifact_type})}" if artifact_type else ""
    found: list[Descriptor] | None = None
    what = f"referrers of {subject}"
    try:
        for raw, kind in pages(session, f"referrers/{subject}{query}", what, mediatype.OCI_INDEX):
            found = (found or []) + _entries(raw, kind)
    except NotFoundError:
        if found is not None:
            raise  # it has the API, and lost a page
    except RegistryError as error:
        if found is not None or error.status not in _NO_API:
            raise
    return found


def _entries(raw: bytes, media_type: str = "") -> list[Descriptor]:
    document = parse_document(raw, media_type)
    if not isinstance(document, Index):
        raise FormatError(f"a list of referrers must be an index, not {document.media_type}")
    return list(document.manifests)


def record(
    session: Session, subject: Digest, content: Descriptor, document: Manifest | Index
) -> None:
    """Add ``content`` to the index under the subject's tag.

    Of two clients that write at once one may overwrite the other, so it is read and written again.

    Raises:
        FormatError: the tag names something else.
        RegistryError, NetworkError, UnauthorizedError: it cannot be stored.
    """
    entry = entry_of(content, document)
    for _ in range(_ATTEMPTS):
        raw = _tagged(session, subject)
        if raw is not None and _has(_entries(raw), entry):
            return
        _put(session, subject, with_entry(raw, entry))
    raw = _tagged(session, subject)
    if raw is None or not _has(_entries(raw), entry):
        raise RegistryError(
            f"the list of referrers {tag_of(subject)} does not keep what is put there",
            hint="others may be writing to it at the same time: try again",
        )


def _has(entries: Iterable[Descriptor], entry: Descriptor) -> bool:
    return any(other.digest == entry.digest for other in entries)


def with_entry(raw: bytes | None, entry: Descriptor) -> bytes:
    """Return an index with one more entry, and otherwise unchanged."""
    index: dict[str, Any] = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": []}
    if raw is not None:
        index = json.loads(raw)
    index["manifests"] = [*(index["manifests"] or []), entry.to_json()]
    return encode(index)


def _tagged(session: Session, subject: Digest) -> bytes | None:
    """Return the index under the subject's tag, or None."""
    tag = tag_of(subject)

    def get() -> bytes | None:
        headers = {"Accept": ", ".join(sorted(mediatype.INDEXES | mediatype.MANIFESTS))}
        response = session.request("GET", session.url(f"manifests/{tag}"), headers=headers)
        if response.status_code == 404:
            response.finish()
            return None
        if response.status_code != 200:
            raise failure(response, f"the list of referrers {tag}")
        return response.read(MAX_MANIFEST_SIZE)

    return retrying(get)


def _put(session: Session, subject: Digest, raw: bytes) -> None:
    tag = tag_of(subject)
    media_type = parse_document(raw).media_type

    def put() -> None:
        url = session.url(f"manifests/{tag}")
        headers = {"Content-Type": media_type}
        response = session.request("PUT", url, headers=headers, body=raw)
        if response.status_code not in (200, 201):
            raise manifest_failure(response, f"the list of referrers {tag}")
        response.finish()

    retrying(put)
