"""The presence of blobs and manifests: by HEAD, or where that is refused, by GET.

The response to a HEAD is a hint: storage behind a registry may refuse it, because a signed URL is
valid for one method, and proxies may send other headers. Mirrors are not requested.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from clowder_aimage.errors import AImageError, NotFoundError, RegistryError
from clowder_aimage.oci import MAX_MANIFEST_SIZE, Descriptor, Digest
from clowder_aimage.registry.response import (
    RegistryResponse,
    ResponseFailure,
    build_failure_error,
    build_response_error,
)
from clowder_aimage.registry.retry import TRANSIENT_STATUS, BrokenOffError, retry_call
from clowder_aimage.registry.session import ACCEPT, Session

_FIRST_BYTE = {"Range": "bytes=0-0"}


@dataclass(frozen=True, slots=True)
class Presence:
    """The size of a blob if that is stated, or its absence or a refusal."""

    size: int | None = None
    is_present: bool = True
    # Builds the error: for most blobs of a push it is not needed.
    build_error: Callable[[], AImageError] | None = None

    @property
    def error(self) -> AImageError | None:
        """The error for the absence or the refusal."""
        return None if self.build_error is None else self.build_error()


def find_blob(session: Session, digest: Digest, size: int | None = None) -> Presence:
    """Find a blob by HEAD (end-2), else by GET of its first byte; ``size`` is the expected one.

    Raises UnauthorizedError, NetworkError, or RegistryError if the registry is unavailable.
    """
    url, resource = session.build_url(f"blobs/{digest}"), f"blob {digest}"
    presence = None if session.refuses_head else _find_by_head(session, url, resource, size)
    if presence is None:
        response = _request(session, "GET", url, _FIRST_BYTE, resource)
        presence = _read_presence(response, resource)
        # The next blobs need no HEAD.
        session.refuses_head |= presence.is_present or isinstance(presence.error, NotFoundError)
    return presence


def has_manifest(session: Session, target: str, content: Descriptor) -> bool:
    """Return True if the registry has a manifest under a tag or digest, compared by digest (end-3).

    Raises as ``find_blob`` does, and for a refusal.
    """
    url, resource = session.build_url(f"manifests/{target}"), f"manifest {target}"
    headers = {"Accept": ACCEPT}
    if target == str(content.digest):
        presence = _find_by_head(session, url, resource, content.size)
        if presence is not None:
            return presence.is_present
    response = _request(session, "GET", url, headers, resource)
    if response.status_code == 404:
        response.finish()
        return False
    if not response.is_success:
        raise build_response_error(response, resource)
    raw = response.read(MAX_MANIFEST_SIZE)
    return Digest.of(raw, content.digest.algorithm) == content.digest


def _find_by_head(
    session: Session, url: str, resource: str, expected: int | None
) -> Presence | None:
    """Return the presence by HEAD, or None if the response does not show it."""
    try:
        response = _request(session, "HEAD", url, {"Accept": ACCEPT}, resource)
    except (RegistryError, BrokenOffError):
        # Some registries fail at HEAD only.
        return None
    response.finish()
    if response.status_code == 404:
        return _build_absence(response, resource)
    # Some registries send 0 for all blobs.
    is_clear = bool(response.size) if expected is None else response.size in (None, expected)
    return Presence(response.size) if response.is_success and is_clear else None


def _build_absence(response: RegistryResponse, resource: str) -> Presence:
    return Presence(
        is_present=False,
        build_error=lambda: build_failure_error(ResponseFailure.of_head(response), resource),
    )


def _request(
    session: Session, method: str, url: str, headers: dict[str, str], resource: str
) -> RegistryResponse:
    """Send a request until it is answered, if only by a refusal."""

    def send() -> RegistryResponse:
        response = session.request(method, url, headers=headers, mirrored=False)
        if response.status_code == 401 or response.status_code in TRANSIENT_STATUS:
            raise build_response_error(response, resource)
        return response

    return retry_call(send)


def _read_presence(response: RegistryResponse, resource: str) -> Presence:
    """Return the presence of a blob by the response to a request for its first byte."""
    if response.status_code not in (404, 416) and not response.is_success:
        error = build_response_error(response, resource)
        return Presence(is_present=False, build_error=lambda: error)
    response.finish()
    if response.status_code == 404:
        return _build_absence(response, resource)
    if response.status_code == 200:
        return Presence(response.size)
    # 416 is the response for an empty blob.
    total = re.search(r"/([0-9]{1,18})$", response.headers.get("Content-Range", "").strip())
    is_known = total is not None and not response.coding
    return Presence(int(total[1]) if total and is_known else None)
