"""Lists in a registry: repositories and tags in pages, and the referrers of a subject.

Sources: distribution-spec, "Listing Tags" (end-8), "Listing Referrers" (end-12), and "Referrers Tag
Schema": an index that clients keep under a tag if the registry does not have the referrers API.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urlencode

import requests.utils

from clowder_aimage.content.graph import build_referrer_entry
from clowder_aimage.errors import FormatError, NotFoundError, RegistryError
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, Reference, mediatype, read_json
from clowder_aimage.oci.manifest import encode, parse_document
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.manifest_upload import put_manifest
from clowder_aimage.registry.response import RegistryResponse
from clowder_aimage.registry.retry import ATTEMPTS, retry_call, retry_write
from clowder_aimage.registry.session import ACCEPT, Session
from clowder_aimage.registry.transport import parse_origin

# Statuses of registries without an optional API, besides 404.
_NO_API = frozenset({405, 501})
_GENERATED = re.compile(r"sha(?:256|512)-[0-9a-f]{64,128}(?:\.[a-z]+)?")
MAX_PAGES = 1000
# Bytes, for about 500,000 tags.
MAX_LIST_SIZE = 8 * 1024 * 1024


def list_tags(session: Session, name: str) -> list[str]:
    """Return the tags of the repository ``name``, in the registry's order.

    Raises AccessError, or FormatError if the response is not a list of tags.
    """
    return _list_names(session, session.build_url("tags/list"), f"repository {name}", "tags")


def is_generated(tag: str) -> bool:
    """Return True if a tag is that of a list of referrers, or of a signature of cosign."""
    return _GENERATED.fullmatch(tag) is not None


def list_repositories(host: str, connection: ClientOptions) -> list[str]:
    """Return the repositories of a registry, in its order (distribution, "Listing Repositories").

    Raises AccessError, or FormatError if the response is not a list of repositories.
    """
    with Session(Reference(host, "catalog"), connection) as session:
        try:
            return _list_names(session, session.catalog, "the catalog", "repositories")
        except (NotFoundError, RegistryError) as error:
            if isinstance(error, RegistryError) and error.status not in _NO_API:
                raise
            raise RegistryError(
                f"{host} does not list its repositories ({error})",
                hint="the catalog is optional, and many registries have none",
            ) from None


def _list_names(session: Session, url: str, resource: str, key: str) -> list[str]:
    """Return the names under ``key`` of all pages, each once."""
    names: dict[str, None] = {}
    for raw, _ in iter_pages(session, url, resource, "application/json"):
        names |= dict.fromkeys(_parse_page(raw, resource, key))
    return list(names)


def _parse_page(raw: bytes, resource: str, key: str) -> list[str]:
    """Return the names in one page; some registries write ``null`` for an empty list."""
    with contextlib.suppress(FormatError, KeyError, TypeError):
        names = read_json(raw, "the response")[key] or []
        is_list = isinstance(names, list)
        if is_list and all(isinstance(name, str) and name.isprintable() for name in names):
            return list(names)
    raise FormatError(f"invalid response for {resource}: expected a list of {key}")


def iter_pages(
    session: Session, start: str, resource: str, accept: str
) -> Iterator[tuple[bytes, str]]:
    """Yield body and media type of each page of a list that begins at the URL ``start``.

    Raises RegistryError: the links lead to another origin, form a cycle, or do not end.
    """
    url: str | None = start
    visited: set[str] = set()
    size = 0
    while url is not None:
        if url in visited:
            raise RegistryError(f"{resource}: the pages of the list form a cycle")
        visited.add(url)
        raw, response = retry_call(partial(session.get, url, accept, resource))
        size += len(raw)
        yield raw, response.headers.get("Content-Type", "")
        url = _find_next_url(session, response, resource)
        if url is not None and (len(visited) == MAX_PAGES or size > MAX_LIST_SIZE):
            raise RegistryError(
                f"{resource}: the list exceeds {MAX_PAGES} pages or {MAX_LIST_SIZE} bytes"
            )


def _find_next_url(session: Session, response: RegistryResponse, resource: str) -> str | None:
    """Return the URL of the next page, within the registry's origin. Raises RegistryError."""
    links = requests.utils.parse_header_links(response.headers.get("Link", ""))
    link = next((candidate["url"] for candidate in links if candidate.get("rel") == "next"), "")
    # The link may be malformed, or without TLS.
    with contextlib.suppress(RegistryError):
        url = session.join(link, response.url)
        if not link or parse_origin(url) == parse_origin(session.base):
            return url if link else None
    raise RegistryError(f"{resource}: the next page is at another host: {link[:200]}")


