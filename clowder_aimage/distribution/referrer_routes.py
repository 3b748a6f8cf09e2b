"""The route of referrers (distribution-spec, "Listing Referrers")."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from clowder_aimage.distribution.cache import PullThroughCache
from clowder_aimage.distribution.catalog import Catalog
from clowder_aimage.distribution.repository_name import digest_of, repository_of
from clowder_aimage.oci import Descriptor, Digest, mediatype


class ReferrerRoutes:
    """The referrers of a subject in one repository, in one answer."""

    def __init__(self, catalog: Catalog, cache: PullThroughCache | None) -> None:
        self._catalog = catalog
        self._cache = cache

    async def referrers(self, request: web.Request) -> web.StreamResponse:
        """Answer GET /v2/<name>/referrers/<digest>?artifactType=<type>: an index, maybe empty."""
        repository, subject = repository_of(request), digest_of(request)
        found = None
        if self._cache is not None:
            found = await self._cache.referrers(repository, subject)
        if found is None:
            found = await asyncio.to_thread(self._find, repository, subject)
        headers = {}
        if "artifactType" in request.query:
            wanted = request.query["artifactType"]
            found = [each for each in found if each.extra.get("artifactType", "") == wanted]
            headers["OCI-Filters-Applied"] = "artifactType"
        index = {
            "schemaVersion": 2,
            "mediaType": mediatype.OCI_INDEX,
            "manifests": [each.to_json() for each in found],
        }
        body = json.dumps(index).encode()  # not json_response, which would add a charset
        return web.Response(body=body, content_type=mediatype.OCI_INDEX, headers=headers)

    def _find(self, repository: str, subject: Digest) -> list[Descriptor]:
        summaries = self._catalog.summaries(repository)
        return [each.listed for each in summaries if each.subject == subject]
