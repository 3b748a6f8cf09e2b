"""Errors of the distribution API (distribution-spec, "Error Codes")."""

from __future__ import annotations

from collections.abc import Mapping

from clowder_aimage.http.api_error import ApiError
from clowder_aimage.oci import Reference

# code -> the default status, and the message
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


class DistributionError(ApiError):
    """An error response; each of ``details`` is an entry of its list of errors."""

    def __init__(
        self,
        code: str,
        *details: object,
        message: str | None = None,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        usual = CODES[code]
        super().__init__(
            status or usual[0], message or usual[1], code=code, headers=headers, details=details
        )


def build_manifest_error(reference: Reference) -> DistributionError:
    """Return the error for a reference that names no manifest."""
    return DistributionError("MANIFEST_UNKNOWN", {"reference": reference.target})
