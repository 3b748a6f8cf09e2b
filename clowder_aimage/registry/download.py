"""A blob as a stream that survives a broken connection."""

from __future__ import annotations

import io
from typing import Protocol

import requests
from urllib3.exceptions import HTTPError

from clowder_aimage.errors import RegistryError, VerificationError
from clowder_aimage.registry.answer import failure
from clowder_aimage.registry.retry import ATTEMPTS, BrokenOffError, retrying


class Get(Protocol):
    """Ask for the blob's bytes from an offset on."""

    def __call__(self, offset: int, /) -> requests.Response: ...


class BlobReader(io.RawIOBase):
    """Reads bytes [offset, end) of a blob; when the connection breaks it asks for the rest.

    The bytes are not verified here: whoever stores them does that.
    """

    def __init__(self, get: Get, what: str, offset: int, end: int) -> None:
        self._get = get
        self._what = what
        self._offset = offset
        self._end = end
        self._broken = 0
        self._response: requests.Response | None = None
        if offset < end:  # a range past the end is refused, so nothing is asked for nothing
            self._response = retrying(self._connect)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while self._offset < self._end:
            try:
                count = self._read(buffer)
            except BrokenOffError:
                self._broken += 1
                if self._broken >= ATTEMPTS:
                    raise
                self._disconnect()
                self._response = retrying(self._connect)
                continue
            self._offset += count
            self._broken = 0
            return count
        return 0

    def _read(self, buffer: memoryview) -> int:
        view = memoryview(buffer)[: self._end - self._offset]
        assert self._response is not None  # noqa: S101 - set wherever offset < end
        try:
            count = int(self._response.raw.readinto(view))
        except (OSError, HTTPError) as error:
            raise BrokenOffError(f"{self._what} broke off: {error}") from error
        if count == 0:
            raise BrokenOffError(f"{self._what} ended after {self._offset} bytes")
        return count

    def _connect(self) -> requests.Response:
        response = self._get(self._offset)
        if response.status_code == 206:
            start = response.headers.get("Content-Range", "").removeprefix("bytes ")
            if start.partition("-")[0] != str(self._offset):
                response.close()
                raise VerificationError(f"{self._what}: the registry sent another range than asked")
            return response
        if response.status_code != 200:
            raise failure(response, self._what)
        try:
            self._skip(response)
        except BaseException:
            response.close()
            raise
        return response

    def _skip(self, response: requests.Response) -> None:
        """A server that ignores Range sends the whole: pass over what we have."""
        remaining = self._offset
        while remaining:
            try:
                chunk = response.raw.read(min(remaining, 1 << 20))
            except (OSError, HTTPError) as error:
                raise BrokenOffError(f"{self._what} broke off: {error}") from error
            if not chunk:
                raise RegistryError(f"{self._what} is shorter than it was")
            remaining -= len(chunk)

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def close(self) -> None:
        self._disconnect()
        super().close()
