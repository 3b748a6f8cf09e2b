"""Authentication challenges of registries.

Tokens are cached until they expire, and only trusted hosts receive credentials (CVE-2025-51471,
CVE-2026-48978, CVE-2026-33990). Neither is true of oras-py, whose parser of challenges reads one of
several, and no unquoted parameters; it only makes the exchange (``registry/token_exchange.py``).

Source: distribution, "Token Authentication Specification".
"""

from __future__ import annotations

import datetime
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from clowder_aimage.errors import UnauthorizedError
from clowder_aimage.oci import Reference
from clowder_aimage.oci.reference import DOCKER_HUB
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.credential_trace import (
    OPTIONS,
    REQUEST,
    VARIABLE,
    CredentialTrace,
)
from clowder_aimage.registry.docker_config import (
    AuthSource,
    Credential,
    find_credential,
    may_have_credential,
    parse_source,
    read_source,
)
from clowder_aimage.registry.reach import Boundary, OutsideError

if TYPE_CHECKING:
    from clowder_aimage.registry.token_exchange import SendOnce, TokenExchange

# Seconds that a token without expires_in is valid.
_LIFE = 60.0
# Seconds before its end at which a token is renewed; at most a fifth of its life.
_MARGIN = 30.0
# Statuses by which a token service refuses credentials (RFC 6749, 5.2).
_REFUSED = frozenset({400, 401, 403})
_USUAL_REALMS = dict.fromkeys(DOCKER_HUB, "auth.docker.io") | {"registry.gitlab.com": "gitlab.com"}
_SCHEME = re.compile(r"(?:^|,)\s*([A-Za-z]+)(?=\s+[A-Za-z_]+\s*=|\s*$|\s*,)")
_QUOTED = r'"((?:[^"\\]|\\.)*)"'
_PARAMETER = re.compile(rf'(?<![A-Za-z_])([A-Za-z_]+)\s*=\s*(?:{_QUOTED}|([^\s",]+))')


@dataclass(frozen=True, slots=True)
class _Challenge:
    """The best challenge in a WWW-Authenticate header (RFC 9110, 11.6.1): Bearer before Basic."""

    scheme: str
    realm: str = ""
    service: str | None = None
    scope: str | None = None
    error: str = field(default="", compare=False)

    @classmethod
    def parse(cls, header: str) -> _Challenge:
        """Parse a header of one or several challenges."""
        # Strings are blanked: a scope may contain the name of a scheme.
        quoted = re.sub(_QUOTED, lambda match: "_" * len(match[0]), header)
        starts = [(match.start(1), match[1].lower()) for match in _SCHEME.finditer(quoted)]
        ends = [start for start, _ in starts[1:]] + [len(header)]
        offers = {
            scheme: header[start:end] for (start, scheme), end in zip(starts, ends, strict=False)
        }
        scheme = next((name for name in ("bearer", "basic") if name in offers), "")
        fields = {
            name.lower(): re.sub(r"\\(.)", r"\1", a) or b
            for name, a, b in _PARAMETER.findall(offers.get(scheme, ""))
        }
        realm, service, scope = fields.get("realm", ""), fields.get("service"), fields.get("scope")
        return cls(scheme, realm, service, scope, fields.get("error", ""))


@dataclass(frozen=True, slots=True)
class _Header:
    """A header for a challenge, valid until a time.

    ``place`` is that of the credentials that it has, or was issued for.
    """

    header: str = field(repr=False)
    challenge: _Challenge
    expires_at: float = float("inf")
    place: str = ""


