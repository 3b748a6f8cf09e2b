"""One connection pool to one repository; the only place for requests and oras-py."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urljoin, urlsplit, urlunsplit

import requests
import requests.adapters
import urllib3
import urllib3.exceptions

from clowder_aimage.content.parallel import StoppedError
from clowder_aimage.errors import AImageError, NetworkError, RegistryError
from clowder_aimage.oci import Reference
from clowder_aimage.registry.answer import failure, finish
from clowder_aimage.registry.auth import Authenticator
from clowder_aimage.registry.connection import Connection
from clowder_aimage.registry.retry import BrokenOffError

CONNECT_TIMEOUT = 3.0  # seconds; per address of the host
FIRST_READ_TIMEOUT = 6.0  # a registry that is down is told from a slow one within ten
READ_TIMEOUT = 60.0
_BLOCK_SIZE = 1024 * 1024
_DOCKER_HUB = "registry-1.docker.io"


class _Requests(requests.Session):
    """requests, without its habits that surprise: netrc and redirects hand credentials around,
    ``REQUESTS_CA_BUNDLE`` beats what the command line says, and loopback goes through a proxy.
    """

    def merge_environment_settings(
        self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any
    ) -> Any:
        """The environment's proxies and CA file, below what this session was told."""
        if _is_loopback(str(url)):
            return {"proxies": {}, "stream": stream, "verify": self.verify, "cert": cert}
        settings = super().merge_environment_settings(url, proxies, stream, verify, cert)
        return settings if self.verify is True else settings | {"verify": self.verify}

    def rebuild_auth(
        self, prepared_request: requests.PreparedRequest, response: requests.Response
    ) -> None:
        """Drop Authorization when a redirect leaves the origin; never go from https to http."""
        old, new = urlsplit(response.request.url or ""), urlsplit(prepared_request.url or "")
        if old.scheme == "https" and new.scheme != "https":
            raise requests.exceptions.InvalidSchema("redirected from https to http")
        if origin(str(response.request.url)) != origin(str(prepared_request.url)):
            prepared_request.headers.pop("Authorization", None)


