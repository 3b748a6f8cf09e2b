"""A repository in a registry, as a content store."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import partial

from clowder_aimage.content.copy import push_blobs
from clowder_aimage.content.copy_option import CopyOptions
from clowder_aimage.content.gate import RecentGate, find_gate
from clowder_aimage.content.store import Body, Reader, Source, Target
from clowder_aimage.content.verified_reader import VerifyingReader
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NotFoundError,
    RegistryError,
    UsageError,
    VerificationError,
)
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.oci.descriptor import MAX_SIZE
from clowder_aimage.oci.manifest import parse_document
from clowder_aimage.registry import listing, referrers
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.download import BlobReader
from clowder_aimage.registry.manifest_upload import put_manifest
from clowder_aimage.registry.mount import MountOrigins
from clowder_aimage.registry.presence import find_blob, has_manifest
from clowder_aimage.registry.response import (
    RegistryResponse,
    build_deletion_error,
    read_document,
    read_media_type,
)
from clowder_aimage.registry.retry import BrokenOffError, retry_call
from clowder_aimage.registry.session import ACCEPT, Session
from clowder_aimage.registry.upload import check_permission, upload

# Seconds without a byte of a blob after which a new connection is tried.
STALL = 15.0
MAX_REFERRERS = 1000
# Requests to a mirror for one range of a blob.
_MAX_REQUESTS = 3


class Repository(Target, AbstractContextManager["Repository"]):
    """The repository of ``reference``, with a cache of its manifests.

    A name without a host is in the default registry of ``connection``, if that is set. Missing
    blobs are mounted from ``origins`` if the registry allows it.
    """

    def __init__(
        self, reference: Reference, connection: ClientOptions, origins: MountOrigins | None = None
    ) -> None:
        reference = connection.expand(reference)
        if reference.registry is None:
            raise UsageError(
                f"{reference} has no registry host: it names an AImage in the local store",
                hint="tag it with a name that includes a registry host",
                remedy="tag_host",
                reference=reference,
            )
        self._session = Session(reference, connection)
        self._reference, self._name = reference, reference.name
        self._is_checked = True
        self._origins = origins or MountOrigins()
        self._manifests: dict[Digest, bytes] = {}
        self._present: set[tuple[Digest, int]] = set()
        # The digests of manifests that were pushed by tag, with the algorithm of the registry.
        self._stated: dict[Digest, Digest] = {}
        self._without_ranges: set[Digest] = set()
        self._refused_ranges: set[Digest] = set()
        self._gate = RecentGate()

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def resolve(self, reference: Reference, /) -> Descriptor:
        """Fetch the manifest of ``reference``, verified if that has a digest (end-3).

        Raises PolicyError: the user's policy does not accept it.
        """
        content = retry_call(lambda: self._resolve(reference, self._request_manifest(reference)))
        self._admit(reference, content)
        return content

    def _admit(self, reference: Reference, content: Descriptor) -> None:
        gate = find_gate() if self._is_checked else None
        if gate is not None:
            name = replace(self._reference, tag=reference.tag, digest=reference.digest)
            gate.admit_remote(self, name, content, self._manifests[content.digest])

    def without_gate(self) -> Repository:
        """Return the same repository, without the user's policy: to decide by it."""
        repository = copy(self)
        repository._is_checked = False  # noqa: SLF001 - of the same class
        return repository

    def resolve_changed(
        self, reference: Reference, previous: Digest | None, /
    ) -> Descriptor | None:
        """Resolve a reference; return None if its manifest is still ``previous``.

        This is one request, without a body in the latter case (RFC 9110, 13.1.2).
        """

        def resolve() -> Descriptor | None:
            response = self._request_manifest(reference, previous)
            if response.status_code == 304:
                response.finish()
                return None
            descriptor = self._resolve(reference, response)
            return None if descriptor.digest == previous else descriptor

        content = retry_call(resolve)
        if content is not None:
            self._admit(reference, content)
        return content

    def describe(self, reference: Reference) -> Descriptor:
        """Return the descriptor of a manifest by HEAD, else by GET (end-3). Raises AImageError."""
        url = self._session.build_url(f"manifests/{reference.target}")
        response = retry_call(
            partial(self._session.request, "HEAD", url, headers={"Accept": ACCEPT})
        )
        response.finish()
        size, media_type = response.size, response.media_type
        with contextlib.suppress(FormatError):
            digest = Digest.parse(response.headers.get("Docker-Content-Digest", ""))
            is_known = media_type in mediatype.DOCUMENTS and reference.digest in (None, digest)
            if response.status_code == 200 and size is not None and is_known:
                return Descriptor(media_type, digest, size)
        return self.resolve(reference)

    def delete(self, reference: Reference) -> Descriptor:
        """Delete a tag, or a manifest by digest with all its tags (end-9); return its descriptor.

        Raises NotFoundError, UnauthorizedError, NetworkError; RegistryError: the registry does not
        support that.
        """
        content = self.resolve(reference)
        document = parse_document(self._load_manifest(content), content.media_type)
        url = self._session.build_url(f"manifests/{reference.target}")

        def send() -> None:
            try:
                response = self._session.request("DELETE", url, actions="pull,delete")
            except BrokenOffError:
                if self._may_have(reference.target, content):
                    raise
                return
            if response.status_code in (202, 204):
                response.finish()
                return
            error = build_deletion_error(response, reference, str(content.digest))
            if response.status_code in (401, 403) or self._may_have(reference.target, content):
                raise error

        retry_call(send)
        if reference.digest is not None:
            self._manifests.pop(content.digest, None)
            if document.subject is not None:
                referrers.forget(self._session, document.subject.digest, content.digest)
        return content

    def _may_have(self, target: str, content: Descriptor) -> bool:
        """Return False if a manifest is not there: a failed attempt may have deleted it."""
        with contextlib.suppress(AImageError):
            return has_manifest(self._session, target, content)
        return True

    def _request_manifest(
        self, reference: Reference, previous: Digest | None = None
    ) -> RegistryResponse:
        headers = {"Accept": ACCEPT} | ({"If-None-Match": f'"{previous}"'} if previous else {})
        url = self._session.build_url(f"manifests/{reference.target}")
        return self._session.request("GET", url, headers=headers)

    def _resolve(self, reference: Reference, response: RegistryResponse) -> Descriptor:
        raw = read_document(response, f"manifest {reference}")
        header = response.headers.get("Docker-Content-Digest", "")
        digest = _verify_digest(raw, reference, header)
        document = parse_document(raw, read_media_type(response))
        self._manifests[digest] = raw
        return Descriptor(document.media_type, digest, len(raw))

    def exists(self, content: Descriptor, /) -> bool:
        """Return True if a blob or manifest exists (end-2, end-3); False if that is not answered.

        Raises AImageError for a manifest if that is not answered.
        """
        key = (content.digest, content.size)
        if key not in self._present and self._exists(content):
            self._present.add(key)
        return key in self._present

    def lacks(self, content: Descriptor, /) -> bool:
        """Return False if a blob exists; else True, or if its upload will show whether it does."""
        if (content.digest, content.size) in self._present:
            return False
        if self._origins.shows_presence(content.digest):
            return True
        is_present = self.exists(content)
        self._origins.record_presence(content.digest, is_present=is_present)
        return not is_present

    def _exists(self, content: Descriptor) -> bool:
        if content.media_type in mediatype.DOCUMENTS:
            return has_manifest(self._session, str(content.digest), content)
        presence = find_blob(self._session, content.digest, content.size)
        return presence.is_present and presence.size in (None, content.size)

    def fetch_size(self, digest: Digest) -> int:
        """Return the size of a blob (end-2). Raises AImageError."""
        presence = find_blob(self._session, digest)
        if presence.error is not None:
            raise presence.error
        if presence.size is None or presence.size > MAX_SIZE:
            raise RegistryError(f"{self._name} sent no valid Content-Length for {digest}")
        return presence.size

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        if content.media_type in mediatype.DOCUMENTS:
            if content.digest in self._manifests:
                # It may have been read without the policy, or by another one.
                self._admit(Reference(None, self._name, None, content.digest), content)
            return io.BytesIO(self._load_manifest(content)[offset:][:length])
        if self._is_checked and (gate := self._gate.find()) is not None:
            gate.check_blob(self._name, content)
        end = content.size if length is None else min(content.size, offset + length)
        sent = itertools.count(1)

        def get(start: int | None, end: int, /) -> RegistryResponse:
            headers = {} if start is None else {"Range": f"bytes={start}-{end - 1}"}
            url = self._session.build_url(f"blobs/{content.digest}")
            # A mirror that breaks off repeatedly is not asked again.
            if next(sent) > _MAX_REQUESTS:
                self._session.mirrors.avoid(content.digest)
            response = self._session.request("GET", url, headers=headers, read_timeout=STALL)
            if response.status_code == 404 and content.extra.get("urls"):
                response.finish()
                raise _build_foreign_error(content, self._name)
            return response

        resource = f"blob {content.digest} of {self._name}"
        reader = BlobReader(get, resource, offset, end, content.size)
        if reader.ignores_range:
            self._without_ranges.add(content.digest)
        if reader.refuses_ranges:
            self._refused_ranges.add(content.digest)
        return reader

    def supports_ranges(self, content: Descriptor, /) -> bool:
        return content.digest not in self._without_ranges

    def refuses_ranges(self, content: Descriptor, /) -> bool:
        return content.digest in self._refused_ranges

    def invalidate(self, content: Descriptor, /) -> bool:
        """Exclude the mirrors that sent wrong content; return True if there were any."""
        return self._session.mirrors.invalidate(content.digest)

    def was_mirrored(self, content: Descriptor) -> bool:
        """Return True if a blob came from a mirror."""
        return self._session.mirrors.has_sent(content.digest)

    def _load_manifest(self, content: Descriptor) -> bytes:
        if content.digest not in self._manifests:
            registry, _, repository = self._name.partition("/")
            self.resolve(Reference(registry, repository, None, content.digest))
        return self._manifests[content.digest]

    def receive(self, source: Source, blobs: Sequence[Descriptor], options: CopyOptions) -> None:
        push_blobs(source, self, blobs, options)

    def push(self, content: Descriptor, body: Body, reference: Reference | None = None, /) -> None:
        if content.media_type not in mediatype.DOCUMENTS:
            upload(self._session, content, body, self._origins)
            self._present.add((content.digest, content.size))
            self._origins.record_upload(self._session, content.digest)
            return
        with VerifyingReader(body(), content) as reader:
            raw = reader.readall() or b""
        self._put_manifest(content, raw, reference)

    def stop_mounting(self) -> bool:
        """Ask again for the blobs that were mounted, and mount no more; return True if any were."""
        mounted = self._origins.stop()
        self._present = {key for key in self._present if key[0] not in mounted}
        return bool(mounted)

    def describe_pushed(self, content: Descriptor) -> Descriptor:
        """Return the descriptor of a manifest that was pushed by tag, as the registry states it."""
        return replace(content, digest=self._stated.get(content.digest, content.digest))

    def check_push(self) -> None:
        """Begin and cancel an upload. Raises the errors of a push that show at its beginning."""
        check_permission(self._session)

    def list_tag_names(self) -> list[str]:
        """Return all tags of the repository in the registry's order (end-8a, end-8b)."""
        return listing.list_tags(self._session, self._name)

    def list_referrers(
        self,
        subject: Digest,
        artifact_type: str = "",
        limit: int | None = None,
        tags: Collection[str] | None = None,
    ) -> list[Descriptor]:
        """Return the manifests with ``subject``, of one type if given (end-12).

        If the ``tags`` of the repository are known, no other one is asked for. Raises RegistryError
        if there are more than ``limit``, of which no more pages are read.
        """
        return referrers.list_referrers(self._session, subject, artifact_type, limit, tags)

    def iter_referrers(self, subject: Digest) -> Iterator[tuple[int, Digest, Descriptor]]:
        """Yield level, subject and descriptor of the referrers of ``subject``, and of theirs.

        Each is yielded once, before its own. Raises RegistryError: there are too many.
        """
        visited: set[Digest] = {subject}
        pending = [(0, subject, entry) for entry in reversed(self.list_referrers(subject))]
        while pending:
            level, referred, entry = pending.pop()
            if entry.digest in visited:
                continue
            visited.add(entry.digest)
            if len(visited) > MAX_REFERRERS:
                raise RegistryError(f"{subject} has over {MAX_REFERRERS} referrers")
            yield level, referred, entry
            children = reversed(self.list_referrers(entry.digest))
            pending += [(level + 1, entry.digest, referrer) for referrer in children]

    def tag(self, content: Descriptor, reference: Reference, /) -> None:
        self._put_manifest(content, self._load_manifest(content), reference)

    def _put_manifest(self, content: Descriptor, raw: bytes, reference: Reference | None) -> None:
        """PUT a manifest by tag, or by digest without a tag, and list it as a referrer."""
        target = (reference and reference.tag) or str(content.digest)
        resource = f"manifest {self._name}:{target}"
        headers = put_manifest(self._session, target, content, raw, resource)
        self._manifests[content.digest] = raw
        stated = _parse_digest(headers.get("Docker-Content-Digest", ""))
        is_tag = target != str(content.digest)
        if is_tag and stated is not None and stated == Digest.of(raw, stated.algorithm):
            self._stated[content.digest] = stated
        document = parse_document(raw, content.media_type)
        if document.subject is not None:
            referrers.record(
                self._session,
                document.subject.digest,
                content,
                document,
                is_processed="OCI-Subject" in headers,
            )


