"""Requests to one repository, authenticated."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urljoin, urlsplit, urlunsplit

import urllib3

from clowder_aimage.content.parallel import ParallelStoppedError
from clowder_aimage.errors import RegistryError, UnauthorizedError
from clowder_aimage.oci import Digest, Reference
from clowder_aimage.registry.auth import Authenticator
from clowder_aimage.registry.client_options import ClientOptions, open_session
from clowder_aimage.registry.mirror import Mirrors
from clowder_aimage.registry.response import RegistryResponse
from clowder_aimage.registry.response_error import failure
from clowder_aimage.registry.retry import BrokenOffError, Pause
from clowder_aimage.registry.transport import Transport, origin

CONNECT_TIMEOUT = 3.0  # seconds; per address of the host
FIRST_READ_TIMEOUT = 6.0  # a registry that is down is detected within ten seconds
READ_TIMEOUT = 60.0
_DOCKER_HUB = "registry-1.docker.io"


class CredentialsExpiredError(BrokenOffError, UnauthorizedError):
    """A 401 to a body that must be opened again: worth another attempt, with new credentials."""


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
        scheme = "http" if plain else "https"
        host = _DOCKER_HUB if self._registry == "docker.io" else self._registry
        self.base = f"{scheme}://{host}"
        self._http = open_session(connection, host)
        self._closed = threading.Event()
        self._pause = Pause(connection.clock, connection.sleep or self._closed.wait)
        self._http.hooks["response"].append(self._pause.observe)
        self._transport = Transport(self._http, self._registry)
        known = connection.registries.get(self._registry)
        self.chunk = known.chunk_size if known else 0  # bytes a request may carry; 0: any
        timeout = (CONNECT_TIMEOUT, FIRST_READ_TIMEOUT)
        self._auth = Authenticator(reference, connection, self._http, timeout, scheme, basic_auth)

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
        """Close all connections; a thread that still runs opens no new ones."""
        self._closed.set()
        self._mirrors.close()
        self._http.close()

    def distrust(self, digest: Digest) -> bool:
        """Exclude the mirrors that sent wrong content for ``digest``.

        Returns:
            whether there are any: then it is worth requesting it again.
        """
        return self._mirrors.distrust(str(digest))

    def was_mirrored(self, digest: Digest) -> bool:
        """Return whether the content of ``digest`` came from a mirror."""
        return self._mirrors.sent(str(digest))

    def avoid_mirrors(self, digest: Digest) -> None:
        """Exclude the mirrors whose content of ``digest`` breaks off."""
        self._mirrors.avoid(str(digest))

    def url(self, path: str) -> str:
        """Return the URL of a path below ``/v2/<repository>/``."""
        return f"{self.base}/v2/{self._reference.repository}/{path}"

    def join(self, location: str, base: str) -> str:
        """Return the URL of a Location header, which may be relative (RFC 9110, 10.2.2).

        A registry behind a proxy that terminates TLS may name itself with http; it is still
        reached by https. Content is never sent to another host without TLS.

        Raises:
            RegistryError: it would be, or the location is invalid.
        """
        try:
            url = urljoin(base, location)
            old, new = urlsplit(base), urlsplit(url)
            origin(url)
        except ValueError:
            raise RegistryError(
                f"{self._registry} sent the invalid address {location[:200]!r}"
            ) from None
        if old.scheme == "https" and new.scheme != "https":
            if old.hostname != new.hostname:
                raise RegistryError(
                    f"{self._registry} sends uploads to {new.hostname} without encryption"
                )
            return urlunsplit(new._replace(scheme="https", netloc=old.netloc))
        return url

    def ping(self) -> None:
        """Check that the registry answers and accepts our credentials (distribution-spec, end-1).

        Raises:
            AImageError: it does not.
        """
        response = self.request("GET", f"{self.base}/v2/")
        if response.status_code != 200:
            raise failure(response, "a request")
        response.finish()

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        read_timeout: float = READ_TIMEOUT,
        actions: str | None = None,
    ) -> RegistryResponse:
        """Send a request; the response's status and body are the caller's to read.

        ``actions`` are the permissions that it needs, by default those of the method. A 401 is
        answered once with new credentials. A ``body`` that is not bytes cannot be sent twice: then
        the error is transient, and the caller begins again.

        Raises:
            NetworkError: no response.
            UnauthorizedError: the registry's challenge cannot be answered.
        """
        path = url.removeprefix(self.url(""))
        found = self._mirrors.request(method, path, headers, read_timeout)
        if found is not None:
            return found
        if actions is None:
            actions = "pull" if method in ("GET", "HEAD") else "pull,push"
        if url == f"{self.base}/v2/":
            actions = ""  # a request to the registry, not to a repository in it
        is_ours = origin(url) == origin(self.base)
        header = self._auth.known(actions) if is_ours else None
        response = self._send(method, url, headers, body, header, read_timeout)
        challenge = response.headers.get("WWW-Authenticate", "")
        is_challenge = response.status_code == 401 and challenge and not response.is_redirected
        if not is_ours or not is_challenge:
            return response
        response.finish()
        header = self._auth.answer(actions, challenge, header)
        if body is not None and not isinstance(body, bytes):
            raise CredentialsExpiredError(
                f"{self._registry} requires other credentials during an upload",
                remedy="login",
                registry=self._registry,
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
    ) -> RegistryResponse:
        self._pause.wait()
        if self._closed.is_set():
            raise ParallelStoppedError
        sent = {"Accept-Encoding": "identity", **(headers or {})}
        if authorization:
            sent["Authorization"] = authorization
        is_first = body is None and not self._transport.has_answered
        read = min(FIRST_READ_TIMEOUT if is_first else math.inf, read_timeout)
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT, read=read)
        response = self._transport.send(method, url, sent, body, timeout=timeout)
        self._pause.observe(response)
        if self._closed.is_set():
            response.close()
            self._http.close()
        return response


def _mirrors(reference: Reference, connection: ClientOptions | None) -> Mirrors:
    """Open the mirrors that the config file names for the registry of ``reference``."""
    known = None if connection is None else connection.registries.get(reference.registry or "")
    if connection is None or known is None:
        return Mirrors((), trust_tags=False)
    sessions = []
    for mirror in known.mirrors:
        host, _, path = mirror.partition("/")
        there = Reference(host, f"{path}/{reference.repository}".lstrip("/"), "latest")
        sessions.append(Session(there, connection.to_mirror(host), is_mirror=True))
    return Mirrors(sessions, trust_tags=known.trust_tags)
