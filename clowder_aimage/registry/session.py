"""One connection pool to one repository; the only place for requests and oras-py."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urljoin, urlsplit, urlunsplit

import requests
import urllib3
from urllib3.exceptions import ProtocolError

from clowder_aimage.content.parallel import ParallelStoppedError
from clowder_aimage.errors import AImageError, NetworkError, RegistryError, UnauthorizedError
from clowder_aimage.oci import Digest, Reference
from clowder_aimage.registry.auth import Authenticator
from clowder_aimage.registry.client_options import ClientOptions, open_session
from clowder_aimage.registry.mirror import Mirrors
from clowder_aimage.registry.response_error import failure, finish
from clowder_aimage.registry.retry import BrokenOffError, Pause
from clowder_aimage.registry.transport import Transport, origin

__all__ = ["Session", "origin"]

CONNECT_TIMEOUT = 3.0  # seconds; per address of the host
FIRST_READ_TIMEOUT = 6.0  # a registry that is down is told from a slow one within ten
READ_TIMEOUT = 60.0
_DOCKER_HUB = "registry-1.docker.io"


class AskedAgainError(BrokenOffError, UnauthorizedError):
    """A 401 to a body that must be opened anew: worth another try, with other credentials."""


class Session:
    """Requests to the repository of ``reference``, authenticated as the registry asks."""

    def __init__(
        self,
        reference: Reference,
        connection: ClientOptions,
        *,
        basic_auth: str | None = None,
        is_mirror: bool = False,
    ) -> None:
        self._reference = reference
        self._registry = reference.registry or ""
        self._mirrors = _mirrors(reference, None if is_mirror else connection)
        connection = connection.to(self._registry)
        plain = connection.plain_http or reference.is_loopback
        self._scheme = "http" if plain else "https"
        host = _DOCKER_HUB if self._registry == "docker.io" else self._registry
        self.base = f"{self._scheme}://{host}"
        self._http = open_session(connection, host)
        self._first_read_timeout = FIRST_READ_TIMEOUT
        self._closed = threading.Event()
        self._pause = Pause(connection.clock, connection.sleep or self._closed.wait)
        self._http.hooks["response"].append(self._pause.heed)
        self._transport = Transport(self._http)
        known = connection.registries.get(self._registry)
        self.chunk = known.chunk_size if known else 0  # bytes a request may carry; 0: any
        timeout = (CONNECT_TIMEOUT, FIRST_READ_TIMEOUT)
        self._auth = Authenticator(
            reference, connection, self._http, timeout, self._scheme, basic_auth
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; a thread that was left behind opens no new ones."""
        self._closed.set()
        self._mirrors.close()
        self._http.close()

    def distrust(self, digest: Digest) -> bool:
        """What came for ``digest`` was wrong: ask the mirrors that sent it for nothing more.

        Returns:
            whether it was a mirror: then it is worth asking for it again.
        """
        return self._mirrors.distrust(str(digest))

    def was_mirrored(self, digest: Digest) -> bool:
        """Whether what came for ``digest`` was a mirror's."""
        return self._mirrors.sent(str(digest))

    def avoid_mirrors(self, digest: Digest) -> None:
        """What comes for ``digest`` breaks off: ask the mirrors that send it for nothing more."""
        self._mirrors.avoid(str(digest))

    def url(self, path: str) -> str:
        """The URL of a path below ``/v2/<repository>/``."""
        return f"{self.base}/v2/{self._reference.repository}/{path}"

    def join(self, location: str, base: str) -> str:
        """The URL that a Location header means. It may be relative (RFC 9110, 10.2.2).

        A registry behind a proxy may call itself http where it was reached by https; it is still
        reached by https. Content never goes to another host in the clear.

        Raises:
            RegistryError: it would, or it is no address.
        """
        try:
            url = urljoin(base, location)
            old, new = urlsplit(base), urlsplit(url)
            origin(url)
        except ValueError:
            raise RegistryError(
                f"{self._registry} names {location[:200]!r} as an address"
            ) from None
        if old.scheme == "https" and new.scheme != "https":
            if old.hostname != new.hostname:
                raise RegistryError(
                    f"{self._registry} sends uploads to {new.hostname} without encryption"
                )
            return urlunsplit(new._replace(scheme="https", netloc=old.netloc))
        return url

    def ping(self) -> None:
        """Check that the registry is there and takes our credentials (distribution-spec, end-1)."""
        response = self.request("GET", f"{self.base}/v2/")
        if response.status_code != 200:
            raise failure(response, "a request")
        finish(response)

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        read_timeout: float = READ_TIMEOUT,
        actions: str | None = None,
    ) -> requests.Response:
        """Send a request; the answer's body is not read yet, its status not judged.

        ``actions`` is what it needs to be allowed to do, where the method does not tell.

        A 401 is answered once with fresh credentials. A ``body`` that is not bytes cannot be sent
        twice: then the 401 comes back as BrokenOffError, and the caller begins again.

        Raises:
            NetworkError: no answer.
            UnauthorizedError: the registry's challenge cannot be answered.
        """
        path = url.removeprefix(self.url(""))
        found = self._mirrors.request(method, path, headers, read_timeout)
        if found is not None:
            return found
        if actions is None:
            actions = "pull" if method in ("GET", "HEAD") else "pull,push"
        if url == f"{self.base}/v2/":
            actions = ""  # asked of the registry, not of a repository in it
        ours = origin(url) == origin(self.base)
        header = self._wrapped(lambda: self._auth.known(actions)) if ours else None
        response = self._send(method, url, headers, body, header, read_timeout)
        challenge = response.headers.get("WWW-Authenticate", "")
        if response.status_code != 401 or not ours or not challenge or response.history:
            return response
        finish(response)
        refused = header
        header = self._wrapped(lambda: self._auth.answer(actions, challenge, refused))
        if body is not None and not isinstance(body, bytes):
            raise AskedAgainError(
                f"{self._registry} asked for other credentials in an upload",
                hint=f"log in with: aimage login {self._registry}",
            )
        return self._send(method, url, headers, body, header, read_timeout)

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        body: Any,
        authorization: str | None,
        read_timeout: float,
    ) -> requests.Response:
        self._pause.wait()
        if self._closed.is_set():
            raise ParallelStoppedError
        sent = {"Accept-Encoding": "identity", **(headers or {})}
        if authorization:
            sent["Authorization"] = authorization
        read = min(self._first_read_timeout, read_timeout) if body is None else read_timeout
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT, read=read)
        response: requests.Response = self._wrapped(
            lambda: self._transport.send(method, url, sent, body, timeout=timeout)
        )
        self._pause.heed(response)
        self._first_read_timeout = math.inf
        if self._closed.is_set():
            response.close()
            self._http.close()
        return response

    def _wrapped(self, call: Any) -> Any:
        """``call()``, with the errors of requests in our own words."""
        try:
            return call()
        except AImageError:
            raise
        except requests.exceptions.SSLError as error:
            raise _tls_error(self._registry, error) from error
        except requests.exceptions.ConnectTimeout as error:
            raise NetworkError(
                f"{self._registry} does not answer", hint="check the host, the port and the network"
            ) from error
        except requests.exceptions.ReadTimeout as error:
            answered = self._first_read_timeout == math.inf
            raise (BrokenOffError if answered else NetworkError)(
                f"{self._registry} accepts connections but does not answer",
                hint="the registry may be overloaded; try again later",
            ) from error
        except requests.exceptions.ConnectionError as error:
            raise self._connection_error(error) from error
        except requests.exceptions.RequestException as error:
            raise NetworkError(f"cannot talk to {self._registry}: {_reason(error)}") from error
        except OSError as error:  # a file of certificates that is not there
            raise NetworkError(f"cannot talk to {self._registry}: {error}") from error

    def _connection_error(self, error: requests.exceptions.ConnectionError) -> NetworkError:
        reason = _reason(error)
        if error.args and isinstance(error.args[0], ProtocolError | OSError | EOFError):
            return BrokenOffError(
                f"the connection to {self._registry} broke off ({reason})", hint="try again"
            )
        return NetworkError(
            f"cannot reach {self._registry}: {reason}",
            hint="check the host and the port, and that the registry is running",
        )