def build_tag(subject: Digest) -> str:
    """Return the tag of the index with the referrers of ``subject``."""
    return f"{subject.algorithm[:32]}-{subject.encoded[:64]}"


def list_referrers(session: Session, subject: Digest, artifact_type: str = "") -> list[Descriptor]:
    """Return the referrers of ``subject``, of one artifact type if given.

    Raises RegistryError, NetworkError, UnauthorizedError, or FormatError.
    """
    listed = _request_referrers(session, subject, artifact_type)
    if listed is None:
        tag = build_tag(subject)
        listed = _parse_entries(_read_tagged_index(session, tag, f"the referrers index {tag}"))
    unique = {entry.digest: entry for entry in listed}
    if not artifact_type:
        return list(unique.values())
    # A registry may leave the filtering to the client.
    return [entry for entry in unique.values() if entry.extra.get("artifactType") == artifact_type]


def _request_referrers(
    session: Session, subject: Digest, artifact_type: str
) -> list[Descriptor] | None:
    """Return the list of the referrers API, or None if the registry does not have it."""
    query = f"?{urlencode({'artifactType': artifact_type})}" if artifact_type else ""
    entries: list[Descriptor] | None = None
    resource = f"referrers of {subject}"
    url = session.build_url(f"referrers/{subject}{query}")
    try:
        for raw, kind in iter_pages(session, url, resource, mediatype.OCI_INDEX):
            entries = (entries or []) + _parse_entries(raw, kind)
    except NotFoundError:
        if entries is not None:
            # The API exists, but a page failed.
            raise
    except RegistryError as error:
        if entries is not None or error.status not in _NO_API:
            raise
    return entries


def _parse_entries(raw: bytes | None, media_type: str = "") -> list[Descriptor]:
    if raw is None:
        return []
    document = parse_document(raw, media_type)
    if not isinstance(document, Index):
        raise FormatError(f"expected an index of referrers, not {document.media_type}")
    return list(document.manifests)


def record(
    session: Session, subject: Digest, content: Descriptor, document: Manifest | Index
) -> None:
    """Add ``content`` to the index under the subject's tag.

    Concurrent writers may overwrite each other, so the index is read back and written again.

    Raises RegistryError, NetworkError, UnauthorizedError, or FormatError for other content.
    """
    entry = build_referrer_entry(content, document)
    tag = build_tag(subject)
    resource = f"the referrers index {tag}"
    raw = _read_tagged_index(session, tag, resource)

    def is_listed() -> bool:
        return any(entry.digest == existing.digest for existing in _parse_entries(raw))

    def write() -> bool:
        nonlocal raw
        new = with_entry(raw, entry)
        put_manifest(session, tag, parse_document(new).descriptor, new, resource)
        raw = _read_tagged_index(session, tag, resource)
        return is_listed()

    if not is_listed() and not retry_write(write):
        raise RegistryError(
            f"the new entry is missing from {resource} after {ATTEMPTS} attempts",
            hint="other clients may be updating it at the same time; try again",
        )


def forget(session: Session, subject: Digest, digest: Digest) -> None:
    """Remove a deleted manifest from the index under the subject's tag, if there is one."""
    tag = build_tag(subject)
    resource = f"the list of referrers {tag}"
    raw = _read_tagged_index(session, tag, resource)
    if raw is not None and any(entry.digest == digest for entry in _parse_entries(raw)):
        index = read_json(raw, resource)
        index["manifests"] = [e for e in index["manifests"] if e["digest"] != str(digest)]
        new = encode(index)
        put_manifest(session, tag, parse_document(new).descriptor, new, resource)


def with_entry(raw: bytes | None, entry: Descriptor) -> bytes:
    """Return an index with one more entry, and otherwise unchanged."""
    index: dict[str, Any] = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": []}
    if raw is not None:
        index = read_json(raw, "the referrers index")
    index["manifests"] = [*(index["manifests"] or []), entry.to_json()]
    return encode(index)


def _read_tagged_index(session: Session, tag: str, resource: str) -> bytes | None:
    """Return the index under the subject's tag, or None."""
    try:
        return retry_call(
            partial(session.get, session.build_url(f"manifests/{tag}"), ACCEPT, resource)
        )[0]
    except NotFoundError:
        return None