class Authenticator:
    """Authorization headers for challenges, kept per set of scopes.

    Threads that need the same header at the same time share one exchange.
    """

    def __init__(
        self,
        reference: Reference,
        connection: ClientOptions,
        send: SendOnce,
        scheme: str,
        basic_auth: str | None,
        boundary: Boundary,
    ) -> None:
        self._reference, self._connection, self._scheme = reference, connection, scheme
        self._registry = reference.registry or ""
        self._boundary = boundary
        self._send = send
        self._lock = threading.RLock()
        self._headers: dict[str, _Header] = {}
        self._tokens: dict[tuple[_Challenge, frozenset[str]], _Header] = {}
        self.trace = CredentialTrace(reference.registry or "", connection.on_credential)
        self.is_explicit = basic_auth is not None or bool(connection.auths)
        self._credential = Credential(basic=basic_auth, place=OPTIONS) if basic_auth else None
        self._sources = [] if self._credential else list(_read_sources(connection, self.trace))
        # The challenge of /v2/, once it was requested.
        self._registry_challenge: _Challenge | None = None
        # True if offered credentials were refused.
        self._is_withdrawn = False

    def get_header(self, actions: str) -> str | None:
        """Return the header for ``actions`` (``pull,push``), renewed if it has expired, or None."""
        with self._lock:
            current = self._headers.get(actions)
            if current is not None and current.expires_at <= self._connection.clock():
                current = self._answer(actions, current.challenge)
            return None if current is None else current.header

    def answer(self, actions: str, challenge: str, refused: str | None) -> str:
        """Return a header for ``challenge`` other than the ``refused`` one.

        Raises UnauthorizedError: there are no credentials, or they are not accepted.
        """
        with self._lock:
            current = self._headers.get(actions)
            if current is not None and current.header != refused:
                # Another thread has already renewed it.
                return current.header
            parsed, credential = _Challenge.parse(challenge), self._find_credential()
            if parsed.scheme == "basic" and not credential.basic and current is not None:
                # Harbor challenges an expired token with Basic.
                parsed = current.challenge
            return self._answer(actions, parsed, refused).header

    def offer(
        self, actions: str, request_challenge: Callable[[], str], *, is_required: bool = False
    ) -> str | None:
        """Return a header that the registry did not ask for, or None without credentials.

        Many registries answer a request without credentials as if a private repository did not
        exist. ``request_challenge`` returns the challenge of ``/v2/``, or an empty one. If there is
        none, and the registry requires credentials, they are sent as Basic. Raises
        UnauthorizedError.
        """
        with self._lock:
            current = self._headers.get(actions)
            if current is not None:
                return current.header
            if self._is_withdrawn or not self._may_have_credential():
                return None
            if self._registry_challenge is None:
                # Its scope is another's: ghcr.io has that of an example.
                challenge = replace(_Challenge.parse(request_challenge()), scope=None)
                self._registry_challenge = challenge
            if is_required and not self._registry_challenge.scheme:
                self._registry_challenge = _Challenge("basic")
            if not self._registry_challenge.scheme:
                place = OPTIONS if self.is_explicit else "the stored credentials"
                self.trace.add(place, f"not sent, since {self._registry} did not ask for them")
                return None
            if self._find_credential().is_empty:
                return None
            try:
                return self._answer(actions, self._registry_challenge).header
            except UnauthorizedError:
                # This is not tried for each request.
                self._is_withdrawn = not self.is_explicit
                raise

    def withdraw(self, actions: str) -> None:
        """Make no more requests with the header of ``offer``: the registry answered 401 to it."""
        self.record_refusal(actions)
        with self._lock:
            self._is_withdrawn = True
            self._headers.pop(actions, None)

    def _may_have_credential(self) -> bool:
        """Return True unless it is clear without running a helper that there are none."""
        if self._credential is None and not may_have_credential(self._sources, self._registry):
            self._find_credential()
        return self._credential is None or not self._credential.is_empty

    def offer_basic(self, actions: str) -> None:
        """Use the given username and password without a challenge."""
        with self._lock:
            credential = self._find_credential()
            header = _Header(
                f"Basic {credential.basic}", _Challenge("basic"), place=credential.place
            )
            self._headers[actions] = header
            self.trace.send(credential.place)

    def record_refusal(self, actions: str, challenge: str = "") -> None:
        """Record that the registry answered 401 and ``challenge`` to the header for ``actions``."""
        with self._lock:
            header = self._headers.get(actions)
            if header is None or not header.place:
                return
            # RFC 6750, 3.1: the token is valid.
            if _Challenge.parse(challenge).error == "insufficient_scope":
                self.trace.deny(header.place)
            else:
                self.trace.refuse(header.place, 401)

    def _answer(self, actions: str, challenge: _Challenge, refused: str | None = None) -> _Header:
        credential = self._find_credential()
        if challenge.scheme == "basic" and credential.basic:
            renewed = _Header(f"Basic {credential.basic}", challenge, place=credential.place)
            self.trace.send(credential.place)
        elif challenge.scheme == "bearer" and credential.registry_token:
            renewed = _Header(
                f"Bearer {credential.registry_token}", challenge, place=credential.place
            )
            self.trace.send(credential.place)
            if refused == renewed.header:
                self.trace.refuse(credential.place, 401)
                raise self._build_unauthorized_error("the stored access token was rejected")
        elif challenge.scheme == "bearer":
            renewed = self._get_token(actions, challenge, refused)
        elif credential.is_empty:
            raise self._build_unauthorized_error("no credentials found")
        else:
            self.trace.add(credential.place, "of another kind than the registry asks for")
            raise self._build_unauthorized_error("no suitable credentials found")
        self._headers[actions] = renewed
        return renewed

    def _find_credential(self) -> Credential:
        # Read at the first challenge: helpers may be slow, and public content needs none.
        if self._credential is None:
            repository, query = self._reference.repository, self._connection.query_helper
            self._credential = (
                find_credential(self._sources, self._registry, repository, self.trace, query)
                or Credential()
            )
        return self._credential

    def _get_token(self, actions: str, challenge: _Challenge, refused: str | None) -> _Header:
        """Return a token for the scopes of a challenge, or else for ``actions``."""
        default = f"repository:{self._reference.repository}:{actions}" if actions else ""
        scopes = frozenset((challenge.scope or default).split())
        key = (challenge, scopes)
        token = self._tokens.get(key)
        if token is None or token.header == refused or token.expires_at <= self._connection.clock():
            is_read = actions == "pull" and not self.is_explicit
            token = self._tokens[key] = self._fetch(challenge, sorted(scopes), is_read=is_read)
        return token

    def _fetch(self, challenge: _Challenge, scopes: list[str], *, is_read: bool) -> _Header:
        """Request a token; without credentials if they are refused and it is to read."""
        realm = challenge.realm
        if not realm:
            raise self._build_unauthorized_error("the WWW-Authenticate challenge has no realm")
        host = self._parse_realm(realm)
        credential, requested_at = self._find_credential(), self._connection.clock()
        if not credential.is_empty and not self._is_trusted(host):
            self._withhold(credential, host)
            credential = Credential()
        token, exchange = self._exchange(challenge, scopes, credential)
        place = credential.place
        if not credential.is_empty and token is None and exchange.status in _REFUSED:
            status = exchange.status
            if is_read:
                token, exchange = self._exchange(challenge, scopes, Credential())
            self.trace.refuse(place, status, host, is_optional=token is not None)
            place = ""
        elif not credential.is_empty:
            self.trace.send(place, host)
        if token is None:
            reason = f"the token service {host} returned no token ({exchange.status})"
            raise self._build_unauthorized_error(reason)
        life = _compute_lifetime(exchange.fields, requested_at)
        expires_at = requested_at + life - min(_MARGIN, life / 5)
        return _Header(f"Bearer {token}", challenge, expires_at, place)

    def _exchange(
        self, challenge: _Challenge, scopes: list[str], credential: Credential
    ) -> tuple[str | None, TokenExchange]:
        """Return the token for a credential, or None if there is none, and the exchange."""
        # oras-py and requests: most registries in a private network require no token.
        from clowder_aimage.registry.token_exchange import TokenExchange

        exchange = TokenExchange(self._send)
        try:
            token = exchange.request_token(challenge.realm, challenge.service, scopes, credential)
        except ValueError:
            reason = f"its token service {challenge.realm[:100]!r} is not an address"
            raise self._build_unauthorized_error(reason) from None
        rotated = exchange.fields.get("refresh_token")
        if credential.identity_token and isinstance(rotated, str) and rotated:
            self._credential = replace(credential, identity_token=rotated)
        is_valid = isinstance(token, str) and re.fullmatch(r"[!-~]+", token)
        return (str(token) if is_valid else None), exchange

    def _parse_realm(self, realm: str) -> str:
        """Return the host of a token service that may be used. Raises UnauthorizedError."""
        parts = urlsplit(realm)
        host = (parts.hostname or "").lower()
        if parts.scheme not in ("http", "https") or not host:
            raise self._build_unauthorized_error(
                f"the token service URL {realm[:100]!r} is invalid"
            )
        credential = self._find_credential()
        if self._scheme == "https" and parts.scheme != "https":
            if not credential.is_empty:
                self.trace.add(credential.place, f"not sent to {host}, which does not use HTTPS")
            raise self._build_unauthorized_error(f"the token service {host} does not use HTTPS")
        try:
            self._boundary.check_name(host)
        except OutsideError:
            self._withhold(credential, host)
            raise self._build_unauthorized_error(
                f"the token service {host} is an internal address"
            ) from None
        return host

    def _is_trusted(self, host: str) -> bool:
        """Return True if the token service ``host`` may receive credentials."""
        registry = (urlsplit(f"//{self._registry}").hostname or "").lower()
        return host in (registry, _USUAL_REALMS.get(registry), *self._connection.trusted_realms)

    def _withhold(self, credential: Credential, host: str) -> None:
        realms = ",".join(sorted({*self._connection.trusted_realms, host}))
        place = "credentials" if credential.is_empty else credential.place
        self.trace.withhold(place, host, realms)

    def _build_unauthorized_error(self, reason: str) -> UnauthorizedError:
        return UnauthorizedError(
            f"{self._registry} requires authentication: {reason}",
            reason=reason,
            **self.trace.build_advice(remedy="login"),
        )


def _read_sources(connection: ClientOptions, trace: CredentialTrace) -> Iterator[AuthSource]:
    if connection.auths:
        yield AuthSource(REQUEST, {"auths": dict(connection.auths)})
    named = 1 if connection.auth_file is not None else 0
    yield from (read_source(path, trace) for path in connection.auth_files[:named])
    if text := connection.docker_auth_config:
        yield parse_source(VARIABLE, text, trace)
    yield from (read_source(path, trace) for path in connection.auth_files[named:])


def _compute_lifetime(fields: dict[str, Any], requested_at: float) -> float:
    """Return the lifetime of a token from ``requested_at`` in seconds, by the service's response.

    ``issued_at`` shortens that for a token issued earlier. It is ignored if it is in the future, or
    so old that the token has expired: then the clocks differ.
    """
    life = fields.get("expires_in")
    life = float(life) if isinstance(life, int | float) and 0 < life < 1e9 else _LIFE
    try:
        age = (
            requested_at - datetime.datetime.fromisoformat(fields.get("issued_at", "")).timestamp()
        )
    except (ValueError, TypeError, OverflowError):
        age = 0.0
    return life - age if 0 < age < life else life
