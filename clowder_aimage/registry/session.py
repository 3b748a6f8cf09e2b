"""Authenticated requests to one repository, and to its mirrors."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urljoin, urlsplit, urlunsplit
from weakref import WeakSet

import urllib3
from urllib3 import HTTPHeaderDict

from clowder_aimage.content.parallel import ParallelStoppedError
from clowder_aimage.errors import AImageError, RegistryError, UnauthorizedError, VerificationError
from clowder_aimage.oci import Digest, Reference, mediatype
from clowder_aimage.oci.reference import DOCKER_HUB
from clowder_aimage.registry.auth import Authenticator
from clowder_aimage.registry.client_options import ClientOptions, open_pools
from clowder_aimage.registry.credential_trace import CredentialTrace
from clowder_aimage.registry.overload import OVERLOAD_STATUS, read_pause
from clowder_aimage.registry.pace import FIRST_PATIENCE, Pace
from clowder_aimage.registry.reach import is_same_host
from clowder_aimage.registry.response import RegistryResponse, build_response_error, read_document
from clowder_aimage.registry.retry import (
    LONGEST_PAUSE,
    TRANSIENT_STATUS,
    BrokenOffError,
    RequestDeferredError,
)
from clowder_aimage.registry.transport import Transport, parse_origin
from clowder_aimage.registry.upload_transport import UploadTransport
from clowder_aimage.registry.url_refusals import UrlRefusals

# Seconds for each address of the host.
CONNECT_TIMEOUT = 3.0
# Seconds. A registry that is down is detected within ten seconds.
FIRST_READ_TIMEOUT = 6.0
READ_TIMEOUT = 60.0
# Seconds of refusals after which a user reads why nothing happens.
_SILENCE = 4.0
ACCEPT = ", ".join(sorted(mediatype.DOCUMENTS))
_DOCKER_HUB = "registry-1.docker.io"
_log = logging.getLogger("aimage.registry")
# GitHub refuses with 403.
_REFUSALS = TRANSIENT_STATUS | {403}
_DIGEST = re.compile(r"sha(?:256|512):[0-9a-f]+")
# A path with a query, and without segments that are dots, as most registries send locations.
_PLAIN_PATH = re.compile(r"(?:/[0-9A-Za-z_-][!$-.0->@-~]*)+(?:\?[!$->@-~]*)?")


class CredentialsExpiredError(BrokenOffError, UnauthorizedError):
    """A 401 for a body that must be reopened: the retry uses new credentials."""


class Session(AbstractContextManager["Session"]):
    """Requests to the repository of ``reference``, authenticated as required."""

    def __init__(
        self,
        reference: Reference,
        connection: ClientOptions,
        *,
        basic_auth: str | None = None,
        is_mirror: bool = False,
    ) -> None:
        reference = self._reference = reference.canonical
        self._registry = reference.registry or ""
        self.mirrors = Mirrors() if is_mirror else _open_mirrors(reference, connection)
        connection = connection.to(self._registry)
        scheme = "http" if connection.uses_http(self._registry) else "https"
        host = _DOCKER_HUB if self._registry in DOCKER_HUB else self._registry
        self.base = f"{scheme}://{host}"
        self._pools = open_pools(connection, host)
        self._closed = threading.Event()
        self._clock, self._sleep = connection.clock, connection.sleep or self._closed.wait
        # Nothing waits for a mirror: there is the registry.
        self._pace = Pace() if is_mirror else connection.paces.get(host)
        self._url_refusals = UrlRefusals()
        # The last successful request of each kind, without a body.
        self._accepted: dict[str, Callable[[], RegistryResponse]] = {}
        self._has_warned = False
        self._is_mirror = is_mirror
        self._lock = threading.Lock()
        # The threads that send requests, and the responses that may still arrive.
        self._sending: set[int] = set()
        self._responses: WeakSet[RegistryResponse] = WeakSet()
        self._later_patience = connection.patience
        self._patience = min(FIRST_PATIENCE, self._later_patience)
        self._on_exchange = connection.on_exchange
        self._transport = Transport(
            self._pools,
            self._registry,
            own_headers=(self.base, connection.headers),
            on_exchange=self._on_exchange,
        )
        # None while it is not known.
        self.has_referrers_api: bool | None = None
        # True if HEAD requests for blobs are refused.
        self.refuses_head = False
        # The most bytes of a request, 0 for any number.
        self.chunk = connection.find_host_settings(self._registry).chunk_size
        # The only method that is accepted for the bytes of blobs, if one was refused.
        self.upload_method = ""
        self._elsewhere = UploadTransport(connection, host, self._registry)
        basic = basic_auth or connection.basic_auth
        self._auth = Authenticator(
            reference, connection, self._send_once, scheme, basic, self._pools.boundary
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; running threads cannot open new ones."""
        self._closed.set()
        self.mirrors.close()
        self._pools.close()
        self._elsewhere.close()

    def build_url(self, path: str) -> str:
        """Return the URL of a path below ``/v2/<repository>/``."""
        return f"{self.base}/v2/{self._reference.repository}/{path}"

    @property
    def repository(self) -> str:
        """The name of the repository, without the registry."""
        return self._reference.repository

    @property
    def catalog(self) -> str:
        """The URL of the list of all repositories."""
        return f"{self.base}/v2/_catalog"

    def join(self, location: str, base: str) -> str:
        """Return the URL of an absolute or relative Location header (RFC 9110, 10.2.2).

        A registry behind a proxy that terminates TLS may return http URLs: these are changed to
        https. Raises RegistryError.
        """
        try:
            url = urljoin(base, location)
            old, new = urlsplit(base), urlsplit(url)
            parse_origin(url)
        except ValueError:
            raise RegistryError(
                f"{self._registry} sent the invalid URL {location[:200]!r}"
            ) from None
        if old.scheme == "https" and new.scheme != "https":
            if old.hostname != new.hostname:
                raise RegistryError(f"{self._registry} sends uploads to {new.hostname} without TLS")
            return urlunsplit(new._replace(scheme="https", netloc=old.netloc))
        return url

    def join_upload(self, location: str, base: str) -> str:
        """Return the URL of the Location header of an upload.

        It is at the registry's own origin, or at a host that may receive uploads. Raises
        RegistryError, or OutsideError.
        """
        path = location.removeprefix(self.base)
        if base.startswith(f"{self.base}/") and _PLAIN_PATH.fullmatch(path):
            return self.base + path
        url = self.join(location, base)
        scheme, host, port = parse_origin(url)
        own_scheme, own_host, own_port = parse_origin(self.base)
        if (scheme, port) == (own_scheme, own_port) and is_same_host(host, own_host):
            return urlunsplit(urlsplit(url)._replace(netloc=urlsplit(self.base).netloc))
        self._elsewhere.check(scheme, host, port)
        return url

    def _is_own(self, url: str) -> bool:
        """Return True for a URL of the registry's origin."""
        return url.startswith(f"{self.base}/") or parse_origin(url) == parse_origin(self.base)

    @property
    def credentials(self) -> CredentialTrace:
        """The record of the credentials for the repository."""
        return self._auth.trace

    def ping(self, *, with_basic: bool = False) -> None:
        """Request the registry's endpoint (end-1). Raises AImageError for a status but 200 and 401.

        ``with_basic`` sends the given username and password without a challenge.
        """
        if with_basic:
            self._auth.offer_basic("")
        response = self.request("GET", f"{self.base}/v2/")
        if response.status_code not in (200, 401):
            raise build_response_error(response, "the endpoint /v2/")
        response.finish()

    def get(self, url: str, accept: str, resource: str) -> tuple[bytes, RegistryResponse]:
        """Return a document, up to MAX_MANIFEST_SIZE, and its response. Raises AImageError."""
        response = self.request("GET", url, headers={"Accept": accept})
        return read_document(response, resource), response

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        read_timeout: float = READ_TIMEOUT,
        actions: str | None = None,
        mirrored: bool = True,
    ) -> RegistryResponse:
        """Send a request; the caller handles the response's status and body.

        Mirrors may answer it unless ``mirrored`` is off.

        ``actions`` are the permissions that it needs, by default those of the method. A 401 is
        answered once with new credentials. A ``body`` that is not bytes cannot be sent twice: then
        the error is transient, and the caller retries.

        Raises NetworkError without a response, UnauthorizedError without credentials.
        """
        path = url.removeprefix(self.build_url(""))
        answer = self.mirrors.request(method, path, headers, read_timeout) if mirrored else None
        if answer is not None:
            return answer
        if actions is None:
            actions = "pull" if method in ("GET", "HEAD") else "pull,push"
        if url in (f"{self.base}/v2/", self.catalog):
            # The registry itself requires no permission for a repository.
            actions = ""
        is_ours = self._is_own(url)
        sent = {"Accept-Encoding": "identity", **(headers or {})}
        if not is_ours:
            response = self._send(self._elsewhere.open(), method, url, sent, body, read_timeout)
            return self._record(response, actions)
        is_endpoint = url == f"{self.base}/v2/"
        header = self._get_header(actions, may_offer=not is_endpoint)
        if header:
            sent["Authorization"] = header
        response = self._send(self._transport, method, url, sent, body, read_timeout)
        may_offer = header is None and not is_endpoint
        renewed = self._answer(response, actions, header, may_offer=may_offer)
        is_stream = body is not None and not isinstance(body, bytes)
        if renewed is None or (renewed == header and not is_stream):
            return self._record(response, actions)
        sent["Authorization"] = renewed
        if is_stream:
            response.finish()
            raise CredentialsExpiredError(
                f"{self._registry} rejected the credentials during an upload",
                **self._auth.trace.build_advice(remedy="login"),
            )
        repeated = self._send(self._transport, method, url, sent, body, read_timeout)
        if repeated.status_code == 401 != response.status_code and not self._auth.is_explicit:
            # The content may be public: the refused credentials change nothing.
            self._auth.withdraw(actions)
            response, repeated = repeated, response
        response.finish()
        return self._record(repeated, actions)

    def _record(self, response: RegistryResponse, actions: str) -> RegistryResponse:
        """Return a final response, with the record of the credentials for it."""
        response.credentials = trace = self._auth.trace
        if self._is_own(response.url):
            if response.status_code == 401:
                challenge = response.headers.get("WWW-Authenticate", "")
                self._auth.record_refusal(actions, challenge)
        elif response.status_code in (401, 403, 404):
            trace.add(response.host, "gets no credentials, since it is another host")
        return response

    def _get_header(self, actions: str, *, may_offer: bool) -> str | None:
        """Return the header of a request; credentials of the caller need no challenge to it."""
        header = self._auth.get_header(actions)
        if header is None and may_offer and self._auth.is_explicit:
            header = self._auth.offer(actions, self._request_challenge)
        return header

    def _answer(
        self, response: RegistryResponse, actions: str, header: str | None, *, may_offer: bool
    ) -> str | None:
        """Return a header with which a request is repeated, or None: its response is final.

        A registry may answer 403 or 404 to a request without credentials. Raises UnauthorizedError.
        """
        if response.is_redirected:
            return None
        challenge = response.headers.get("WWW-Authenticate", "")
        if response.status_code == 401 and challenge:
            try:
                return self._auth.answer(actions, challenge, header)
            except AImageError:
                response.finish()
                raise
        if response.status_code not in (401, 403, 404) or not may_offer:
            return None
        # The trace has the reason.
        with contextlib.suppress(UnauthorizedError):
            is_required = response.status_code == 401
            return self._auth.offer(actions, self._request_challenge, is_required=is_required)
        return None

    def _request_challenge(self) -> str:
        """Return the challenge of /v2/, or an empty one."""
        url, headers = f"{self.base}/v2/", {"Accept-Encoding": "identity"}
        try:
            response = self._send(self._transport, "GET", url, headers, None, READ_TIMEOUT)
        except AImageError:
            return ""
        response.finish()
        # Some registries send the challenge with another status than 401.
        is_refused = response.status_code in (401, 403, 404) and not response.is_redirected
        return response.headers.get("WWW-Authenticate", "") if is_refused else ""

    def _send(
        self,
        transport: Transport,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Any,
        read_timeout: float,
    ) -> RegistryResponse:
        is_first = body is None and not transport.has_answered
        read = min(FIRST_READ_TIMEOUT if is_first else math.inf, read_timeout)
        timeout = _build_timeout(read)
        send = partial(transport.send, method, url, headers, body, timeout=timeout)
        return self._send_paced(method, url, body, send)

    def _send_once(
        self, method: str, url: str, headers: Mapping[str, str], body: Any
    ) -> RegistryResponse:
        """Send a request to a token service."""
        name = urlsplit(url).hostname or url
        report = self._on_exchange
        transport = Transport(self._pools, name, has_answered=True, on_exchange=report)
        timeout = _build_timeout(FIRST_READ_TIMEOUT)
        send = partial(transport.send, method, url, headers, body, timeout=timeout, max_redirects=0)
        return self._send_paced("token", url, body, send)

    def _send_paced(
        self, kind: str, url: str, body: Any, send: Callable[[], RegistryResponse]
    ) -> RegistryResponse:
        """Send a request of a kind at the pace of the registry, until that does not refuse it.

        Return a refusal if the registry asks for a longer pause, or accepts no request of this kind
        for too long, or only others. Raises RequestDeferredError: a refused body must be opened
        again.
        """
        while True:
            sent_at = self._wait_for_turn()
            response = self._track(send)
            if self._closed.is_set():
                response.close()
                self._pools.close()
                self._elsewhere.close()
            if not self._is_refusal(response):
                self._pace.record_success(kind, sent_at)
                self._url_refusals.record_success(kind, url)
                if body is None and response.status_code < 400:
                    self._accepted[kind] = send
                self._watch(response)
                if response.status_code != 401 and kind != "token":
                    self._patience = self._later_patience
                return response
            # After a HEAD there is another way, by GET; after a list of referrers, by tag.
            has_other_way = kind == "HEAD" or "/referrers/" in url
            patience = min(self._patience, FIRST_PATIENCE) if has_other_way else self._patience
            longest = max(LONGEST_PAUSE, patience)
            after = 0.0 if response.retry_after > longest else response.retry_after
            now = self._clock()
            refused = self._pace.record_refusal(kind, sent_at, now, after)
            here = self._url_refusals.record_refusal(kind, url, now)
            is_vain = refused > patience or here.is_hopeless
            is_stuck = is_vain and not self._is_transferring()
            if response.retry_after > longest or is_stuck or self._is_mirror:
                return response
            response.finish()
            if here.seconds > _SILENCE:
                self._warn_once(response)
            if here.seconds > FIRST_PATIENCE and not here.is_compared:
                here.rounds += self._is_accepting(kind)
            if not isinstance(body, bytes | str | None):
                raise RequestDeferredError(
                    f"{self._registry} limits the requests of an upload",
                    is_unread=response.status_code == 429,
                )

    def _watch(self, response: RegistryResponse) -> None:
        """Remember a response whose body may still arrive."""
        if response.is_open:
            with self._lock:
                self._responses.add(response)

    def _warn_once(self, response: RegistryResponse) -> None:
        if not self._has_warned:
            self._has_warned = True
            path = urlsplit(response.url).path
            fields = {"registry": self._registry, "status": response.status_code, "path": path}
            text = "waiting for %(registry)s, which answers %(status)s to requests for %(path)s"
            _log.warning(text, fields, extra=fields)

    def _is_accepting(self, kind: str) -> bool:
        """Send a successful request again, which tells a quota from an endpoint that fails."""
        if (send := self._accepted.get(kind)) is None:
            return False
        try:
            response = self._track(send)
        except AImageError:
            return False
        response.finish()
        return not self._is_refusal(response)

    def _track(self, send: Callable[[], RegistryResponse]) -> RegistryResponse:
        """Send a request, and remember that it is being sent."""
        thread = threading.get_ident()
        with self._lock:
            self._sending.add(thread)
        try:
            return send()
        finally:
            with self._lock:
                self._sending.discard(thread)

    def _is_transferring(self) -> bool:
        """Return True while other threads send requests or receive bodies."""
        with self._lock:
            return bool(self._sending) or any(response.is_open for response in self._responses)

    def _wait_for_turn(self) -> float:
        """Wait until a request may be sent, and return the time."""
        while (wait := self._pace.claim(timestamp := self._clock())) > 0:
            self._sleep(wait)
            if self._closed.is_set():
                raise ParallelStoppedError
        if self._closed.is_set():
            raise ParallelStoppedError
        return timestamp

    def _is_refusal(self, response: RegistryResponse) -> bool:
        """Return True for an answer that asks to send the request later, and read the time."""
        if response.status_code not in _REFUSALS:
            return False
        response.retry_after = read_pause(response.headers, self._clock())
        return response.status_code in OVERLOAD_STATUS or response.retry_after > 0


