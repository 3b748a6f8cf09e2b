"""Routes of manifests (distribution-spec, "Pulling manifests", "Pushing Manifests")."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from aiohttp import web

from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.distribution.blob_response import build_content_headers
from clowder_aimage.distribution.blob_routes import is_current
from clowder_aimage.distribution.cache import PullThroughCache
from clowder_aimage.distribution.catalog import Catalog
from clowder_aimage.distribution.error import DistributionError, build_manifest_error
from clowder_aimage.distribution.repository_name import is_of_peer, parse_reference, read_reference
from clowder_aimage.distribution.served_blobs import ServedBlobs
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.errors import FormatError, NotFoundError
from clowder_aimage.http.body_stream import read_chunks
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.layout import index_name
from clowder_aimage.layout.lock import hold_lock
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

# Media types that may be pushed. Clowder's own is refused, as by every registry, so that tests
# against this registry apply to others; a stored manifest of that type is served.
ACCEPTED = mediatype.DOCUMENTS - {mediatype.AIMAGE_MANIFEST}
# Layers stored at their urls (image-spec, layer.md, "Non-Distributable Layers")
_ELSEWHERE = (
    "application/vnd.oci.image.layer.nondistributable.",
    "application/vnd.docker.image.rootfs.foreign.",
)
# The lock of registries that change names
_NAMES = "registry.lock"
# Missing blobs listed in one response
MAX_LISTED = 100
# Limit of the tags that one PUT sets
MAX_TAGS = 100


class ManifestRoutes:
    """Manifests by tag and by digest; their bytes are stored and returned unchanged."""

    def __init__(
        self,
        layout: ImageLayout,
        catalog: Catalog,
        blobs: ServedBlobs,
        cache: PullThroughCache | None,
    ) -> None:
        self._layout, self._catalog = layout, catalog
        self._blobs, self._cache = blobs, cache
        self._names_lock = threading.Lock()

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Answer HEAD and GET /v2/<name>/manifests/<reference>."""
        reference = read_reference(request)
        if self._cache is not None and not is_of_peer(request):
            descriptor, raw = await self._cache.fetch_manifest(reference)
        else:
            descriptor, raw = await run_io(self._read, reference)
        headers = build_content_headers(descriptor.digest)
        if is_current(request, descriptor.digest):
            return web.Response(status=304, headers=headers)
        return web.Response(body=raw, content_type=descriptor.media_type, headers=headers)

    def _read(self, reference: Reference) -> tuple[Descriptor, bytes]:
        descriptor = self._catalog.find(reference)
        if descriptor is not None:
            # A name may refer to a manifest that is not stored
            with contextlib.suppress(NotFoundError):
                raw = self._catalog.read(descriptor)
                self._layout.use(descriptor)
                return descriptor, raw
        raise build_manifest_error(reference)

    async def put(self, request: web.Request) -> web.StreamResponse:
        """Answer PUT /v2/<name>/manifests/<reference>?tag=<tag>&...: verify, store and name it."""
        reference = read_reference(request)
        names = [reference, *_parse_tags(request, reference)]
        if request.content_type not in ACCEPTED:
            detail = {"mediaType": request.headers.get("Content-Type", "")[:300]}
            raise _build_invalid_error("unsupported media type", detail)
        raw = await _read_body(request)
        digest, subject = await run_locking(self._store, raw, request.content_type, names)
        location = f"/v2/{reference.repository}/manifests/{digest}"
        headers = {"Location": location, "Docker-Content-Digest": str(digest)}
        if len(names) > 1:
            headers["OCI-Tag"] = ", ".join(str(name.tag) for name in names[1:])
        if subject is not None:
            headers["OCI-Subject"] = str(subject.digest)
        return web.Response(status=201, headers=headers)

    @contextlib.contextmanager
    def _changing_names(self) -> Iterator[None]:
        """Exclude others, from reading names until they are changed: threads, then processes."""
        with self._names_lock, hold_lock(self._layout.root, _NAMES):
            yield

    def _store(
        self, raw: bytes, media_type: str, names: list[Reference]
    ) -> tuple[Digest, Descriptor | None]:
        """Verify and store a manifest; return its digest, and its subject if it has one."""
        digest = _digest(raw, names[0])
        try:
            document = parse_document(raw, media_type)
        except FormatError as error:
            raise _build_invalid_error(error.message) from None
        descriptor = Descriptor(document.media_type, digest, len(raw))
        # The children are leased until the manifest has its names
        with self._layout.keep(), self._changing_names():
            self._check_children(names[0].repository, document)
            self._layout.push(descriptor, build_bytes_body(raw))
            self._catalog.records.add_repository(names[0].repository)
            for name in names:
                self._keep_untagged(name, descriptor.digest)
                self._layout.tag(descriptor, self._catalog.qualify(name))
        return digest, document.subject

    def _keep_untagged(self, name: Reference, replacement: Digest | None = None) -> None:
        """Record the manifest that loses a tag: clients that resolved it pull by digest."""
        for entry in self._catalog.find_entries(name):
            if entry.tag is not None and entry.descriptor.digest != replacement:
                self._catalog.records.add_untagged(name.repository, entry.descriptor)

    def _check_children(self, repository: str, document: Manifest | Index) -> None:
        """Raise DistributionError if the repository lacks a blob or manifest that it refers to."""
        children = [
            each for each in document.children if not each.media_type.startswith(_ELSEWHERE)
        ]
        if missing := self._blobs.find_missing(repository, children):
            digests = dict.fromkeys(str(child.digest) for child in missing)
            details = [{"digest": digest} for digest in list(digests)[:MAX_LISTED]]
            raise DistributionError("MANIFEST_BLOB_UNKNOWN", *details)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Answer DELETE of a tag, but not its manifest, or of a digest and all its tags."""
        reference = read_reference(request)
        await run_locking(self._delete, reference)
        return web.Response(status=202)

    def _delete(self, reference: Reference) -> None:
        repository, records = reference.repository, self._catalog.records
        with self._changing_names():
            entries = self._catalog.find_entries(reference)
            removed = {entry.name: entry.descriptor.digest for entry in entries}
            self._check_names(set(removed))
            is_untagged = False
            if reference.digest is None:
                self._keep_untagged(reference)
            else:
                manifests = self._catalog.list_manifests(repository)
                is_untagged = manifests.pop(reference.digest, None) is not None and not removed
                if self._catalog.reach(manifests, reference.digest):
                    raise _build_unsupported_error(
                        "an index of this repository refers to it: delete the index"
                    )
            if removed:
                records.add_repository(repository)
            if not self._layout.remove_names(removed) and not is_untagged:
                # Unknown, or removed by another process
                raise build_manifest_error(reference)
            if reference.digest is not None:
                records.remove_untagged(repository, reference.digest)

    def _check_names(self, names: set[str]) -> None:
        """Raise DistributionError if one of the names may not be removed."""
        if names & self._layout.read_only_names().keys():
            raise _build_unsupported_error("it is in a read-only store")
        written = {index_name(Reference.parse(name)) for name in names}
        if any(name in names | written for name, _ in self._layout.pins.iter_items()):
            raise DistributionError("DENIED", message="the name is pinned in this store")


def _build_unsupported_error(message: str) -> DistributionError:
    return DistributionError("UNSUPPORTED", message=message, headers={"Allow": "GET, HEAD, PUT"})


def _build_invalid_error(
    message: str, *details: object, status: int | None = None
) -> DistributionError:
    return DistributionError("MANIFEST_INVALID", *details, message=message, status=status)


def _parse_tags(request: web.Request, reference: Reference) -> list[Reference]:
    """Return the names in ``?tag=`` (distribution-spec, next after 1.1, "Pushing Manifests")."""
    tags = list(dict.fromkeys(request.query.getall("tag", [])))
    if tags and reference.digest is None:
        raise _build_invalid_error("?tag= requires a manifest pushed by digest")
    if len(tags) > MAX_TAGS:
        raise _build_invalid_error(f"one push sets at most {MAX_TAGS} tags", status=414)
    try:
        names = [parse_reference(reference.repository, tag) for tag in tags]
    except DistributionError as error:
        raise _build_invalid_error("invalid tag", *error.details) from None
    if any(name.tag is None for name in names):
        raise _build_invalid_error("invalid tag")
    return names


def _digest(raw: bytes, reference: Reference) -> Digest:
    """Return the digest to store the manifest under: that of the request, else sha256."""
    if reference.digest is None:
        return Digest.of(raw)
    if Digest.of(raw, reference.digest.algorithm) != reference.digest:
        raise DistributionError("DIGEST_INVALID", {"digest": str(reference.digest)})
    return reference.digest


async def _read_body(request: web.Request) -> bytes:
    """Return the body, of at most 4 MiB ("Pushing Manifests": 413 for a larger one)."""
    body = bytearray()
    async for chunk in read_chunks(request):
        body += chunk
        if len(body) > MAX_MANIFEST_SIZE:
            raise _build_invalid_error(
                f"the manifest exceeds {MAX_MANIFEST_SIZE} bytes", status=413
            )
    return bytes(body)
