"""Blob upload: POST, then one PUT with the whole body (distribution-spec, end-4a and end-6)."""

from __future__ import annotations

from typing import Any, BinaryIO
from urllib.parse import urlencode, urlsplit, urlunsplit

from clowder_aimage.content.store import Body
from clowder_aimage.content.verify import VerifyingReader
from clowder_aimage.errors import RegistryError
from clowder_aimage.oci import Descriptor
from clowder_aimage.registry.answer import failure, finish
from clowder_aimage.registry.mount import Origins, begin
from clowder_aimage.registry.retry import retrying
from clowder_aimage.registry.session import Session


class _Sized:
    """A reader with a length, so that the request carries Content-Length and not chunks."""

    def __init__(self, reader: VerifyingReader, size: int) -> None:
        self._reader = reader
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __bool__(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> Any:
        return self._reader.read(size)


def upload(session: Session, content: Descriptor, body: Body, origins: Origins) -> None:
    """Mount a blob from ``origins``, else send it.

    A failed attempt begins anew with the body opened again.

    Raises:
        VerificationError: our own copy is damaged; the registry keeps nothing of it.
        RegistryError, NetworkError, UnauthorizedError: it was not taken.
    """
    retrying(lambda: _upload(session, content, body, origins))


def _upload(session: Session, content: Descriptor, body: Body, origins: Origins) -> None:
    what = f"the upload of blob {content.digest}"
    begun = begin(session, content, origins)
    if begun is None:
        return  # mounted
    if begun.status_code != 202:
        raise failure(begun, what)
    finish(begun)
    location = begun.headers.get("Location")
    if not location:
        raise RegistryError("the registry began an upload but did not say where")
    url = _with_digest(session.join(location, begun.url), content)
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Length": str(content.size),
    }
    with VerifyingReader(_opened(body), content) as reader:
        data: Any = _Sized(reader, content.size) if content.size else b""
        done = session.request("PUT", url, headers=headers, body=data)
        if done.status_code != 201:
            raise failure(done, what)
        if content.size and reader.read(1):  # the reader speaks up about a blob that is longer
            raise RegistryError(f"{content.digest} is longer than it should be")
    finish(done)


def _opened(body: Body) -> BinaryIO:
    return body()


def _with_digest(location: str, content: Descriptor) -> str:
    """The location with our digest added to whatever query the registry put there."""
    parts = urlsplit(location)
    digest = urlencode({"digest": str(content.digest)})
    query = f"{parts.query}&{digest}" if parts.query else digest
    return urlunsplit(parts._replace(query=query))
