"""The referrers of a subject in a registry: the API, or an index under a tag.

Sources: distribution-spec, "Listing Referrers" (end-12), and "Referrers Tag Schema": an index that
clients keep under a tag if the registry does not have the referrers API. ``_request_entries`` alone
decides which of them a registry uses, for lists, attached manifests and deletions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlencode

from clowder_aimage.content.graph import build_referrer_entry
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NotFoundError,
    RegistryError,
    UnauthorizedError,
)
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, mediatype, read_json
from clowder_aimage.oci.manifest import encode, parse_document
from clowder_aimage.registry.listing import iter_pages
from clowder_aimage.registry.manifest_upload import put_manifest
from clowder_aimage.registry.overload import OVERLOAD_STATUS
from clowder_aimage.registry.retry import (
    ATTEMPTS,
    TRANSIENT_STATUS,
    BrokenOffError,
    retry_call,
    retry_write,
)
from clowder_aimage.registry.session import ACCEPT, Session

# A registry, or what is before it, may refuse this path alone, as broken or as too many requests.
_ENDPOINT_FAILURES = {500, *OVERLOAD_STATUS}
_OUTAGES = TRANSIENT_STATUS - _ENDPOINT_FAILURES


class UnlistedReferrerError(RegistryError):
    """A manifest is in the registry, but the registry does not list it as a referrer."""


@dataclass(frozen=True, slots=True)
class _ApiAnswer:
    """The entries that the referrers API lists, or the error that shows that there is no API."""

    entries: list[Descriptor]
    refusal: AImageError | None = None


def build_tag(subject: Digest) -> str:
    """Return the tag of the index with the referrers of ``subject``."""
    return f"{subject.algorithm[:32]}-{subject.encoded[:64]}"


def list_referrers(
    session: Session,
    subject: Digest,
    artifact_type: str = "",
    limit: int | None = None,
    tags: Collection[str] | None = None,
) -> list[Descriptor]:
    """Return the referrers of ``subject``, of one artifact type if given.

    If the ``tags`` of the repository are known, the subject's is asked for only if it is one.

    Raises RegistryError, also if there are more than ``limit``; NetworkError, UnauthorizedError, or
    FormatError.
    """
    answer = _request_entries(session, subject, artifact_type, limit)
    listed = answer.entries
    # An API may ignore the subjects of manifests, and their clients then use the tag.
    may_have_tag = tags is None or build_tag(subject) in tags
    if not listed and not session.has_referrers_api and may_have_tag:
        listed = _list_tagged(session, subject, answer.refusal)
        _check_count(len(listed), subject, limit)
    unique = {entry.digest: entry for entry in listed if entry.digest != subject}
    if not artifact_type:
        return list(unique.values())
    # A registry may leave the filtering to the client.
    return [entry for entry in unique.values() if entry.extra.get("artifactType") == artifact_type]


def record(
    session: Session,
    subject: Digest,
    content: Descriptor,
    document: Manifest | Index,
    *,
    is_processed: bool,
) -> None:
    """Add ``content``, which is in the registry, to the index under the subject's tag.

    That is left out if the referrers API lists it, or exists and ``is_processed``: the registry has
    noticed the subject. Concurrent writers may overwrite each other, so the index is read back and
    written again.

    Raises UnlistedReferrerError if the tag cannot be used, RegistryError, NetworkError, or
    UnauthorizedError.
    """
    if is_processed and session.has_referrers_api:
        return
    answer = _request_entries(session, subject)
    is_listed = any(entry.digest == content.digest for entry in answer.entries)
    if is_listed or (is_processed and answer.refusal is None):
        session.has_referrers_api = True
        return
    _add_to_index(session, subject, build_referrer_entry(content, document))
    if answer.refusal is not None:
        session.has_referrers_api = False


def forget(session: Session, subject: Digest, digest: Digest) -> None:
    """Remove a deleted manifest from the index under the subject's tag, if there is one."""
    try:
        raw = _read_tag(session, subject)
    except (RegistryError, UnauthorizedError):
        if _request_entries(session, subject).refusal is None:
            # The API needs no tag.
            return
        raise
    if raw is not None and _lists(raw, subject, digest):
        index = read_json(raw, "the referrers index")
        index["manifests"] = [e for e in index["manifests"] if e["digest"] != str(digest)]
        failure = f"{digest} was deleted, but this registry still lists it"
        _write_index(session, subject, encode(index), failure)


def with_entry(raw: bytes | None, entry: Descriptor) -> bytes:
    """Return an index with one more entry, and otherwise unchanged."""
    index: dict[str, Any] = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": []}
    if raw is not None:
        index = read_json(raw, "the referrers index")
    index["manifests"] = [*(index["manifests"] or []), entry.to_json()]
    return encode(index)


def is_referrers_index(document: Manifest | Index, subject: Digest) -> bool:
    """Return True if a document is a list of referrers, not an artifact.

    Registries may resolve the tag to the subject itself, or have an image of that name. An index of
    images has platforms; the specification requires the artifact types of referrers.
    """
    if not isinstance(document, Index) or document.media_type != mediatype.OCI_INDEX:
        return False
    if document.digest == subject or document.subject is not None or document.artifact_type:
        return False
    return not any(
        "platform" in entry.extra and "artifactType" not in entry.extra
        for entry in document.manifests
    )


