"""A client of a worker's API that uses only the standard library, for a fast import.

It reads replies incrementally: lines of JSON (ollama's API) or server-sent events (OpenAI's API).
Errors reported by the worker are raised as AImageError.
"""

from __future__ import annotations

import http.client
import json
import re
import secrets
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from clowder_aimage import errors
from clowder_aimage.content import telemetry
from clowder_aimage.content.timed_response import TimedResponse
from clowder_aimage.engine.endpoint import DEFAULT_HOST, Endpoint
from clowder_aimage.errors import AImageError, FormatError, NetworkError, UsageError
from clowder_aimage.oci import read_json

if TYPE_CHECKING:
    from clowder_aimage.registry.trace import RequestTrace

_CONNECT = 10.0  # seconds
_PROBE = 3.0  # seconds
# Seconds for a complete reply; the removal of a large model is slow
_REPLY = 300.0
# Seconds; a worker sends a comment into an event stream every ten seconds
_SILENCE = 120.0
# Bytes: ten large pictures in base64
_MAX_LINE = 256 << 20
_MAX_REPLY = 16 << 20
_MAX_ERROR = 64 << 10
_CHUNK = 1 << 20
_JSON = "application/json"
COMMENT = "comment"
# The last event of OpenAI's streams of texts
_DONE = b"[DONE]"
# An unreachable machine is detected after a minute, however long a picture takes
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}

# The worker's codes are more specific than the status
_CODES: Mapping[str, type[AImageError]] = {
    "model_not_found": errors.NotFoundError,
    "registry_unauthorized": errors.UnauthorizedError,
    "insufficient_storage": errors.NoSpaceError,
    "verification_failed": errors.VerificationError,
    "invalid_content": FormatError,
}
_KINDS: Mapping[int, type[AImageError]] = {
    **dict.fromkeys((400, 409, 413, 415, 422), UsageError),
    **dict.fromkeys((401, 403), errors.UnauthorizedError),
    404: errors.NotFoundError,
    507: errors.NoSpaceError,
}
# OpenAI's error types, in a stream whose own status was 200
_TYPES = {"invalid_request_error": 400, "authentication_error": 401, "permission_error": 403}


