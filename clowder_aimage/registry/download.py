"""A blob, or a range of one, as a stream that survives broken connections."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Callable

from urllib3.exceptions import HTTPError

from clowder_aimage.content.chunk import SMALL
from clowder_aimage.content.verified_reader import RawReader
from clowder_aimage.registry.response import (
    RegistryResponse,
    build_response_error,
    build_timeout_error,
)
from clowder_aimage.registry.retry import (
    ATTEMPTS,
    BrokenOffError,
    IntermediaryError,
    retry_call,
)
from clowder_aimage.registry.trace import parse_body_size

# The statuses of a blob as a whole. 203: a proxy may have changed it, which its digest shows.
_WHOLE = frozenset({200, 203})
# Other refusals of a range: by the registry, or by storage to which it redirects.
_RANGE_REFUSALS = frozenset({400, 403, 405, 406, 411, 412, 413, 415, 416, 417, 501})
# Seconds over which the speed of a connection is measured.
_WINDOW = 20.0
# Bytes per second. A slower connection is replaced.
_MIN_SPEED = 2048
# Requests the bytes [start, end) of a blob, or for all of it if start is None.
BlobRequest = Callable[[int | None, int], RegistryResponse]


class BlobReader(RawReader):
    """A stream of the bytes [offset, end) of a blob of ``size`` bytes.

    If the connection breaks, stalls or is too slow, the remaining bytes are requested on a new one,
    up to ATTEMPTS times in a row. If a server ignores or refuses ranges, or sends a different one,
    the blob is read from its beginning, and ``ignores_range`` is set; so it is for a range of a
    body that a proxy compressed, and such a body is decompressed. ``refuses_ranges`` is set, too,
    unless the server states that it has ranges at other times (RFC 9110, 14.3). The bytes are not
    verified here.
    """

    def __init__(self, get: BlobRequest, resource: str, offset: int, end: int, size: int) -> None:
        self._get, self._resource = get, resource
        self._offset, self._end, self._size = offset, end, size
        # Consecutive connections that broke, and consecutive windows that were too slow
        self._broken = self._slow = 0
        self._window_seconds, self._window_bytes = 0.0, 0
        self._response: RegistryResponse | None = None
        self.ignores_range = self.refuses_ranges = False
        # Servers refuse an empty range.
        if offset < end:
            self._connect()

    def _fill(self, view: memoryview) -> int:
        while self._offset < self._end:
            try:
                count = self._read(view[: self._end - self._offset])
            except BrokenOffError:
                self._broken += 1
                if self._broken >= ATTEMPTS:
                    raise
                self._connect()
                continue
            self._offset += count
            self._broken = 0
            return count
        self._release()
        return 0

    def _read(self, view: memoryview) -> int:
        started = time.monotonic()
        count = self._receive(view)
        if count == 0:
            raise BrokenOffError(
                f"{self._resource} ended after {self._offset} of {self._size} bytes"
            )
        self._window_bytes += count
        # The caller's time between reads does not count.
        self._window_seconds += time.monotonic() - started
        if self._window_seconds >= _WINDOW:
            is_slow = self._window_bytes < _MIN_SPEED * self._window_seconds
            self._slow = self._slow + 1 if is_slow else 0
            if self._slow >= ATTEMPTS:
                raise build_timeout_error(self._response.host if self._response else self._resource)
            if is_slow:
                # The received bytes are kept. The rest is requested on a new connection.
                self._disconnect()
                self._connect(self._offset + count)
            self._window_seconds, self._window_bytes = 0.0, 0
        return count

    def _receive(self, view: memoryview) -> int:
        # There is no response if the range is empty.
        if self._response is None:
            return 0
        try:
            return self._response.readinto(view)
        except (OSError, ValueError, HTTPError, http.client.HTTPException) as error:
            raise BrokenOffError(
                f"connection lost while reading {self._resource}: {error}"
            ) from error

    def _connect(self, offset: int | None = None) -> None:
        """Open a connection that begins at ``offset``, by default at the current one."""
        start = self._offset if offset is None else offset
        if start < self._end:
            retry_call(lambda: self._open(start))
        self._window_seconds, self._window_bytes = 0.0, 0

    def _open(self, offset: int) -> None:
        self._disconnect()
        # A large blob is requested as a range even if that is all of it: a 206 shows that other
        # connections may fetch other ranges
        is_small_blob = offset == 0 and self._end == self._size and self._size <= SMALL
        is_range = not (is_small_blob or self.ignores_range)
        response = self._get(offset if is_range else None, self._end)
        if is_range:
            if self._is_range_of_blob(response, offset):
                self._response = response
                return
            is_refused = response.status_code in _RANGE_REFUSALS or response.status_code == 206
            is_whole = response.status_code in _WHOLE and not self._is_page(response)
            self.ignores_range = is_refused or is_whole
            states_ranges = response.headers.get("Accept-Ranges", "").lower() == "bytes"
            self.refuses_ranges = self.ignores_range and not states_ranges
            if is_refused:
                response.close()
                response = self._get(None, self._end)
        is_whole = response.status_code in _WHOLE or _starts_at(response, 0)
        if not is_whole or self._is_page(response):
            raise build_response_error(response, self._resource)
        # The same label on the whole blob
        if parse_body_size(response.headers) != self._size:
            response.decode()
        self._response = response
        self._skip(offset)

    def _is_unmarked(self, response: RegistryResponse, offset: int) -> bool:
        """Return True if a body has the size of the range, without a Content-Range."""
        is_marked = "Content-Range" in response.headers or response.size == self._size
        is_range = response.status_code in (200, 206) and response.size == self._end - offset
        return is_range and not is_marked

    def _is_page(self, response: RegistryResponse) -> bool:
        """Return True if a body is text of another size than the blob's."""
        if response.coding:
            return response.is_page
        return response.is_text and response.size != self._size

    def _is_range_of_blob(self, response: RegistryResponse, offset: int) -> bool:
        """Return True if a body has the blob's bytes from ``offset``, rather than compressed ones.

        Some servers label blobs that are compressed files: then the sizes are those of the blob.
        """
        if not response.coding:
            return _starts_at(response, offset) or self._is_unmarked(response, offset)
        is_whole = parse_body_size(response.headers) == self._end - offset
        return is_whole and _starts_at(response, offset) and _find_total(response) == self._size

    def _skip(self, offset: int) -> None:
        """Read and discard the beginning of a whole blob."""
        scratch = memoryview(bytearray(min(offset, 1 << 20)))
        while offset:
            count = self._receive(scratch[:offset])
            if not count:
                self._disconnect()
                raise IntermediaryError(f"{self._resource} is shorter than in an earlier response")
            offset -= count

    def _release(self) -> None:
        """Return the connection to the pool."""
        if self._response is not None:
            self._response.release()
            self._response = None

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def close(self) -> None:
        if self._offset >= self._end:
            self._release()
        self._disconnect()
        super().close()


def _starts_at(response: RegistryResponse, offset: int) -> bool:
    """Return True if a 206 has the requested range (RFC 9110, 14.4)."""
    text = response.headers.get("Content-Range", "").strip().lower()
    start = text.removeprefix("bytes").partition("-")[0].strip()
    return response.status_code == 206 and start == str(offset)


def _find_total(response: RegistryResponse) -> int | None:
    """Return the size of the whole in the Content-Range of a 206, if it is stated."""
    total = response.headers.get("Content-Range", "").rpartition("/")[2].strip()
    return int(total) if re.fullmatch(r"[0-9]{1,18}", total) else None
