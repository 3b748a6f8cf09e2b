"""Manifests (distribution-spec, "Pulling manifests", "Pushing Manifests", "Deleting Manifests")."""

from __future__ import annotations

import asyncio

from aiohttp import web

from clowder_aimage.content.store import bytes_body
from clowder_aimage.errors import FormatError, NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import (
    MAX_MANIFEST_SIZE,
    Descriptor,
    Digest,
    Index,
    Manifest,
    Reference,
    mediatype,
    parse_document,
)
from clowder_aimage.server.blob import content_headers, is_current
from clowder_aimage.server.catalog import Catalog
from clowder_aimage.server.error import ApiError
from clowder_aimage.server.name import reference_of

# What may be pushed. A manifest media type of one's own is refused, as every registry does, so
# that what is tried here holds elsewhere; one that is in the layout already is served.
ACCEPTED = frozenset(
    {
        mediatype.OCI_MANIFEST,
        mediatype.OCI_INDEX,
        mediatype.DOCKER_MANIFEST,
        mediatype.DOCKER_MANIFEST_LIST,
    }
)
# Layers whose bytes stay where their urls say (image-spec, layer.md, "Non-Distributable Layers")
_ELSEWHERE = (
    "application/vnd.oci.image.layer.nondistributable.",
    "application/vnd.docker.image.rootfs.foreign.",
)
MAX_LISTED = 100  # missing blobs named in one answer


class ManifestRoutes:
    """Manifests by tag and by digest; their bytes are kept and given back untouched."""

    def __init__(self, layout: ImageLayout) -> None:
        self._layout = layout
        self._catalog = Catalog(layout)

    async def get(self, request: web.Request) -> web.StreamResponse:
        """HEAD and GET /v2/<name>/manifests/<reference>."""
        reference = reference_of(request)
        descriptor, raw = await asyncio.to_thread(self._read, reference)
        headers = content_headers(descriptor.digest)
        if is_current(request, descriptor.digest):
            return web.Response(status=304, headers=headers)
        return web.Response(body=raw, content_type=descriptor.media_type, headers=headers)

    def _read(self, reference: Reference) -> tuple[Descriptor, bytes]:
        descriptor = self._catalog.find(reference)
        if descriptor is not None:
            try:
                return descriptor, self._catalog.read(descriptor)
            except NotFoundError:
                pass  # named, but its bytes are not here
        raise ApiError("MANIFEST_UNKNOWN", {"reference": reference.target})

    async def put(self, request: web.Request) -> web.StreamResponse:
        """PUT /v2/<name>/manifests/<reference>: checked, stored, then named."""
        reference = reference_of(request)
        if request.content_type not in ACCEPTED:
            detail = {"mediaType": request.headers.get("Content-Type", "")[:300]}
            raise ApiError("MANIFEST_INVALID", detail, message="media type not accepted")
        raw = await _read_body(request)
        digest, subject = await asyncio.to_thread(self._store, raw, request.content_type, reference)
        headers = {
            "Location": f"/v2/{reference.repository}/manifests/{digest}",
            "Docker-Content-Digest": str(digest),
        }
        if subject is not None:
            headers["OCI-Subject"] = str(subject.digest)
        return web.Response(status=201, headers=headers)

    def _store(
        self, raw: bytes, media_type: str, reference: Reference
    ) -> tuple[Digest, Descriptor | None]:
        """Check and keep a manifest; its digest, and its subject, which need not be here."""
        digest = _digest(raw, reference)
        try:
            document = parse_document(raw, media_type)
        except FormatError as error:
            raise ApiError("MANIFEST_INVALID", message=error.message) from None
        self._check_children(document)
        descriptor = Descriptor(document.media_type, digest, len(raw))
        self._layout.push(descriptor, bytes_body(raw), reference)
        return digest, document.subject

    def _check_children(self, document: Manifest | Index) -> None:
        """What a manifest refers to must be here, in full: it could not be pulled otherwise."""
        absent = [
            child
            for child in document.children
            if not child.media_type.startswith(_ELSEWHERE) and not self._layout.exists(child)
        ]
        if absent:
            missing = dict.fromkeys(str(child.digest) for child in absent)
            details = [{"digest": digest} for digest in list(missing)[:MAX_LISTED]]
            raise ApiError("MANIFEST_BLOB_UNKNOWN", *details)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """DELETE of a tag, or by digest of every name that the manifest has in the repository."""
        reference = reference_of(request)
        if not await asyncio.to_thread(self._untag, reference):
            raise ApiError("MANIFEST_UNKNOWN", {"reference": reference.target})
        return web.Response(status=202)

    def _untag(self, reference: Reference) -> int:
        """Forget the names; how many they were."""
        found = 0
        for entry in list(self._catalog.entries(reference.repository)):
            same_tag = reference.tag is not None and entry.tag == reference.tag
            if same_tag or entry.descriptor.digest == reference.digest:
                try:
                    self._layout.untag(entry.reference)
                    found += 1
                except NotFoundError:
                    pass  # another client was first
        return found


def _digest(raw: bytes, reference: Reference) -> Digest:
    """The digest the manifest is stored under: the one it was pushed by, else sha256."""
    if reference.digest is None:
        return Digest.of(raw)
    if Digest.of(raw, reference.digest.algorithm) != reference.digest:
        raise ApiError("DIGEST_INVALID", {"digest": str(reference.digest)})
    return reference.digest


async def _read_body(request: web.Request) -> bytes:
    """The body, of at most 4 MiB ("Pushing Manifests": 413 for a larger one)."""
    body = bytearray()
    while piece := await request.content.readany():
        body += piece
        if len(body) > MAX_MANIFEST_SIZE:
            message = f"a manifest may have {MAX_MANIFEST_SIZE} bytes"
            raise ApiError("MANIFEST_INVALID", message=message, status=413)
    return bytes(body)