@functools.lru_cache(maxsize=64)
def _build_timeout(read: float) -> urllib3.Timeout:
    return urllib3.Timeout(connect=CONNECT_TIMEOUT, read=read)


class Mirrors:
    """Other registries that are tried first for content by digest.

    A mirror that fails or sends wrong content is not used again; one without the content is.
    Nothing is pushed to mirrors, and HEAD requests are sent to the registry only.
    """

    def __init__(self, sessions: Sequence[Session] = (), *, trust_tags: bool = False) -> None:
        self._sessions = sessions
        self._trusts_tags = trust_tags
        self._failed: set[Session] = set()
        # The mirrors that sent each target.
        self._sent: dict[str, set[Session]] = {}

    def close(self) -> None:
        for session in self._sessions:
            session.close()

    def avoid(self, digest: Digest) -> None:
        """Exclude mirrors that break off while sending ``digest``."""
        self._failed |= self._sent.get(str(digest), set())

    def invalidate(self, digest: Digest) -> bool:
        """Exclude the mirrors that sent wrong content for ``digest``; return True if any did."""
        senders = self._sent.pop(str(digest), set())
        self._failed |= senders
        return bool(senders)

    def has_sent(self, digest: Digest) -> bool:
        """Return True if the content of ``digest`` came from a mirror."""
        return bool(self._sent.get(str(digest)))

    def request(
        self, method: str, path: str, headers: Mapping[str, str] | None, read_timeout: float
    ) -> RegistryResponse | None:
        """Return the response of the first mirror that has ``path``, or None."""
        kind, _, target = path.partition("/")
        if method not in ("GET", "HEAD"):
            # After a push the mirrors are outdated.
            self._trusts_tags = False
        if method != "GET":
            return None
        is_digest = _DIGEST.fullmatch(target) is not None
        if kind not in ("manifests", "blobs") or not (is_digest or self._trusts_tags):
            return None
        for session in self._sessions:
            if session in self._failed:
                continue
            try:
                url = session.build_url(path)
                response = session.request("GET", url, headers=headers, read_timeout=read_timeout)
                if response.status_code == 304:
                    return response
                if response.status_code in (200, 203, 206):
                    self._sent.setdefault(target, set()).add(session)
                    return _verify_manifest(response, target) if kind == "manifests" else response
                response.finish()
                if response.status_code == 404:
                    continue
            except AImageError:
                # If the session is closed, the request to the registry raises.
                pass
            self._failed.add(session)
        return None


def _verify_manifest(response: RegistryResponse, target: str) -> RegistryResponse:
    """Read a mirror's manifest, and verify it if ``target`` is a digest."""
    raw = read_document(response, f"manifest {target}")
    if _DIGEST.fullmatch(target):
        digest = Digest.parse(target)
        if Digest.of(raw, digest.algorithm) != digest:
            raise VerificationError(f"a mirror sent wrong content for {target}")
    body = urllib3.HTTPResponse(io.BytesIO(raw), preload_content=False)
    headers = {
        name: value
        for name, value in response.headers.items()
        if name.lower() != "content-encoding"
    }
    return replace(response, raw=body, headers=HTTPHeaderDict(headers), decoder=None)


def _open_mirrors(reference: Reference, connection: ClientOptions) -> Mirrors:
    """Open the configured mirrors of the registry of ``reference``."""
    settings = connection.find_host_settings(reference.registry)
    sessions = []
    for mirror in settings.mirrors:
        host, _, path = mirror.partition("/")
        mirror_reference = Reference(host, f"{path}/{reference.repository}".lstrip("/"), "latest")
        sessions.append(Session(mirror_reference, connection.to_mirror(host), is_mirror=True))
    return Mirrors(sessions, trust_tags=settings.trust_tags)
