"""The one error of the API, and its JSON (distribution-spec, "Error Codes")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiohttp import web

from clowder_aimage.errors import AImageError, ContentError, NoSpaceError
from clowder_aimage.oci import Reference

# code -> the status it goes with where a section does not ask for another, and its message
CODES = {
    "BLOB_UNKNOWN": (404, "blob unknown to registry"),
    "BLOB_UPLOAD_INVALID": (400, "blob upload invalid"),
    "BLOB_UPLOAD_UNKNOWN": (404, "blob upload unknown to registry"),
    "DIGEST_INVALID": (400, "provided digest did not match uploaded content"),
    "MANIFEST_BLOB_UNKNOWN": (400, "manifest references a manifest or blob unknown to registry"),
    "MANIFEST_INVALID": (400, "manifest invalid"),
    "MANIFEST_UNKNOWN": (404, "manifest unknown to registry"),
    "NAME_INVALID": (400, "invalid repository name"),
    "NAME_UNKNOWN": (404, "repository name not known to registry"),
    "SIZE_INVALID": (400, "provided length did not match content length"),
    "UNAUTHORIZED": (401, "authentication required"),
    "DENIED": (403, "requested access to the resource is denied"),
    "UNSUPPORTED": (405, "the operation is unsupported"),
    "TOOMANYREQUESTS": (429, "too many requests"),
    "UNKNOWN": (500, "unknown error"),
}


class DistributionError(AImageError):
    """A request that is answered with an error.

    Each of ``details`` becomes one entry of the answer's list, all with the same code: a manifest
    of which three blobs are missing has three.
    """

    def __init__(
        self,
        code: str,
        *details: object,
        message: str | None = None,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        usual_status, usual_message = CODES[code]
        super().__init__(message or usual_message)
        self.code = code
        self.details: Sequence[object] = details
        self.status = status or usual_status
        self.headers = headers or {}

    def response(self) -> web.Response:
        """The error as the specification writes it."""
        entry: dict[str, object] = {"code": self.code, "message": self.message}
        entries = [entry | {"detail": detail} for detail in self.details] or [entry]
        return web.json_response({"errors": entries}, status=self.status, headers=self.headers)


def manifest_unknown(reference: Reference) -> DistributionError:
    """That there is no such manifest."""
    return DistributionError("MANIFEST_UNKNOWN", {"reference": reference.target})


def api_error(error: AImageError) -> DistributionError:
    """What the API says of an error that a lower floor raised and no route expected.

    Messages of the store hold paths of this machine: they are for the log.
    """
    if isinstance(error, DistributionError):
        return error
    if isinstance(error, NoSpaceError):
        return DistributionError("UNKNOWN", message="no space left", status=507)
    if isinstance(error, ContentError):
        return DistributionError("UNKNOWN", message="what is stored here is damaged")
    return DistributionError("UNKNOWN")
