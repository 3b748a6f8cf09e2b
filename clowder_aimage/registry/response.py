"""A registry's response, whose body is read when it is needed."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError

from clowder_aimage.errors import VerificationError
from clowder_aimage.registry.retry import BrokenOffError

_MAX_IGNORED_SIZE = 64 * 1024  # of a body that is read only to keep its connection


@dataclass(slots=True, eq=False)
class RegistryResponse:
    """Status, headers and the unread body of a response from ``url``."""

    status_code: int
    url: str
    headers: Mapping[str, str]
    raw: urllib3.BaseHTTPResponse
    is_redirected: bool = False

    @property
    def host(self) -> str:
        """The host and port of the sender."""
        return urlsplit(self.url).netloc.rpartition("@")[2] or "the registry"

    def read(self, limit: int) -> bytes:
        """Read the whole body, which must not be larger than ``limit`` bytes, and close.

        Raises:
            VerificationError: it is larger, or compressed, which no request asks for and which
                could unpack to any size.
            BrokenOffError: the connection broke off.
        """
        try:
            encoding = self.headers.get("Content-Encoding", "identity").strip().lower()
            if encoding != "identity":
                raise VerificationError(f"{self.host} sent an unrequested {encoding[:20]} body")
            data = bytearray()
            while block := self.raw.read(min(limit + 1 - len(data), 1 << 16)):
                data += block
                if len(data) > limit:
                    raise VerificationError(f"{self.host} sent more than {limit} bytes")
            return bytes(data)
        except (OSError, HTTPError) as error:
            raise BrokenOffError(f"the response of {self.host} broke off: {error}") from error
        finally:
            self.raw.close()

    def readinto(self, view: memoryview) -> int:
        """Read from the socket into ``view``, without the copy that urllib3's own method makes.

        Raises:
            OSError, ValueError, HTTPError, http.client.HTTPException: the connection broke off.
        """
        return int(self._body.readinto(view))

    @property
    def _body(self) -> Any:
        """http.client's response, which our connections keep; urllib3's for other ones."""
        body = getattr(self.raw.connection, "response", None)
        return body if isinstance(body, http.client.HTTPResponse) else self.raw

    def release(self) -> None:
        """Give back the connection if the body was read to its end, or close it."""
        if self._body.isclosed():
            self.raw.release_conn()
        else:
            self.raw.close()

    def finish(self) -> None:
        """Read what little is left of the body, so that the connection can be used again."""
        try:
            self.raw.read(_MAX_IGNORED_SIZE)
            is_at_end = not self.raw.read(1)
        except (OSError, HTTPError):
            is_at_end = False
        if is_at_end:
            self.raw.release_conn()
        else:
            self.raw.close()

    def close(self) -> None:
        """Close the connection."""
        self.raw.close()