def _tls_error(registry: str, error: requests.exceptions.SSLError) -> NetworkError:
    reason = _reason(error)
    if "certificate required" in reason.lower():
        return NetworkError(
            f"{registry} asks for a client certificate: {reason}",
            hint=f"put it and its key into certs.d/{registry}/ as client.cert and client.key",
        )
    if "certificate" in reason.lower():
        return NetworkError(
            f"cannot trust the certificate of {registry}: {reason}",
            hint="name your organisation's CA with --ca-file",
        )
    return NetworkError(
        f"cannot speak TLS with {registry}: {reason}",
        hint="use --plain-http for a registry without TLS",
    )


def _reason(error: BaseException) -> str:
    """The innermost thing that went wrong, without the addresses of Python objects."""
    seen = error
    while True:
        inner = seen.__cause__ or getattr(seen, "reason", None) or seen.__context__
        if not isinstance(inner, BaseException) or inner is seen:
            break
        seen = inner
    text = getattr(seen, "strerror", None) or str(seen)
    return str(text).rpartition(">: ")[2][:300]


def _mirrors(reference: Reference, connection: ClientOptions | None) -> Mirrors:
    """The mirrors that our config file names for the registry of ``reference``."""
    known = None if connection is None else connection.registries.get(reference.registry or "")
    if connection is None or known is None:
        return Mirrors((), trust_tags=False)
    sessions = []
    for mirror in known.mirrors:
        host, _, path = mirror.partition("/")
        there = Reference(host, f"{path}/{reference.repository}".lstrip("/"), "latest")
        sessions.append(Session(there, connection.to_mirror(host), is_mirror=True))
    return Mirrors(sessions, trust_tags=known.trust_tags)