def _unchanged(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """An ``auth`` that adds nothing: its presence keeps netrc out."""
    return request


class _Adapter(requests.adapters.HTTPAdapter):
    """Connections that write request bodies in large blocks (urllib3's default is 16 KiB)."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, blocksize=_BLOCK_SIZE, **kwargs)

    def close(self) -> None:
        """Close the connections now; urllib3 leaves that to the garbage collector."""
        pools = self.poolmanager.pools
        for key in pools.keys():  # noqa: SIM118 - it is no mapping
            pools[key].close()
        super().close()


def _is_loopback(url: str) -> bool:
    return Reference(urlsplit(url).netloc, "x").is_loopback


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of a URL: what credentials belong to."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return parts.scheme, (parts.hostname or "").lower(), port


class Session:
    """Requests to the repository of ``reference``, authenticated as the registry asks."""

    def __init__(
        self, reference: Reference, connection: Connection, *, basic_auth: str | None = None
    ) -> None:
        self._reference = reference
        self._registry = reference.registry or ""
        plain = connection.plain_http or reference.is_loopback
        self._scheme = "http" if plain else "https"
        host = _DOCKER_HUB if self._registry == "docker.io" else self._registry
        self.base = f"{self._scheme}://{host}"
        self._http = _session(connection)
        self._first_read_timeout = FIRST_READ_TIMEOUT
        self._headers: dict[str, str] = {}
        self._closed = False
        self._lock = threading.Lock()
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
        self._closed = True
        self._http.close()

    def _is_closed(self) -> bool:
        return self._closed

    def url(self, path: str) -> str:
        """The URL of a path below ``/v2/<repository>/``."""
        return f"{self.base}/v2/{self._reference.repository}/{path}"

    def join(self, location: str, base: str) -> str:
        """The URL that a Location header means. It may be relative (RFC 9110, 10.2.2).

        A registry behind a proxy may call itself http where it was reached by https; it is still
        reached by https. Content never goes to another host in the clear.

        Raises:
            RegistryError: it would.
        """
        url = urljoin(base, location)
        old, new = urlsplit(base), urlsplit(url)
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
    ) -> requests.Response:
        """Send a request; the answer's body is not read yet, its status not judged.

        A 401 is answered once with fresh credentials. A ``body`` that is not bytes cannot be sent
        twice: then the 401 comes back as BrokenOffError, and the caller begins again.

        Raises:
            NetworkError: no answer.
            UnauthorizedError: the registry's challenge cannot be answered.
        """
        direction = "pull" if method in ("GET", "HEAD") else "push"
        ours = origin(url) == origin(self.base)
        header = self._headers.get(direction) if ours else None
        response = self._send(method, url, headers, body, header, read_timeout)
        challenge = response.headers.get("WWW-Authenticate", "")
        if response.status_code != 401 or not ours or not challenge or response.history:
            return response
        finish(response)
        header = self._authorise(direction, challenge, header)
        if body is not None and not isinstance(body, bytes):
            raise BrokenOffError(f"{self._registry} asked for credentials in an upload")
        return self._send(method, url, headers, body, header, read_timeout)

    def _authorise(self, direction: str, challenge: str, stale: str | None) -> str:
        """Credentials for a challenge; threads that failed together share one exchange."""
        with self._lock:
            known = self._headers.get(direction)
            if known and known != stale:
                return known
            header = self._wrapped(lambda: self._auth.header(challenge))
            self._headers[direction] = header
            return str(header)

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        body: Any,
        authorization: str | None,
        read_timeout: float,
    ) -> requests.Response:
        if self._is_closed():
            raise StoppedError
        sent = {"Accept-Encoding": "identity", **(headers or {})}
        if authorization:
            sent["Authorization"] = authorization
        response: requests.Response = self._wrapped(
            lambda: self._http.request(
                method,
                url,
                headers=sent,
                data=body,
                stream=True,
                timeout=(CONNECT_TIMEOUT, min(self._first_read_timeout, read_timeout)),
                allow_redirects=method in ("GET", "HEAD"),
            )
        )
        self._first_read_timeout = math.inf
        if self._is_closed():
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
            raise NetworkError(
                f"cannot trust the certificate of {self._registry}: {_reason(error)}",
                hint="name your organisation's CA with --ca-file, or use --plain-http for a "
                "registry without TLS",
            ) from error
        except requests.exceptions.ConnectTimeout as error:
            raise NetworkError(
                f"{self._registry} does not answer", hint="check the host, the port and the network"
            ) from error
        except requests.exceptions.ReadTimeout as error:
            raise NetworkError(
                f"{self._registry} accepts connections but does not answer",
                hint="the registry may be overloaded; try again later",
            ) from error
        except requests.exceptions.ConnectionError as error:
            raise self._connection_error(error) from error
        except requests.exceptions.RequestException as error:
            raise NetworkError(f"cannot talk to {self._registry}: {_reason(error)}") from error

    def _connection_error(self, error: requests.exceptions.ConnectionError) -> NetworkError:
        reason = _reason(error)
        if any(word in reason for word in ("reset", "aborted", "Broken pipe", "disconnected")):
            return BrokenOffError(
                f"the connection to {self._registry} broke off ({reason})", hint="try again"
            )
        return NetworkError(
            f"cannot reach {self._registry}: {reason}",
            hint="check the host and the port, and that the registry is running",
        )


def _session(connection: Connection) -> _Requests:
    session = _Requests()
    session.auth = _unchanged
    session.headers["User-Agent"] = connection.user_agent
    session.verify = not connection.insecure
    if connection.insecure:  # said by whoever chose it; urllib3 would say it with our paths
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    elif connection.ca_file is not None:
        session.verify = str(connection.ca_file)
    size = connection.pool_size
    session.mount("https://", _Adapter(pool_connections=4, pool_maxsize=size))
    session.mount("http://", _Adapter(pool_connections=4, pool_maxsize=size))
    return session


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
