"""Names in a request, parsed by the grammar in oci/ before they are used."""

from __future__ import annotations

from aiohttp import web

from clowder_aimage.distribution.error import DistributionError
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.http import PRODUCT
from clowder_aimage.oci import Digest, Reference

# In the User-Agent of a cache that tries others before its upstream
PEER = f"({PRODUCT} cache)"


def parse_repository(name: str) -> str:
    """Return a valid repository name (distribution-spec, "Pulling manifests")."""
    if _parse(name) != Reference("localhost", name, "latest"):
        raise DistributionError("NAME_INVALID", {"name": name[:300]})
    return name


def parse_digest(text: str) -> Digest:
    """Return a valid digest (image-spec, "Digests"), the only form passed to the layout."""
    try:
        return Digest.parse(text)
    except FormatError as error:
        detail = {"digest": text[:300]}
        raise DistributionError("DIGEST_INVALID", detail, message=error.message) from None


def parse_reference(repository: str, target: str) -> Reference:
    """Return the local reference of ``<name>`` and ``<reference>``: by tag or by digest."""
    parse_repository(repository)
    if ":" in target:
        return Reference(None, repository, digest=parse_digest(target))
    if _parse(f"{repository}:{target}") != Reference("localhost", repository, target):
        detail = {"reference": target[:300]}
        raise DistributionError("MANIFEST_UNKNOWN", detail, message="invalid tag")
    return Reference(None, repository, target)


def _parse(text: str) -> Reference | None:
    """Parse ``text`` behind a host, so that no part of it is parsed as a host."""
    try:
        return Reference.parse(f"localhost/{text}")
    except UsageError:
        return None


def read_repository(request: web.Request) -> str:
    """Return the valid ``<name>`` of the request's path."""
    return parse_repository(request.match_info["name"])


def read_digest(request: web.Request) -> Digest:
    """Return the valid ``<digest>`` of the request's path."""
    read_repository(request)
    return parse_digest(request.match_info["digest"])


def read_reference(request: web.Request) -> Reference:
    """Return the valid ``<name>`` and ``<reference>`` of the request's path."""
    return parse_reference(request.match_info["name"], request.match_info["reference"])


def is_of_peer(request: web.Request) -> bool:
    """Return True for the request of another cache: it has an upstream itself."""
    return PEER in request.headers.get("User-Agent", "")