def _build_foreign_error(layer: Descriptor, name: str) -> NotFoundError:
    """Return the error for a layer whose bytes the registry does not have (image-spec, "urls")."""
    urls = layer.extra["urls"]
    url = str(urls[0] if isinstance(urls, list) else urls)
    host = re.match(r"https?://(?:[^/?#]*@)?([A-Za-z0-9.:-]{1,100})", url)
    place = f"at {host[1]}" if host else "elsewhere"
    return NotFoundError(
        f"layer {layer.digest} of {name} is stored {place}, not in the registry, and is not "
        "fetched from there",
        hint="the addresses of foreign layers are not followed; use a copy of the artifact that "
        "has all its layers in the registry",
    )


def _verify_digest(raw: bytes, reference: Reference, header: str) -> Digest:
    """Return the digest of a manifest that was received for ``reference``.

    Of a tag, it has the algorithm of the digest that the registry states.
    """
    requested, stated = reference.digest, _parse_digest(header)
    expected = requested or stated
    digest = Digest.of(raw, expected.algorithm if expected else "sha256")
    if requested is not None and digest != requested:
        raise VerificationError(f"{reference.name} sent {digest}, expected {requested}")
    if requested is not None:
        # The header is a hint.
        return digest
    if header.startswith(f"{digest.algorithm}:") and header != str(digest):
        raise VerificationError(
            f"{reference.name} sent {digest} with Docker-Content-Digest: {header[:140]}"
        )
    return digest


def _parse_digest(header: str) -> Digest | None:
    with contextlib.suppress(FormatError):
        return Digest.parse(header)
    return None
