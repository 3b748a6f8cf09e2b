"""Referrers: the manifests with another one as their ``subject``.

A registry with the referrers API keeps the list itself. For one without it, clients keep an index
under the tag ``<algorithm>-<encoded>`` of the subject's digest (distribution-spec, "Listing
Referrers", end-12a and end-12b, and "Referrers Tag Schema").
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any
from urllib.parse import urlencode

from clowder_aimage.errors import FormatError, NotFoundError, RegistryError
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, mediatype, parse_document
from clowder_aimage.oci.manifest import encode
from clowder_aimage.registry.pagination import pages
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
        listed = _entries(_tagged(session, subject))
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


def _entries(raw: bytes | None, media_type: str = "") -> list[Descriptor]:
    if raw is None:
        return []
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
    tag = tag_of(subject)
    what = f"the list of referrers {tag}"
    raw = _tagged(session, subject)
    for _ in range(_ATTEMPTS):
        if any(entry.digest == other.digest for other in _entries(raw)):
            return
        new = with_entry(raw, entry)
        session.put_manifest(tag, parse_document(new).media_type, new, what)
        raw = _tagged(session, subject)
    if all(entry.digest != other.digest for other in _entries(raw)):
        raise RegistryError(
            f"{what} does not keep what is put there",
            hint="others may be writing to it at the same time: try again",
        )


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
    accept = ", ".join(sorted(mediatype.INDEXES | mediatype.MANIFESTS))
    get = partial(
        session.get, session.url(f"manifests/{tag}"), accept, f"the list of referrers {tag}"
    )
    try:
        return retrying(get)[0]
    except NotFoundError:
        return None
