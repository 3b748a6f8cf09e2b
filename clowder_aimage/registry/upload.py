"""Blob upload (distribution-spec, "Pushing a blob monolithically", "... in chunks", end-4a to 6).

A blob is one PUT. A very large one, and a large one after a lost connection, is a PATCH and a PUT
without a body, as in docker: the bytes received from a broken PATCH are kept, and the remaining
ones follow. An upload that the registry has lost is restarted. After a 413, or lost connections,
smaller bodies are sent, and where a method is refused, the other one. A response that is not the
specified one is compared with the registry: a blob that it has is uploaded.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from functools import partial
from urllib.parse import urlsplit, urlunsplit

from clowder_aimage.content.store import Body, FileStream, Reader
from clowder_aimage.content.verified_reader import VerifyingReader, check_size, verify
from clowder_aimage.errors import AImageError, UnauthorizedError, VerificationError
from clowder_aimage.oci import Descriptor
from clowder_aimage.registry.connection import StreamBody
from clowder_aimage.registry.mount import MountOrigins, begin_upload
from clowder_aimage.registry.presence import find_blob
from clowder_aimage.registry.response import (
    RegistryResponse,
    ResponseFailure,
    build_failure_error,
    build_response_error,
)
from clowder_aimage.registry.retry import (
    TRANSIENT_STATUS,
    BrokenOffError,
    RequestDeferredError,
    retry_call,
)
from clowder_aimage.registry.session import READ_TIMEOUT, Session

# Bytes. Larger blobs use PATCH after a lost connection. It costs the registry more: a tenth of the
# processor time of distribution v3.
RESUMABLE = 256 * 1024 * 1024
# Bytes that a first PUT may lose.
LARGEST_PUT = 4 * 1024 * 1024 * 1024
# The size after the first 413. The next one divides it by four.
FIRST_CHUNK = 64 * 1024 * 1024
SMALLEST_CHUNK = 1024 * 1024
# Bytes per second at which a registry stores a completed blob.
_SETTLES = 16 * 1024 * 1024
_LOST = "the registry lost the upload; replicas behind a load balancer must share upload state"
_KIND = {"Content-Type": "application/octet-stream"}
# Refusals of a method, or of a body in the form that it needs. Firewalls refuse PATCH with 403.
_PUT_REFUSALS = frozenset({400, 405, 406, 411, 412, 415, 416, 417, 501})
_UNSUPPORTED = frozenset({405, 501})
_METHOD_REFUSALS = {"PUT": _PUT_REFUSALS, "PATCH": _PUT_REFUSALS | {403}, "": frozenset[int]()}
# Bytes. A smaller body is sent again, without a request for the received size.
_RESENT = 256 * 1024
# Answers of proxies for which a body takes too long.
_TIMEOUTS = frozenset({408, 504, 524})
# Lost connections and timeouts without progress after which a smaller body is sent.
_LOSSES = 2


def upload(session: Session, content: Descriptor, body: Body, origins: MountOrigins) -> None:
    """Mount a blob from ``origins``, or upload it.

    Raises RegistryError, NetworkError, UnauthorizedError, or VerificationError if the local copy is
    damaged. The registry does not store a damaged one.
    """
    blob_upload = _Upload(session, content, body, origins)
    retry_call(
        blob_upload.attempt,
        progress=lambda: (blob_upload.furthest, session.chunk, session.upload_method),
    )


def check_permission(session: Session) -> None:
    """Begin an upload, and cancel it. Raises as ``upload``: the registry does not accept one."""
    response = retry_call(partial(begin_upload, session, "an upload"))
    response.finish()
    url = session.join_upload(response.headers["Location"], response.url)
    # Not all registries cancel uploads.
    with contextlib.suppress(AImageError):
        session.request("DELETE", url, actions="pull,push").finish()


class _Upload:
    """The upload of one blob. It continues after a failed attempt."""

    def __init__(
        self, session: Session, content: Descriptor, body: Body, origins: MountOrigins
    ) -> None:
        self._session, self._content = session, content
        self._body, self._origins = body, origins
        self._resource = f"the upload of blob {content.digest}"
        self._location: str | None = None
        # True if the upload no longer exists.
        self._is_lost = False
        # True if the upload may exist or not.
        self._is_uncertain = False
        # The least bytes of a chunk other than the last.
        self._least = 0
        # The bytes that the registry has.
        self._offset = 0
        # The highest offset so far: losing data is not progress.
        self.furthest = 0
        # Lost connections and timeouts since then.
        self._losses = 0
        self._is_first = True

    def attempt(self) -> None:
        """Continue at the registry's offset, or begin an upload."""
        resumed = self._resume()
        if (not resumed or self._offset == self._content.size) and self._has_arrived():
            # All of it arrived, but the response was lost.
            return
        if not resumed and not self._begin():
            # The blob was mounted.
            return
        resumable = LARGEST_PUT if self._is_first else RESUMABLE
        self._is_first = False
        while size := self._choose_patch_size(resumable):
            self._patch(size)
        self._put()

    def _choose_patch_size(self, resumable: int) -> int:
        """Return the bytes of the next PATCH, 0 if the rest, up to ``resumable``, is by PUT."""
        remaining, chunk = self._content.size - self._offset, self._session.chunk
        least = {"PATCH": 0, "PUT": remaining}.get(self._session.upload_method, chunk or resumable)
        return (max(chunk, self._least) if chunk else remaining) if remaining > least else 0

    def _begin(self) -> bool:
        """Mount the blob, or begin an upload; return True if one has begun."""
        self._location, self._offset = None, 0
        response = self._origins.begin(self._session, self._content, self._resource)
        if response is None:
            return False
        least = response.headers.get("OCI-Chunk-Min-Length", "")
        self._least = int(least) if re.fullmatch("[0-9]{1,10}", least) else 0
        self._follow(response)
        return True

    def _follow(self, answer: RegistryResponse) -> None:
        """Finish a response, and continue at its location."""
        answer.finish()
        location = answer.headers.get("Location")
        if location:
            self._location = self._session.join_upload(location, answer.url)

    def _resume(self) -> bool:
        """Request the received size (end-13); return False if the upload cannot continue."""
        if self._location is None:
            return False
        answer = self._session.request("GET", self._location, actions="pull,push")
        # A page of a proxy has no Range.
        is_page = answer.status_code == 200 and "Range" not in answer.headers
        if (is_page or answer.status_code in TRANSIENT_STATUS) and not self._is_uncertain:
            self._is_uncertain = True
            # The upload may still exist: check again.
            raise build_response_error(answer, self._resource)
        self._is_uncertain = False
        if not answer.is_success:
            answer.finish()
            self._is_lost = True
            return False
        received = _parse_received_size(answer)
        self._follow(answer)
        self._advance(received if received <= self._content.size else 0)
        return 0 < received <= self._content.size

    def _advance(self, offset: int) -> None:
        self._offset = offset
        if offset > self.furthest:
            self.furthest, self._losses = offset, 0

    def _has_arrived(self) -> bool:
        """Return True if the whole blob arrived, and only the response was lost."""
        if not self._is_lost and not self._offset:
            return False
        self._is_lost = False
        return self._is_stored()

    def _is_stored(self) -> bool:
        """Return True if the registry has the blob."""
        return find_blob(self._session, self._content.digest, self._content.size).is_present

    def _patch(self, size: int) -> None:
        """Send the next chunk; smaller ones follow if it is too large."""
        end = min(self._content.size, self._offset + size)
        headers = {"Content-Length": str(end - self._offset)}
        # No range for a whole blob, as in docker.
        if self._offset or end < self._content.size:
            headers["Content-Range"] = f"{self._offset}-{end - 1}"
        answer = self._send("PATCH", self._location or "", headers, end)
        is_page = answer.status_code == 200 and not {"Location", "Range"} & answer.headers.keys()
        if is_page or not answer.is_success:
            raise self._build_attempt_error(answer, "PATCH", end - self._offset)
        arrived = _parse_received_size(answer)
        self._follow(answer)
        self._advance(arrived if self._offset < arrived <= end else end)

    def _put(self) -> None:
        """Send the remaining bytes and close the upload."""
        remaining = self._content.size - self._offset
        headers = {"Content-Length": str(remaining)}
        if self._offset and remaining:
            headers["Content-Range"] = f"{self._offset}-{self._content.size - 1}"
        parts = urlsplit(self._location or "")
        digest = f"digest={self._content.digest.algorithm}%3A{self._content.digest.encoded}"
        url = urlunsplit(parts._replace(query=f"{parts.query}&{digest}".lstrip("&")))
        wait = READ_TIMEOUT + self._content.size // _SETTLES
        answer = self._send("PUT", url, headers, self._content.size, wait)
        if answer.status_code == 201:
            answer.finish()
            return
        error = self._build_attempt_error(answer, "PUT" if remaining else "", remaining)
        # 409: another client has uploaded it.
        may_be_stored = answer.status_code < 400 or answer.status_code == 409
        if not may_be_stored or not self._is_stored():
            raise error

    def _send(
        self, method: str, url: str, headers: dict[str, str], end: int, wait: float = READ_TIMEOUT
    ) -> RegistryResponse:
        """Send the blob's bytes from the current offset to ``end``."""
        while True:
            try:
                return self._send_body(method, url, headers, end, wait)
            except RequestDeferredError as error:
                # The registry may have a part of a large body: the next attempt asks for it.
                if not error.is_unread and end - self._offset > _RESENT:
                    raise

    def _send_body(
        self, method: str, url: str, headers: dict[str, str], end: int, wait: float
    ) -> RegistryResponse:
        size = end - self._offset
        with self._open_body() if size else io.BytesIO() as stream:
            is_last = end == self._content.size
            body = StreamBody(stream, self._offset, size, last=is_last) if size else b""
            try:
                answer = self._session.request(
                    method, url, headers={**_KIND, **headers}, body=body, read_timeout=wait
                )
            except BrokenOffError as error:
                if not isinstance(error, UnauthorizedError):
                    self._count_loss(size)
                raise
        if answer.status_code in _TIMEOUTS:
            self._count_loss(size)
        if answer.status_code == 413 and self._shrink(size):
            answer.finish()
            raise BrokenOffError(f"{self._resource} requires smaller chunks")
        # The offsets differ: the next attempt requests the registry's.
        if answer.status_code == 416 and self._offset:
            self._count_loss(size)
            answer.finish()
            raise BrokenOffError(f"{self._resource} is at another offset")
        return answer

    def _open_body(self) -> Reader:
        stream = self._body(self._offset)
        # A wrong size of a file is known before it is sent.
        if isinstance(stream, FileStream):
            try:
                check_size(self._content, os.fstat(stream.fileno()).st_size)
            except VerificationError:
                stream.close()
                raise
        elif not self._offset:
            return VerifyingReader(stream, self._content)
        return stream

    def _count_loss(self, size: int) -> None:
        """Send smaller chunks after repeated failures: proxies may end large bodies."""
        self._losses += 1
        may_shrink = self._session.upload_method != "PUT" and self._losses >= _LOSSES
        if may_shrink and self._shrink(size):
            self._losses = 0

    def _shrink(self, size: int) -> bool:
        """Send smaller chunks to this registry from now on; return False if ``size`` is least."""
        smallest = max(SMALLEST_CHUNK, self._least)
        if size <= smallest:
            return False
        if self._session.upload_method == "PUT":
            # PATCH was refused for a larger body.
            self._session.upload_method = "PATCH"
        smaller = FIRST_CHUNK if size > FIRST_CHUNK else max(smallest, size // 4)
        self._session.chunk = min(smaller, self._session.chunk or smaller)
        return True

    def _switch(self, refused: str) -> bool:
        """Use the other method from now on; return False if that was refused, too."""
        if not self._session.upload_method:
            self._session.upload_method = "PUT" if refused == "PATCH" else "PATCH"
        return self._session.upload_method != refused

    def _change_request(self, failure: ResponseFailure, method: str, size: int) -> bool:
        """Choose another way to send a refused body; return False if there is none."""
        is_refused = failure.status in _METHOD_REFUSALS[method]
        if not is_refused or failure.code not in ("", "UNSUPPORTED"):
            return False
        # Some registries refuse chunks above a size so: ghcr.io with 416.
        may_be_size = method == "PATCH" and failure.status not in _UNSUPPORTED
        is_last_way = self._session.chunk or self._session.upload_method == method
        may_shrink = may_be_size and (is_last_way or failure.status == 416)
        return (may_shrink and self._shrink(size)) or self._switch(method)

    def _build_attempt_error(self, answer: RegistryResponse, method: str, size: int) -> AImageError:
        """Return the error that ends an attempt; a lost or damaged upload is restarted.

        ``method`` is that of a request with a body of ``size`` bytes. Raises VerificationError if
        the local copy is damaged.
        """
        failure = ResponseFailure.of(answer)
        error = build_failure_error(failure, self._resource)
        if failure.status in (404, 410):
            self._location, self._is_lost = None, True
            return BrokenOffError(error.message, hint=_LOST)
        if failure.code == "DIGEST_INVALID":
            self._location = None
            verify(self._body(), self._content)
            return BrokenOffError(f"{self._resource} was corrupted in transit ({error.message})")
        if self._change_request(failure, method, size):
            self._location = None
            return BrokenOffError(f"{self._resource} requires another request ({error.message})")
        return error


def _parse_received_size(answer: RegistryResponse) -> int:
    """Return the number of received bytes, by the Range header (``0-N``, inclusive)."""
    match = re.fullmatch(r"(?:bytes=)?0-([0-9]{1,18})", answer.headers.get("Range", "").strip())
    return int(match[1]) + 1 if match and match[1] != "0" else 0
