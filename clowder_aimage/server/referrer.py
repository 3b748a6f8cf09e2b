"""Referrers (distribution-spec, "Listing Referrers"): what says that a manifest is its subject."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

from aiohttp import web

from clowder_aimage.errors import FormatError, NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, mediatype, parse_document
from clowder_aimage.server.catalog import Catalog
from clowder_aimage.server.name import digest_of, repository_of


class ReferrerRoutes:
    """Referrers of one repository. Its manifests are read for each question: there is no list."""

    def __init__(self, layout: ImageLayout) -> None:
        self._catalog = Catalog(layout)

    async def referrers(self, request: web.Request) -> web.StreamResponse:
        """GET /v2/<name>/referrers/<digest>?artifactType=<type>: an index, empty where none."""
        repository, subject = repository_of(request), digest_of(request)
        found = await asyncio.to_thread(lambda: list(self._find(repository, subject)))
        headers = {}
        if "artifactType" in request.query:
            wanted = request.query["artifactType"]
            found = [each for each in found if each.extra.get("artifactType") == wanted]
            headers["OCI-Filters-Applied"] = "artifactType"
        index = {
            "schemaVersion": 2,
            "mediaType": mediatype.OCI_INDEX,
            "manifests": [each.to_json() for each in found],
        }
        body = json.dumps(index).encode()  # not json_response, which would add a charset
        return web.Response(body=body, content_type=mediatype.OCI_INDEX, headers=headers)

    def _find(self, repository: str, subject: Digest) -> Iterator[Descriptor]:
        entries = self._catalog.entries(repository)
        for digest, descriptor in {e.descriptor.digest: e.descriptor for e in entries}.items():
            try:
                document = parse_document(self._catalog.read(descriptor), descriptor.media_type)
            except (NotFoundError, FormatError):
                continue  # named, but not here, or of a kind that we cannot read
            if document.subject is not None and document.subject.digest == subject:
                yield _describe(document, digest)


def _describe(document: Manifest | Index, digest: Digest) -> Descriptor:
    """The descriptor that a list of referrers shows, with the type and annotations of its own."""
    kind = document.artifact_type
    if not kind and isinstance(document, Manifest):
        kind = document.config.media_type
    extra = {"artifactType": kind} if kind else {}
    return Descriptor(document.media_type, digest, len(document.raw), document.annotations, extra)
