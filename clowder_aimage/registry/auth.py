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
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from clowder_aimage.errors import UnauthorizedError
from clowder_aimage.oci import Reference
from clowder_aimage.oci.reference import DOCKER_HUB
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.docker_config import (
    Credential,
    find_credential,
    read_config,
)
from clowder_aimage.registry.reach import Boundary, OutsideError
from clowder_aimage.registry.token_exchange import SendOnce, TokenExchange

# Seconds that a token without expires_in is valid.
_LIFE = 60.0
# Seconds before its end at which a token is renewed; at most a fifth of its life.
_MARGIN = 30.0
_USUAL_REALMS = dict.fromkeys(DOCKER_HUB, "auth.docker.io") | {"registry.gitlab.com": "gitlab.com"}
_SCHEME = re.compile(r"(?:^|,)\s*([A-Za-z]+)(?=\s+[A-Za-z_]+\s*=|\s*$|\s*,)")
_PARAMETER = re.compile(r'(?<![A-Za-z_])([A-Za-z_]+)\s*=\s*(?:"([^"]*)"|([^\s",]+))')


@dataclass(frozen=True, slots=True)
class _Challenge:
    """The best challenge in a WWW-Authenticate header (RFC 9110, 11.6.1): Bearer before Basic."""

    scheme: str
    realm: str = ""
    service: str | None = None
    scope: str | None = None

    @classmethod
    def parse(cls, header: str) -> _Challenge:
        """Parse a header of one or several challenges."""
        # Strings are blanked: a scope may contain the name of a scheme.
        quoted = re.sub(r'"[^"]*"', lambda match: "_" * len(match[0]), header)
        starts = [(match.start(1), match[1].lower()) for match in _SCHEME.finditer(quoted)]
        ends = [start for start, _ in starts[1:]] + [len(header)]
        offers = {
            scheme: header[start:end] for (start, scheme), end in zip(starts, ends, strict=False)
        }
        scheme = next((name for name in ("bearer", "basic") if name in offers), "")
        fields = {name: a or b for name, a, b in _PARAMETER.findall(offers.get(scheme, ""))}
        return cls(scheme, fields.get("realm", ""), fields.get("service"), fields.get("scope"))


@dataclass(frozen=True, slots=True)
class _Header:
    """A header for a challenge, valid until a time."""

    header: str = field(repr=False)
    challenge: _Challenge
    expires_at: float


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
        self._boundary = boundary
        self._send = send
        self._lock = threading.RLock()
        self._headers: dict[str, _Header] = {}
        self._tokens: dict[tuple[_Challenge, frozenset[str]], _Header] = {}
        self._credential = Credential(basic=basic_auth) if basic_auth is not None else None
        files = () if self._credential else connection.auth_files
        explicit = [{"auths": dict(connection.auths)}] if connection.auths else []
        self._configs = explicit + [read_config(path) for path in files]

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

    def _answer(self, actions: str, challenge: _Challenge, refused: str | None = None) -> _Header:
        credential = self._find_credential()
        if challenge.scheme == "basic" and credential.basic:
            renewed = _Header(f"Basic {credential.basic}", challenge, float("inf"))
        elif challenge.scheme == "bearer" and credential.registry_token:
            renewed = _Header(f"Bearer {credential.registry_token}", challenge, float("inf"))
            if refused == renewed.header:
                raise self._build_unauthorized_error("the stored access token was rejected")
        elif challenge.scheme == "bearer":
            renewed = self._get_token(actions, challenge, refused)
        else:
            raise self._build_unauthorized_error("no credentials found")
        self._headers[actions] = renewed
        return renewed

    def _find_credential(self) -> Credential:
        # Read at the first challenge: helpers may be slow, and public content needs none.
        if self._credential is None:
            registry, repository = self._reference.registry or "", self._reference.repository
            credential = find_credential(self._configs, registry, repository)
            self._credential = credential or Credential()
        return self._credential

    def _get_token(self, actions: str, challenge: _Challenge, refused: str | None) -> _Header:
        """Return a token for the scopes of a challenge, or else for ``actions``."""
        default = f"repository:{self._reference.repository}:{actions}" if actions else ""
        scopes = frozenset((challenge.scope or default).split())
        key = (challenge, scopes)
        token = self._tokens.get(key)
        if token is None or token.header == refused or token.expires_at <= self._connection.clock():
            token = self._tokens[key] = self._fetch(challenge, sorted(scopes))
        return token

    def _fetch(self, challenge: _Challenge, scopes: list[str]) -> _Header:
        if not challenge.realm:
            raise self._build_unauthorized_error("the WWW-Authenticate challenge has no realm")
        # Only a trusted service gets credentials.
        credential = self._find_credential() if self._check_realm(challenge.realm) else Credential()
        requested_at, exchange = self._connection.clock(), TokenExchange(self._send)
        try:
            token = exchange.request_token(challenge.realm, challenge.service, scopes, credential)
        except ValueError:
            reason = f"its token service {challenge.realm[:100]!r} is not an address"
            raise self._build_unauthorized_error(reason) from None
        rotated = exchange.fields.get("refresh_token")
        if credential.identity_token and isinstance(rotated, str) and rotated:
            self._credential = Credential(identity_token=rotated)
        if not isinstance(token, str) or not re.fullmatch(r"[!-~]+", token):
            raise self._build_unauthorized_error(
                f"the token service returned no token ({exchange.status})"
            )
        life = _compute_lifetime(exchange.fields, requested_at)
        return _Header(f"Bearer {token}", challenge, requested_at + life - min(_MARGIN, life / 5))

    def _check_realm(self, realm: str) -> bool:
        """Return True if ``realm`` may receive credentials. Raises UnauthorizedError."""
        parts = urlsplit(realm)
        host = (parts.hostname or "").lower()
        registry = urlsplit(f"//{self._reference.registry}").hostname or ""
        if parts.scheme not in ("http", "https") or not host:
            raise self._build_unauthorized_error(
                f"the token service URL {realm[:100]!r} is invalid"
            )
        if self._scheme == "https" and parts.scheme != "https":
            raise self._build_unauthorized_error(f"the token service {host} does not use HTTPS")
        if host == registry.lower():
            return True
        try:
            self._boundary.check_name(host)
        except OutsideError:
            raise self._build_unauthorized_error(
                f"the token service {host} is an internal address"
            ) from None
        usual_host = _USUAL_REALMS.get(registry)
        return host == usual_host or host in self._connection.trusted_realms

    def _build_unauthorized_error(self, reason: str) -> UnauthorizedError:
        return UnauthorizedError(
            f"{self._reference.registry} requires authentication: {reason}",
            remedy="login",
            registry=self._reference.registry,
            reason=reason,
        )


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
