"""Lists of repositories and tags in a registry, in pages (distribution-spec, end-8)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from urllib.parse import urlsplit

from clowder_aimage.errors import FormatError, NotFoundError, RegistryError
from clowder_aimage.oci import Reference, read_json
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.link_header import find_link
from clowder_aimage.registry.response import RegistryResponse, read_media_type
from clowder_aimage.registry.retry import TRANSIENT_STATUS, retry_call
from clowder_aimage.registry.session import Session
from clowder_aimage.registry.transport import parse_origin

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
        except (NotFoundError, RegistryError, FormatError) as error:
            if isinstance(error, RegistryError) and error.status in TRANSIENT_STATUS | {0}:
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
        yield raw, read_media_type(response)
        url = _find_next_url(session, response, resource)
        if url is not None and (len(visited) == MAX_PAGES or size > MAX_LIST_SIZE):
            raise RegistryError(
                f"{resource}: the list exceeds {MAX_PAGES} pages or {MAX_LIST_SIZE} bytes"
            )


def _find_next_url(session: Session, response: RegistryResponse, resource: str) -> str | None:
    """Return the URL of the next page, within the registry's origin. Raises RegistryError.

    A registry behind a proxy may name its own, internal host: then the query of the link is used
    with the URL of this page.
    """
    link = find_link(response.headers.get("Link", ""), "next")
    if not link:
        return None
    # The link may be malformed, or without TLS.
    with contextlib.suppress(RegistryError):
        url = session.join(link, response.url)
        if parse_origin(url) == parse_origin(session.base):
            return url
    with contextlib.suppress(ValueError):
        if (parts := urlsplit(link)).query and parts.path == urlsplit(response.url).path:
            return session.join(f"?{parts.query}", response.url)
    raise RegistryError(f"{resource}: the next page is at another host: {link[:200]}")
