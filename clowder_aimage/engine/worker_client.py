"""A client of a worker, over the standard library alone, so that a verb with it starts fast.

It asks, and it reads what the worker sends while it works, line by line: JSON (ollama's way) or
server-sent events (OpenAI's way). What a worker refuses becomes one of the project's errors.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any

from clowder_aimage.engine.endpoint import DEFAULT_HOST, Endpoint
from clowder_aimage.errors import (
    AccessError,
    AImageError,
    FormatError,
    NetworkError,
    NoSpaceError,
    NotFoundError,
    UnauthorizedError,
    UsageError,
    VerificationError,
)

_ANSWER = 300.0  # seconds for an answer in one piece; removing a large model takes a while
_SILENCE = 120.0  # seconds; in a stream of events a worker says every ten that it lives
_LONGEST_LINE = 256 << 20  # bytes: ten large pictures as base64
_LONGEST_ANSWER = 16 << 20
_LONGEST_REFUSAL = 64 << 10
_PIECE = 1 << 20


class WorkerClient:
    """A worker, as a program on this machine or another one sees it.

    ``host`` is what ``Place.parse`` takes. Every method raises:

    NetworkError: no worker is there, or it broke off. UsageError, NotFoundError, UnauthorizedError,
    NoSpaceError, AccessError: what it said. FormatError: it said what cannot be understood.
    """

    def __init__(self, host: str = DEFAULT_HOST, token: str | None = None) -> None:
        self.place = Endpoint.parse(host)
        if token is not None and not re.fullmatch(r"[!-~]+", token):
            raise UsageError("a worker's token is ASCII characters without spaces")
        self._token = token

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that the worker answers with; None where it answers with nothing."""
        with self._asked(method, path, body, _ANSWER) as response, self._broken_off():
            text = response.read(_LONGEST_ANSWER + 1)
        if len(text) > _LONGEST_ANSWER:
            raise FormatError(f"the worker at {self.place} answers without end")
        return self._parse(text) if text.strip() else None

    def lines(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Send, and yield the lines of JSON as they come (ollama's API). Closing the iterator
        hangs up, which cancels. A line with an ``error`` is raised."""
        with self._asked("POST", path, body, None) as response:
            for line in self._read(response):
                if line:
                    yield self._value(line)

    def events(
        self, path: str, body: Mapping[str, Any]
    ) -> Generator[tuple[str, dict[str, Any]], None, None]:
        """Send, and yield the server-sent events as they come: their type and the JSON in them
        (HTML standard, 9.2.6 "Interpreting an event stream"). Before them comes ``open`` with the
        answer's header fields, in lower case. Else as ``lines``."""
        with self._asked("POST", path, body, _SILENCE) as response:
            yield "open", {name.lower(): text for name, text in response.getheaders()}
            kind, data = "message", list[bytes]()
            for line in self._read(response):
                name, _, text = line.partition(b":")
                text = text.removeprefix(b" ")
                if not line and data:
                    yield kind, self._value(b"\n".join(data))
                if not line:
                    kind, data = "message", []
                elif name == b"event":
                    kind = text.decode("ascii", "replace")
                elif name == b"data":
                    data.append(text)

    @contextmanager
    def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request; the answer, once it is one that says yes. Leaving hangs up."""
        headers = {"Accept": "*/*", "User-Agent": "aimage"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        with closing(self.place.connect()) as connection:
            with self._broken_off():
                connection.sock.settimeout(timeout)
                with suppress(BrokenPipeError, ConnectionResetError):  # it may have answered
                    connection.request(method, path, data, headers)
                response = connection.getresponse()
            with closing(response):  # it may own the socket by now
                if not 200 <= response.status < 300:
                    raise self._refusal(response)
                yield response

    def _read(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """Lines, without their ends. (``readline`` would take a broken connection for the end.)"""
        begun = bytearray()
        while piece := self._piece(response):
            first, *others = piece.split(b"\n")
            begun += first
            if len(begun) > _LONGEST_LINE:
                raise FormatError(f"the worker at {self.place} sends a line without end")
            for other in others:
                yield bytes(begun).removesuffix(b"\r")
                begun = bytearray(other)
        if begun:
            yield bytes(begun)

    def _piece(self, response: http.client.HTTPResponse) -> bytes:
        with self._broken_off():
            piece = response.read1(_PIECE)
            if not piece and response.length:
                raise http.client.IncompleteRead(b"", response.length)
        return piece

    def _broken_off(self) -> _BrokenOff:
        return _BrokenOff(self.place)

    def _parse(self, text: bytes) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise FormatError(
                f"what answers at {self.place} does not speak as a worker does",
                hint="see that AIMAGE_HOST names a worker",
            ) from None

    def _value(self, text: bytes) -> dict[str, Any]:
        """An object in a stream. Raises what it says went wrong."""
        value = self._parse(text)
        if not isinstance(value, dict):
            raise FormatError(f"the worker at {self.place} sent {type(value).__name__}, no object")
        if value.get("error"):
            raise self._error(value, _status(value))
        return value

    def _refusal(self, response: http.client.HTTPResponse) -> AImageError:
        with self._broken_off():
            text = response.read(_LONGEST_REFUSAL)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or not value.get("error"):
            return AccessError(
                f"{self.place} answered {response.status} {response.reason}",
                hint="see that AIMAGE_HOST names a worker",
            )
        return self._error(value, response.status, response.getheader("Retry-After"))

    def _error(
        self, value: Mapping[str, Any], status: int, retry_after: str | None = None
    ) -> AImageError:
        """What the worker said (``{"error": "..."}`` or ``{"error": {"message": "..."}}``)."""
        said = value["error"]
        fields = said if isinstance(said, dict) else {**value, "message": said}
        message, hint = str(fields.get("message") or said), fields.get("hint")
        if not hint and status == 401:
            hint = "AIMAGE_TOKEN must be what is in the worker's token file"
        if not hint and retry_after and retry_after.isdecimal():
            hint = f"try again in {retry_after} seconds"
        kind = _CODES.get(str(fields.get("code"))) or _KINDS.get(status, AccessError)
        return kind(message, hint=None if hint is None else str(hint))


_KINDS: Mapping[int, type[AImageError]] = {
    **dict.fromkeys((400, 409, 413, 415, 422), UsageError),
    **dict.fromkeys((401, 403), UnauthorizedError),
    404: NotFoundError,
    507: NoSpaceError,
}
_CODES: Mapping[str, type[AImageError]] = {  # of worker.error, where the status does not say it
    "model_not_found": NotFoundError,
    "registry_unauthorized": UnauthorizedError,
    "insufficient_storage": NoSpaceError,
    "verification_failed": VerificationError,
    "invalid_content": FormatError,
}
_STATUS = {  # what OpenAI's types of errors stand for in a stream, whose own status was 200
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
}


def _status(value: Mapping[str, Any]) -> int:
    """The status that an error in a stream would have had."""
    said, status = value["error"], value.get("status")
    if type(status) is int:
        return status
    return _STATUS.get(str(said.get("type")), 500) if isinstance(said, dict) else 500


class _BrokenOff:
    """Says in our words that a connection ended or hung."""

    def __init__(self, place: Endpoint) -> None:
        self._place = place

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None or issubclass(kind, AImageError):
            return
        if issubclass(kind, TimeoutError):
            raise NetworkError(f"the worker at {self._place} does not answer") from None
        if issubclass(kind, OSError | http.client.HTTPException):
            raise NetworkError(
                f"the connection to the worker at {self._place} broke off",
                hint="see whether it is still running, and what it logged",
            ) from None
