"""Upload of manifests (distribution-spec, "Pushing Manifests", end-7)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from clowder_aimage.errors import AImageError
from clowder_aimage.oci import Descriptor
from clowder_aimage.registry.overload import OVERLOAD_STATUS
from clowder_aimage.registry.presence import has_manifest
from clowder_aimage.registry.response import build_manifest_error
from clowder_aimage.registry.retry import BrokenOffError, retry_call
from clowder_aimage.registry.session import Session


def put_manifest(
    session: Session, target: str, content: Descriptor, raw: bytes, resource: str
) -> Mapping[str, str]:
    """PUT a manifest by tag or digest (end-7) and return the response's headers.

    If the response is lost or not the specified one, the registry is asked for the manifest: with
    the right digest there, it is done. So it is for an immutable tag that has this digest already.

    Raises ManifestRefusedError for its kind, or another AImageError.
    """

    def is_stored() -> bool:
        with contextlib.suppress(AImageError):
            return has_manifest(session, target, content)
        return False

    def put() -> Mapping[str, str]:
        headers = {"Content-Type": content.media_type}
        url = session.build_url(f"manifests/{target}")
        try:
            response = session.request("PUT", url, headers=headers, body=raw)
        except BrokenOffError:
            if is_stored():
                return {}
            raise
        stated = response.headers.get("Docker-Content-Digest", "")
        is_other = stated.startswith(f"{content.digest.algorithm}:") and stated != str(
            content.digest
        )
        if response.status_code == 201 and not is_other:
            response.finish()
            return response.headers
        error = build_manifest_error(response, resource)
        if response.status_code not in (401, *OVERLOAD_STATUS):
            if is_stored():
                return response.headers
            if response.is_success:
                error.hint = "the registry does not have this manifest there afterwards"
        raise error

    return retry_call(put)
