"""Linked pictures: kept in memory, for a limited time and in a limited number.

A link is signed with a key of the worker process (HMAC-SHA256, RFC 2104) and needs no token:
anyone with the link may fetch the picture until it expires.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from clowder_aimage.errors import NotFoundError

PATH = "/v1/files/pictures/"
LIFETIME = 3600  # seconds
# Pictures
MAX_PICTURES = 256
# Bytes of all pictures
MAX_BYTES = 256 * 1024 * 1024
_EXPIRES = re.compile(r"[0-9]{1,12}")


class ExpiredError(NotFoundError):
    """The picture of a link is no longer available."""


@dataclass(frozen=True, slots=True, eq=False)
class LinkedPicture:
    """A picture, its media type, and its expiry (seconds since the epoch)."""

    data: bytes
    media_type: str
    expires: int


class PictureLinks:
    """The linked pictures of a worker; the oldest are removed first."""

    def __init__(
        self,
        *,
        lifetime: int = LIFETIME,
        max_pictures: int = MAX_PICTURES,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._lifetime, self._max_pictures, self._max_bytes = lifetime, max_pictures, max_bytes
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._pictures: OrderedDict[str, LinkedPicture] = OrderedDict()

    @property
    def size(self) -> int:
        """The total size of all pictures in bytes."""
        return sum(len(picture.data) for picture in self._pictures.values())

    def __len__(self) -> int:
        return len(self._pictures)

    def keep(self, data: bytes, kind: str) -> str:
        """Keep a picture of a kind (png, jpeg, webp); return the path and query of its link."""
        name = f"{secrets.token_urlsafe(18)}.{kind}"
        expires = int(self._clock()) + self._lifetime
        self._pictures[name] = LinkedPicture(data, f"image/{kind}", expires)
        self.purge()
        return f"{PATH}{name}?expires={expires}&signature={self._sign(name, expires)}"

    def find(self, name: str, expires: str, signature: str) -> LinkedPicture:
        """Return the picture of a link. Raises ExpiredError, or NotFoundError if it is invalid."""
        stated = signature.encode("utf-8", "surrogatepass")
        is_number = _EXPIRES.fullmatch(expires) is not None
        # In constant time, so that responses reveal nothing of the signature
        if not is_number or not hmac.compare_digest(
            self._sign(name, int(expires)).encode(), stated
        ):
            raise NotFoundError("picture not found", hint="use the link unchanged")
        self.purge()
        picture = self._pictures.get(name)
        if picture is None or self._clock() >= int(expires):
            hint = f"links last {self._lifetime // 60} minutes at most; generate the picture again"
            raise ExpiredError("the picture has expired", hint=hint)
        return picture

    def purge(self) -> None:
        """Remove expired pictures and the oldest ones above the limits."""
        timestamp = self._clock()
        for name in [
            name for name, picture in self._pictures.items() if picture.expires <= timestamp
        ]:
            del self._pictures[name]
        while self._pictures and (
            len(self._pictures) > self._max_pictures or self.size > self._max_bytes
        ):
            self._pictures.popitem(last=False)

    def _sign(self, name: str, expires: int) -> str:
        text = f"{name}\n{expires}".encode("utf-8", "surrogatepass")
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()
