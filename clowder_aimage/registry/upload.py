"""Blob upload (distribution-spec, "Pushing a blob monolithically", "... in chunks", end-4a to 6).

A small blob is one PUT. A large one is a PATCH and a PUT without a body, as in docker: the bytes
received from a broken PATCH are kept, and the rest follows. An upload that the registry has lost is
restarted. After a 413 (from the registry or a proxy) smaller bodies are sent.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from urllib.parse import urlencode, urlsplit, urlunsplit

from clowder_aimage.content.store import Body, FileStream, Reader
from clowder_aimage.content.verified_reader import VerifyingReader, check_size, verify
from clowder_aimage.errors import AImageError, RegistryError, VerificationError
from clowder_aimage.oci import Descriptor
from clowder_aimage.registry.mount import MountOrigins
from clowder_aimage.registry.response import RegistryResponse, failure
from clowder_aimage.registry.retry import TRANSIENT_STATUS, BrokenOffError, retrying
from clowder_aimage.registry.session import READ_TIMEOUT, Session
from clowder_aimage.registry.transport import StreamBody

RESUMABLE = 256 * 1024 * 1024  # bytes; larger blobs use PATCH, which costs the registry more
FIRST_CHUNK = 64 * 1024 * 1024  # after the first 413; a fourth of it after the next
SMALLEST_CHUNK = 1024 * 1024
_SETTLES = 16 * 1024 * 1024  # bytes per second at which a registry stores a completed blob
_LOST = "the registry lost the upload; replicas behind a load balancer must share upload state"
_KIND = {"Content-Type": "application/octet-stream"}


def upload(session: Session, content: Descriptor, body: Body, origins: MountOrigins) -> None:
    """Mount a blob from ``origins``, or upload it.

    Raises RegistryError, NetworkError, UnauthorizedError, or VerificationError if the local copy is
    damaged, which the registry does not store.
    """
    one = _Upload(session, content, body, origins)
    retrying(one.attempt, progress=lambda: (one.furthest, session.chunk))


def check_permission(session: Session) -> None:
    """Begin an upload, and cancel it. Raises as ``upload``: the registry does not accept one."""
    begun = session.request("POST", session.url("blobs/uploads/"), headers={"Content-Length": "0"})
    if begun.status_code != 202:
        raise failure(begun, "an upload")
    begun.finish()
    if location := begun.headers.get("Location"):
        url = session.join(location, begun.url)
        with contextlib.suppress(AImageError):  # not all registries cancel uploads
            session.request("DELETE", url, actions="pull,push").finish()


class _Upload:
    """The upload of one blob, which continues after a failed attempt."""

    def __init__(
        self, session: Session, content: Descriptor, body: Body, origins: MountOrigins
    ) -> None:
        self._session, self._content = session, content
        self._body, self._origins = body, origins
        self._what = f"the upload of blob {content.digest}"
        self._location: str | None = None
        self._gone = False  # the upload no longer exists
        self._doubtful = False  # it is unknown whether the upload exists
        self._least = 0  # minimum bytes of a chunk other than the last
        self._at = 0  # bytes that the registry has
        self.furthest = 0  # the highest offset so far: losing data is not progress

    def attempt(self) -> None:
        """Continue at the registry's offset, or begin an upload."""
        resumed = self._resume()
        if (not resumed or self._at == self._content.size) and self._is_there():
            return  # all of it arrived, but the response was lost
        if not resumed and not self._begin():
            return  # it was mounted
        while (left := self._content.size - self._at) > (self._session.chunk or RESUMABLE):
            chunk = self._session.chunk
            self._patch(max(chunk, self._least) if chunk else left)
        self._put()

    def _begin(self) -> bool:
        """Mount the blob, or begin an upload; return whether one has begun."""
        self._location, self._at = None, 0
        begun = self._origins.begin(self._session, self._content)
        if begun is None:
            return False
        if begun.status_code != 202:
            raise failure(begun, self._what)
        if not begun.headers.get("Location"):
            begun.finish()
            raise RegistryError("the registry began an upload but sent no Location header")
        least = begun.headers.get("OCI-Chunk-Min-Length", "")
        self._least = int(least) if re.fullmatch("[0-9]{1,10}", least) else 0
        self._follow(begun)
        return True

    def _follow(self, answer: RegistryResponse) -> None:
        """Finish a response, and continue at its location."""
        answer.finish()
        location = answer.headers.get("Location")
        if location:
            self._location = self._session.join(location, answer.url)

    def _resume(self) -> bool:
        """Request the received size (end-13); return False if the upload cannot continue."""
        if self._location is None:
            return False
        answer = self._session.request("GET", self._location, actions="pull,push")
        if answer.status_code in TRANSIENT_STATUS and not self._doubtful:
            self._doubtful = True
            raise failure(answer, self._what)  # the upload may still exist: check again
        self._doubtful = False
        if answer.status_code not in (200, 202, 204):
            answer.finish()
            self._gone = True
            return False
        at = _arrived(answer)
        self._follow(answer)
        self._reached(at if at <= self._content.size else 0)
        return 0 < at <= self._content.size

    def _reached(self, at: int) -> None:
        self._at = at
        self.furthest = max(self.furthest, at)

    def _is_there(self) -> bool:
        """Return True if the whole blob arrived, and only the response was lost."""
        if not self._gone and not self._at:
            return False
        self._gone = False
        answer = self._session.request("HEAD", self._session.url(f"blobs/{self._content.digest}"))
        answer.finish()
        return answer.status_code == 200

    def _patch(self, size: int) -> None:
        """Send the next chunk; smaller ones follow if it is too large."""
        end = min(self._content.size, self._at + size)
        headers = {"Content-Length": str(end - self._at)}
        if self._at or end < self._content.size:  # no range for a whole blob, as in docker
            headers["Content-Range"] = f"{self._at}-{end - 1}"
        answer = self._send("PATCH", self._location or "", headers, end)
        if answer.status_code not in (202, 204):
            raise self._failure(answer)
        arrived = _arrived(answer)
        self._follow(answer)
        self._reached(arrived if self._at < arrived <= end else end)

    def _put(self) -> None:
        """Send the rest and close the upload."""
        left = self._content.size - self._at
        headers = {"Content-Length": str(left)}
        if self._at and left:
            headers["Content-Range"] = f"{self._at}-{self._content.size - 1}"
        parts = urlsplit(self._location or "")
        digest = urlencode({"digest": str(self._content.digest)})
        url = urlunsplit(parts._replace(query=f"{parts.query}&{digest}".lstrip("&")))
        wait = READ_TIMEOUT + self._content.size / _SETTLES
        answer = self._send("PUT", url, headers, self._content.size, wait)
        if answer.status_code not in (201, 204):
            raise self._failure(answer)
        answer.finish()

    def _send(
        self, method: str, url: str, headers: dict[str, str], end: int, wait: float = READ_TIMEOUT
    ) -> RegistryResponse:
        """Send the blob's bytes from the current offset to ``end``."""
        size = end - self._at
        with self._opened() if size else io.BytesIO() as stream:
            is_last = end == self._content.size
            body = StreamBody(stream, self._at, size, last=is_last) if size else b""
            answer = self._session.request(
                method, url, headers={**_KIND, **headers}, body=body, read_timeout=wait
            )
        if answer.status_code == 413:
            self._shrink(answer, size)
        if answer.status_code == 416:  # the offsets differ: the next attempt requests it
            answer.finish()
            raise BrokenOffError(f"{self._what} is at another offset")
        return answer

    def _opened(self) -> Reader:
        stream = self._body(self._at)
        if isinstance(stream, FileStream):  # a wrong size is known in advance
            try:
                check_size(self._content, os.fstat(stream.fileno()).st_size)
            except VerificationError:
                stream.close()
                raise
        elif not self._at:
            return VerifyingReader(stream, self._content)
        return stream

    def _shrink(self, answer: RegistryResponse, size: int) -> None:
        """Send smaller chunks to this registry from now on. Raises."""
        smallest = max(SMALLEST_CHUNK, self._least)
        if size <= smallest:
            raise failure(answer, self._what)
        smaller = FIRST_CHUNK if size > FIRST_CHUNK else max(smallest, size // 4)
        self._session.chunk = min(smaller, self._session.chunk or smaller)
        answer.finish()
        raise BrokenOffError(f"{self._what} requires smaller chunks")

    def _failure(self, answer: RegistryResponse) -> AImageError:
        """Return the error that ends an attempt; a lost or damaged upload is restarted.

        Raises VerificationError if the local copy is damaged.
        """
        error = failure(answer, self._what)
        if answer.status_code in (404, 410):
            self._location, self._gone = None, True
            return BrokenOffError(error.message, hint=_LOST)
        if isinstance(error, RegistryError) and error.code == "DIGEST_INVALID":
            self._location = None
            verify(self._body(), self._content)
            return BrokenOffError(f"{self._what} was corrupted in transit ({error.message})")
        return error


def _arrived(answer: RegistryResponse) -> int:
    """Return how many bytes the registry has, by its Range header (``0-N``, inclusive)."""
    found = re.fullmatch(r"(?:bytes=)?0-([0-9]{1,18})", answer.headers.get("Range", "").strip())
    return int(found[1]) + 1 if found and found[1] != "0" else 0
