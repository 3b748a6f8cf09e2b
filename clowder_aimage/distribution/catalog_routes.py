"""Routes of lists (distribution-spec, "Listing Tags", "Listing Referrers"; Docker's catalog)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import accumulate
from urllib.parse import urlencode

from aiohttp import web

from clowder_aimage.distribution.cache import PullThroughCache
from clowder_aimage.distribution.catalog import Catalog
from clowder_aimage.distribution.error import DistributionError
from clowder_aimage.distribution.repository_name import (
    parse_repository,
    read_digest,
    read_repository,
)
from clowder_aimage.engine.executor import run_io
from clowder_aimage.oci import Descriptor, Digest, mediatype

# Bytes of a page's entries; clients accept 4 MiB
MAX_PAGE = 4 * 1024 * 1024 - 64 * 1024


class CatalogRoutes:
    """Repositories, and tags and referrers in one of them."""

    def __init__(self, catalog: Catalog, cache: PullThroughCache | None) -> None:
        self._catalog, self._cache = catalog, cache

    async def get_version(self, _: web.Request) -> web.StreamResponse:
        """Answer GET /v2/: this is a registry ("Determining Support")."""
        return web.json_response({})

    async def list_tags(self, request: web.Request) -> web.StreamResponse:
        """Answer GET /v2/<name>/tags/list?n=<count>&last=<tag>."""
        repository = read_repository(request)
        listed = None if self._cache is None else await self._cache.list_tags(repository)
        if listed is None:
            if not await run_io(self._catalog.is_known, repository):
                raise DistributionError("NAME_UNKNOWN", {"name": repository})
            listed = await run_io(self._catalog.list_tags, repository)
        return _paginate(request, set(listed), {"name": repository}, "tags")

    async def list_repositories(self, request: web.Request) -> web.StreamResponse:
        """Answer GET /v2/_catalog?n=<count>&last=<name>."""
        names = await run_io(self._catalog.list_repositories)
        return _paginate(request, filter(_is_servable, names), {}, "repositories")

    async def list_referrers(self, request: web.Request) -> web.StreamResponse:
        """Answer GET /v2/<name>/referrers/<digest>?artifactType=<type> with an index."""
        repository, subject = read_repository(request), read_digest(request)
        descriptors = None
        if self._cache is not None:
            descriptors = await self._cache.list_referrers(repository, subject)
        query = request.query
        body, following = await run_io(
            lambda: _build_index(
                self._find(repository, subject) if descriptors is None else descriptors,
                query.get("artifactType"),
                query.get("last", ""),
            )
        )
        headers = {"OCI-Filters-Applied": "artifactType"} if "artifactType" in query else {}
        if following:
            filters = {key: query[key] for key in ("artifactType",) if key in query}
            link = urlencode({**filters, "last": following})
            headers["Link"] = f'<{request.path}?{link}>; rel="next"'
        # json_response would add a charset to the media type
        return web.Response(body=body, content_type=mediatype.OCI_INDEX, headers=headers)

    def _find(self, repository: str, subject: Digest) -> list[Descriptor]:
        summaries = self._catalog.iter_summaries(repository)
        return [summary.listed for summary in summaries if summary.subject == subject]


def _build_index(
    referrers: list[Descriptor], artifact_type: str | None, last: str
) -> tuple[bytes, str]:
    """Return a page of an index of referrers by digest, and its last digest if there are more."""
    entries: list[bytes] = []
    size, following = 0, ""
    for referrer in sorted(referrers, key=lambda descriptor: str(descriptor.digest)):
        if str(referrer.digest) <= last or (
            artifact_type is not None and referrer.extra.get("artifactType", "") != artifact_type
        ):
            continue
        entry = json.dumps(referrer.to_json(), ensure_ascii=False).encode("utf-8", "replace")
        if entries and size + len(entry) > MAX_PAGE:
            return _encode_index(entries), following
        entries.append(entry)
        size, following = size + len(entry) + 1, str(referrer.digest)
    return _encode_index(entries), ""


def _encode_index(entries: list[bytes]) -> bytes:
    head = {"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX}
    return json.dumps(head).encode()[:-1] + b', "manifests": [' + b",".join(entries) + b"]}"


def _is_servable(repository: str) -> bool:
    """Return False for a name with a host and a port: paths of the API cannot have it."""
    try:
        return bool(parse_repository(repository))
    except DistributionError:
        return False


def _paginate(
    request: web.Request, names: Iterable[str], document: dict[str, object], key: str
) -> web.Response:
    last = request.query.get("last", "")
    remaining = sorted(name for name in names if name > last)
    count = request.query.get("n")
    if count is not None and (not count.isascii() or not count.isdigit() or len(count) > 9):
        raise DistributionError(
            "UNSUPPORTED", {"n": count[:100]}, message="n must be a whole number", status=400
        )
    limit = len(remaining) if count is None else int(count)
    # Names are ASCII
    sizes = accumulate(len(name) + 4 for name in remaining[:limit])
    page = [name for name, size in zip(remaining, sizes, strict=False) if size <= MAX_PAGE]
    headers = {}
    if page and len(page) < len(remaining):
        following = urlencode({"n": count or len(page), "last": page[-1]})
        headers["Link"] = f'<{request.path}?{following}>; rel="next"'
    return web.json_response(document | {key: page}, headers=headers)