class WorkerClient:
    """A local or remote worker; ``host`` is an address for ``Endpoint.parse``.

    All methods raise NetworkError if no worker answers or the connection is lost, FormatError if a
    reply is invalid, and the errors of _CODES and _KINDS if the worker reports them.
    ``on_exchange`` is called after each head of a response, or failure.
    """

    def __init__(
        self,
        host: str = DEFAULT_HOST,
        token: str | None = None,
        on_exchange: Callable[[RequestTrace], None] | None = None,
    ) -> None:
        self.endpoint = Endpoint.parse(host)
        if token is not None and not re.fullmatch(r"[!-~]+", token):
            raise UsageError("invalid token: expected printable ASCII characters without spaces")
        self._token, self._on_exchange = token, on_exchange

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the JSON of a reply; None if it is empty."""
        return self._reply(method, path, None if body is None else json.dumps(body).encode())

    def upload(self, path: str, fields: Mapping[str, str], name: str, data: bytes) -> Any:
        """Send a form with a file (RFC 7578); return the JSON of the reply."""
        mark = secrets.token_hex(16)
        begin = f'--{mark}\r\nContent-Disposition: form-data; name="'
        form = "".join(f'{begin}{key}"\r\n\r\n{text}\r\n' for key, text in fields.items())
        form += f'{begin}file"; filename="{name}"\r\n\r\n'
        body = form.encode() + data + f"\r\n--{mark}--\r\n".encode()
        return self._reply("POST", path, body, f"multipart/form-data; boundary={mark}")

    def _reply(self, method: str, path: str, data: bytes | None, kind: str = _JSON) -> Any:
        with self._request(method, path, data, _REPLY, kind) as response, self._converting_errors():
            text = response.read(_MAX_REPLY + 1)
        if len(text) > _MAX_REPLY:
            raise FormatError(f"the response from {self.endpoint} exceeds {_MAX_REPLY} bytes")
        return self._parse(text) if text.strip() else None

    def read_lines(self, path: str) -> Generator[bytes, None, None]:
        """Yield the lines of a reply that are not empty."""
        with self._request("GET", path, None, _REPLY) as response:
            yield from filter(None, self._read(response))

    def is_worker(self, timeout: float = _CONNECT) -> bool:
        """Return True if the server is a worker, by its headers. The token is not sent.

        A proxy may replace the header ``Server``, but not ``X-Aimage-Version``.
        """
        with closing(_connect(self.endpoint, timeout)) as connection:
            connection.sock.settimeout(timeout)
            headers = {"User-Agent": "aimage"}
            with closing(
                self._exchange(connection, "GET", "/api/version", None, headers)
            ) as response:
                server = response.getheader("Server", "")
                has_name = re.match(r"aimage\b", server) is not None
                # A registry of this program has the same header, but not this route
                has_route = response.status != http.client.NOT_FOUND
                return has_route and (
                    has_name or response.getheader("X-Aimage-Version") is not None
                )

    def read_readiness(self) -> list[str]:
        """Return the reasons for which the worker is not ready; none if it is."""
        headers = self._build_headers()
        with closing(_connect(self.endpoint, _PROBE)) as connection:
            connection.sock.settimeout(_PROBE)
            with (
                closing(self._exchange(connection, "GET", "/readyz", None, headers)) as response,
                self._converting_errors(),
            ):
                text = response.read(_MAX_ERROR)
        value = self._parse(text)
        reasons = value.get("reasons") if isinstance(value, dict) else None
        return [str(reason) for reason in reasons] if isinstance(reasons, list) else []

    def iter_lines(
        self, path: str, body: Mapping[str, Any]
    ) -> Generator[dict[str, Any], None, None]:
        """Yield the JSON lines of a reply as they arrive (ollama's API).

        A line with an ``error`` is raised. Closing the generator closes the connection, so that the
        worker cancels the request.
        """
        with self._request("POST", path, json.dumps(body).encode(), None) as response:
            for line in filter(None, self._read(response)):
                yield self._parse_object(line)

    def iter_events(
        self, path: str, body: Mapping[str, Any]
    ) -> Generator[tuple[str, dict[str, Any]], None, None]:
        """Yield the type and JSON data of server-sent events as they arrive; else as ``lines``.

        The first event is ``open`` with the header fields of the reply in lower case, with a
        line for each repeated one. A COMMENT is sent while nothing happens, so that a request that
        waits can be cancelled. Source: HTML Living Standard, 9.2.6 "Interpreting an event stream".
        """
        with self._request("POST", path, json.dumps(body).encode(), _SILENCE) as response:
            names = {name.lower() for name, _ in response.getheaders()}
            yield "open", {field: "\n".join(response.headers.get_all(field, ())) for field in names}
            kind, data = "message", list[bytes]()
            for line in self._read(response):
                name, _, text = line.partition(b":")
                text = text.removeprefix(b" ")
                if not line and data == [_DONE]:
                    return
                if not line and data:
                    yield kind, self._parse_object(b"\n".join(data))
                if not line:
                    kind, data = "message", []
                elif not name:
                    yield COMMENT, {}
                elif name == b"event":
                    kind = text.decode("ascii", "replace")
                elif name == b"data":
                    data.append(text)

    @contextmanager
    def _request(
        self,
        method: str,
        path: str,
        data: bytes | None,
        timeout: float | None,
        kind: str = _JSON,
    ) -> Iterator[http.client.HTTPResponse]:
        headers = self._build_headers()
        if data is not None:
            headers["Content-Type"] = kind
        with closing(_connect(self.endpoint)) as connection:
            connection.sock.settimeout(timeout)
            # A response without keep-alive owns the socket now, and must be closed too
            with closing(self._exchange(connection, method, path, data, headers)) as response:
                if not 200 <= response.status < 300:
                    raise self._read_error(response)
                yield response

    def _build_headers(self) -> dict[str, str]:
        headers = {"Accept": "*/*", "User-Agent": "aimage"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        telemetry.inject(headers)
        return headers

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str],
    ) -> http.client.HTTPResponse:
        """Send a request and return the head of its response; report both."""
        began = time.monotonic()

        def report(status: int, reply: Mapping[str, str], error: str = "") -> None:
            if self._on_exchange is None:
                return
            from clowder_aimage.registry.trace import RequestTrace, parse_body_size, redact_headers

            seconds, sent = time.monotonic() - began, len(data or b"")
            redacted = redact_headers(headers), redact_headers(reply)
            url = f"{self.endpoint}{path}"
            received = parse_body_size(reply)
            trace = RequestTrace(method, url, status, seconds, sent, received, error, *redacted)
            self._on_exchange(trace)

        try:
            with self._converting_errors():
                # It may have replied, as with 413, before it read the whole body
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, path, data, headers)
                response = connection.getresponse()
        except NetworkError as error:
            report(0, {}, str(error))
            raise
        report(response.status, dict(response.getheaders()))
        return response

    def _read(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """Yield lines without line ends (``readline`` treats a broken connection as the end)."""
        line = bytearray()
        while chunk := self._read_chunk(response):
            end, *starts = chunk.split(b"\n")
            line += end
            if len(line) > _MAX_LINE:
                raise FormatError(f"a line from {self.endpoint} exceeds {_MAX_LINE} bytes")
            for start in starts:
                yield bytes(line).removesuffix(b"\r")
                line = bytearray(start)
        if line:
            yield bytes(line)

    def _read_chunk(self, response: http.client.HTTPResponse) -> bytes:
        with self._converting_errors():
            if isinstance(response, TimedResponse):
                # A stream may last: the timeout is that between two reads
                response.allow(response.timeout)
            chunk = response.read1(_CHUNK)
            if not chunk and response.length:
                raise http.client.IncompleteRead(b"", response.length)
        return chunk

    @contextmanager
    def _converting_errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise NetworkError(f"the request to the worker at {self.endpoint} timed out") from None
        except (OSError, http.client.HTTPException):
            message = f"the connection to the worker at {self.endpoint} was lost"
            hint = "check that the worker is running, and check its log"
            raise NetworkError(message, hint=hint) from None

    def _parse(self, text: bytes) -> Any:
        try:
            return read_json(text, "it", _MAX_LINE)
        except FormatError:
            message = f"invalid response from {self.endpoint}: not JSON"
            raise FormatError(message, remedy="worker_address") from None

    def _parse_object(self, text: bytes) -> dict[str, Any]:
        """Return an object of a stream. Raises the error that it contains."""
        value = self._parse(text)
        if not isinstance(value, dict):
            kind = type(value).__name__
            message = f"invalid response from {self.endpoint}: expected an object, not {kind}"
            raise FormatError(message)
        if value.get("error"):
            raise _build_error(value, value.get("status"))
        return value

    def _read_error(self, response: http.client.HTTPResponse) -> AImageError:
        value = None
        with self._converting_errors(), suppress(FormatError):
            value = self._parse(response.read(_MAX_ERROR))
        if not isinstance(value, dict) or not value.get("error"):
            message = f"{self.endpoint} answered {response.status} {response.reason}"
            return errors.AccessError(message, remedy="worker_address")
        return _build_error(value, response.status, response.getheader("Retry-After"))


def detect_program(endpoint: Endpoint) -> str:
    """Return the name of the program that answers HTTP at ``endpoint``; "" if it is unknown."""
    with (
        suppress(AImageError, OSError, http.client.HTTPException, ValueError),
        closing(_connect(endpoint, _PROBE)) as connection,
    ):
        connection.request("GET", "/", headers={"User-Agent": "aimage"})
        with closing(connection.getresponse()) as response:
            if response.read(64).startswith(b"Ollama is running"):
                return "ollama"
            server = response.getheader("Server", "")
            if "AirTunes/" in server:
                return "the AirPlay receiver of macOS"
            return "".join(filter(str.isprintable, server.partition("/")[0]))[:40].strip()
    return ""


def _build_error(
    value: Mapping[str, Any], status: object, retry_after: str | None = None
) -> AImageError:
    """Return the error of ``{"error": "..."}`` or ``{"error": {"message": "..."}}``."""
    error = value["error"]
    fields = error if isinstance(error, dict) else {**value, "message": error}
    message, hint = str(fields.get("message") or error), fields.get("hint")
    # Errors in OpenAI's streams have no status
    if type(status) is not int:
        status = _TYPES.get(str(fields.get("type")), 500)
    needs_token = status == 401 and not hint
    if not hint and retry_after and retry_after.isdecimal():
        hint = f"try again in {retry_after} seconds"
    code = str(fields.get("code"))
    kind = _CODES.get(code) or _KINDS.get(status, errors.AccessError)
    if code == "registry_unauthorized":
        return kind(message, hint=hint and str(hint), remedy="login_of_worker")
    return kind(message, hint=hint and str(hint), remedy="worker_token" if needs_token else "")


def _connect(endpoint: Endpoint, timeout: float = _CONNECT) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if endpoint.scheme == "https" else http.client.HTTPConnection
    connection = kind(endpoint.host or "localhost", endpoint.port or None, timeout=timeout)
    connection.response_class = TimedResponse
    try:
        if endpoint.scheme == "unix":
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(timeout)
            connection.sock.connect(endpoint.path)
            return connection
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    except (OSError, UnicodeError) as error:
        connection.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise NetworkError(
            f"cannot connect to the worker at {endpoint}: {reason}",
            hint="check the address, and that the worker is running",
            remedy="no_worker",
        ) from None
    return connection