def _check_count(count: int, subject: Digest, limit: int | None) -> None:
    if limit is not None and count > limit:
        raise RegistryError(f"{subject} has over {limit} referrers")


def _request_entries(
    session: Session, subject: Digest, artifact_type: str = "", limit: int | None = None
) -> _ApiAnswer:
    """Return the answer of the referrers API. Raises the error of an outage or a broken list."""
    if session.has_referrers_api is False:
        return _ApiAnswer([], RegistryError("the registry does not have the referrers API"))
    query = f"?{urlencode({'artifactType': artifact_type})}" if artifact_type else ""
    url = session.build_url(f"referrers/{subject}{query}")
    entries: list[Descriptor] | None = None
    try:
        for raw, kind in iter_pages(session, url, f"referrers of {subject}", mediatype.OCI_INDEX):
            entries = (entries or []) + _parse_entries(raw, kind, subject)
            _check_count(len(entries), subject, limit)
    except (NotFoundError, UnauthorizedError, RegistryError, FormatError, BrokenOffError) as error:
        is_outage = isinstance(error, RegistryError) and (
            error.status in _OUTAGES | {0} or error.retry_after > 0
        )
        if entries is not None or is_outage:
            # The API exists, but a page failed.
            raise
        return _ApiAnswer([], error)
    session.has_referrers_api = True if entries else session.has_referrers_api
    return _ApiAnswer(entries or [])


def _parse_entries(raw: bytes, media_type: str, subject: Digest) -> list[Descriptor]:
    document = parse_document(raw, media_type)
    if not isinstance(document, Index) or not is_referrers_index(document, subject):
        raise FormatError(f"expected an index of referrers, not {document.media_type}")
    return list(document.manifests)


def _list_tagged(
    session: Session, subject: Digest, refusal: AImageError | None
) -> list[Descriptor]:
    """Return the entries of the index under the subject's tag.

    Raises ``refusal``, the API's error, if that is why they are not known.
    """
    try:
        raw = _read_tag(session, subject)
    except UnauthorizedError:
        if isinstance(refusal, UnauthorizedError):
            raise refusal from None
        raise
    index = None if raw is None else parse_document(raw)
    if isinstance(index, Index) and is_referrers_index(index, subject):
        if refusal is not None:
            session.has_referrers_api = False
        return list(index.manifests)
    is_failure = isinstance(refusal, RegistryError) and refusal.status in _ENDPOINT_FAILURES
    if refusal is not None and (is_failure or isinstance(refusal, BrokenOffError)):
        raise refusal
    return []


def _add_to_index(session: Session, subject: Digest, entry: Descriptor) -> None:
    tag = build_tag(subject)
    failure = (
        f"{entry.digest} was pushed, but this registry cannot list it as a referrer of {subject}"
    )
    try:
        raw = _read_tag(session, subject)
    except RegistryError as error:
        raise _build_unlisted_error(
            error, f"{failure}: it does not have the referrers API"
        ) from error

    def write() -> bool:
        nonlocal raw
        if raw is not None and not _is_index(raw, subject):
            raise UnlistedReferrerError(
                f"{failure}: it does not have the referrers API, and its tag {tag} has other"
                " content",
                hint="that is not overwritten; the artifact can be fetched by its digest",
            )
        _write_index(session, subject, with_entry(raw, entry), failure)
        raw = _read_tag(session, subject)
        return raw is not None and _lists(raw, subject, entry.digest)

    is_listed = raw is not None and _lists(raw, subject, entry.digest)
    if not is_listed and not retry_write(write):
        raise RegistryError(
            f"the new entry is missing from the referrers index {tag} after {ATTEMPTS} attempts",
            hint="other clients may be updating it at the same time; try again",
        )


def _write_index(session: Session, subject: Digest, raw: bytes, failure: str) -> None:
    """Write the index under the subject's tag. Raises UnlistedReferrerError if it is immutable."""
    tag = build_tag(subject)
    content = parse_document(raw).descriptor
    try:
        put_manifest(session, tag, content, raw, f"the referrers index {tag}")
    except RegistryError as error:
        reason = (
            f"{failure}: it does not have the referrers API, and refuses to change the tag {tag}"
        )
        hint = "exclude the tags sha256-* from the registry's rule of immutable tags"
        raise _build_unlisted_error(error, reason, hint) from error


def _build_unlisted_error(
    error: RegistryError, reason: str, hint: str | None = None
) -> RegistryError:
    """Return the error for a refused request, or ``error`` if it is no refusal."""
    if not 400 <= error.status < 500:
        return error
    return UnlistedReferrerError(
        f"{reason}: {error}", hint=hint, status=error.status, code=error.code
    )


def _read_tag(session: Session, subject: Digest) -> bytes | None:
    """Return the content of the subject's tag, or None."""
    tag = build_tag(subject)
    url, resource = session.build_url(f"manifests/{tag}"), f"the referrers index {tag}"
    try:
        return retry_call(partial(session.get, url, ACCEPT, resource))[0]
    except NotFoundError:
        return None


def _is_index(raw: bytes, subject: Digest) -> bool:
    try:
        return is_referrers_index(parse_document(raw), subject)
    except FormatError:
        return False


def _lists(raw: bytes, subject: Digest, digest: Digest) -> bool:
    """Return True if ``raw`` is a list of referrers with an entry of ``digest``."""
    return _is_index(raw, subject) and any(
        entry.digest == digest for entry in _parse_entries(raw, "", subject)
    )
