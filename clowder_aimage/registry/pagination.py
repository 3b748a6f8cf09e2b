"""Lists in pages (distribution-spec, "Listing Tags", end-8a and end-8b).

A registry sends as much at once as it likes, and a ``Link`` header (RFC 8288) to the rest. Links
are followed only within the registry's origin, and up to a limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from urllib.parse import urljoin, urlsplit

import requests.utils

from clowder_aimage.errors import FormatError, RegistryError
from clowder_aimage.oci import read_json
from clowder_aimage.registry.retry import retrying
from clowder_aimage.registry.session import Session
from clowder_aimage.registry.transport import origin

MAX_PAGES = 1000
MAX_LIST_SIZE = 64 * 1024 * 1024


def tags(session: Session, name: str) -> list[str]:
    """Return the tags of the repository ``name``, in the registry's order.

    Raises:
        NotFoundError: the registry has no such repository.
        RegistryError, NetworkError, UnauthorizedError: they cannot be read.
        FormatError: the response is not a list of tags.
    """
    found: dict[str, None] = {}
    for raw, _ in pages(session, "tags/list", f"repository {name}", "application/json"):
        found |= dict.fromkeys(_tags(raw, name))
    return list(found)


def _tags(raw: bytes, name: str) -> list[str]:
    """Return the tags in one page; some registries write ``null`` for an empty list."""
    try:
        listed = read_json(raw, "the answer")["tags"] or []
    except (FormatError, KeyError, TypeError):
        listed = None
    if not isinstance(listed, list) or not all(
        isinstance(tag, str) and tag.isprintable() for tag in listed
    ):
        raise FormatError(f"the answer about the tags of {name} is not a list of valid tags")
    return listed


def pages(session: Session, path: str, what: str, accept: str) -> Iterator[tuple[bytes, str]]:
    """Yield body and media type of each page of a list below ``/v2/<repository>/``.

    Raises:
        RegistryError: the pages lead elsewhere, in a circle, or to no end.
    """
    url: str | None = session.url(path)
    seen: set[str] = set()
    size = 0
    while url is not None:
        if url in seen:
            raise RegistryError(f"the pages about {what} form a circle")
        seen.add(url)
        raw, response = retrying(partial(session.get, url, accept, what))
        size += len(raw)
        yield raw, response.headers.get("Content-Type", "")
        links = requests.utils.parse_header_links(response.headers.get("Link", ""))
        link = next((one["url"] for one in links if one.get("rel") == "next"), "")
        url = _following(session, link, response.url, what) if link else None
        if url is not None and (len(seen) == MAX_PAGES or size > MAX_LIST_SIZE):
            raise RegistryError(f"the list about {what} does not end")


def _following(session: Session, link: str, base: str, what: str) -> str:
    """Return the URL of the next page. Raises RegistryError."""
    try:
        url = urljoin(base, link)
        if urlsplit(url).hostname == urlsplit(session.base).hostname:
            url = session.join(link, base)
            if origin(url) == origin(session.base):
                return url
    except ValueError:
        pass  # not a URL
    raise RegistryError(f"the next page about {what} is at another host: {link[:200]}")
