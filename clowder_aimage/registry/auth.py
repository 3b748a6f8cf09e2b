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
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.docker_config import (
    DOCKER_HUB,
    Credential,
    find_credential,
    read_config,
)
from clowder_aimage.registry.reach import Boundary, OutsideError
from clowder_aimage.registry.token_exchange import SendOnce, TokenExchange

_LIFE = 60.0  # seconds, of a token without expires_in
_MARGIN = 30.0  # a token is renewed this long before it expires, or a fifth of its life
_KNOWN_REALMS = dict.fromkeys(DOCKER_HUB, "auth.docker.io") | {"registry.gitlab.com": "gitlab.com"}
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
        """Parse a header, which may hold several challenges."""
        quoted = re.sub(r'"[^"]*"', lambda found: "_" * len(found[0]), header)  # not in strings
        starts = [(found.start(1), found[1].lower()) for found in _SCHEME.finditer(quoted)]
        ends = [start for start, _ in starts[1:]] + [len(header)]
        offers = {scheme: header[at:end] for (at, scheme), end in zip(starts, ends, strict=False)}
        scheme = next((name for name in ("bearer", "basic") if name in offers), "")
        found = {name: a or b for name, a, b in _PARAMETER.findall(offers.get(scheme, ""))}
        return cls(scheme, found.get("realm", ""), found.get("service"), found.get("scope"))


@dataclass(frozen=True, slots=True)
class _Header:
    """A header for a challenge, and the time until which it is valid."""

    header: str = field(repr=False)
    challenge: _Challenge
    until: float


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
        self._held: dict[str, _Header] = {}
        self._tokens: dict[tuple[_Challenge, frozenset[str]], _Header] = {}
        self._credential = Credential(basic=basic_auth) if basic_auth is not None else None
        files = () if self._credential else connection.auth_files
        given = [{"auths": dict(connection.auths)}] if connection.auths else []
        self._configs = given + [read_config(path) for path in files]

    def known(self, actions: str) -> str | None:
        """Return the header for ``actions`` (``pull,push``), renewed if it has expired, or None."""
        with self._lock:
            held = self._held.get(actions)
            if held is not None and held.until <= self._connection.clock():
                held = self._answer(actions, held.challenge)
            return None if held is None else held.header

    def answer(self, actions: str, challenge: str, refused: str | None) -> str:
        """Return a header for ``challenge`` other than the ``refused`` one.

        Raises UnauthorizedError: there are no credentials, or they are not accepted.
        """
        with self._lock:
            held = self._held.get(actions)
            if held is not None and held.header != refused:
                return held.header  # another thread has already renewed it
            parsed, credential = _Challenge.parse(challenge), self._find_credential()
            if parsed.scheme == "basic" and not credential.basic and held is not None:
                parsed = held.challenge  # Harbor challenges an expired token with Basic
            return self._answer(actions, parsed, refused).header

    def _answer(self, actions: str, challenge: _Challenge, refused: str | None = None) -> _Header:
        credential = self._find_credential()
        if challenge.scheme == "basic" and credential.basic:
            held = _Header(f"Basic {credential.basic}", challenge, float("inf"))
        elif challenge.scheme == "bearer" and credential.registry_token:
            held = _Header(f"Bearer {credential.registry_token}", challenge, float("inf"))
            if refused == held.header:
                raise self._refused("the stored access token was rejected")
        elif challenge.scheme == "bearer":
            held = self._token(actions, challenge, refused)
        else:
            raise self._refused("no credentials found")
        self._held[actions] = held
        return held

    def _find_credential(self) -> Credential:
        if self._credential is None:  # until the first challenge: helpers may be slow
            registry, repository = self._reference.registry or "", self._reference.repository
            found = find_credential(self._configs, registry, repository)
            self._credential = found or Credential()
        return self._credential

    def _token(self, actions: str, challenge: _Challenge, refused: str | None) -> _Header:
        """Return a token for the scopes of a challenge, or else for ``actions``."""
        default = f"repository:{self._reference.repository}:{actions}" if actions else ""
        scopes = frozenset((challenge.scope or default).split())
        key = (challenge, scopes)
        held = self._tokens.get(key)
        if held is None or held.header == refused or held.until <= self._connection.clock():
            held = self._tokens[key] = self._fetch(challenge, sorted(scopes))
        return held

    def _fetch(self, challenge: _Challenge, scopes: list[str]) -> _Header:
        if not challenge.realm:
            raise self._refused("the WWW-Authenticate challenge has no realm")
        # credentials only to a trusted service
        credential = self._find_credential() if self._check_realm(challenge.realm) else Credential()
        began, exchange = self._connection.clock(), TokenExchange(self._send)
        try:
            token = exchange.token(challenge.realm, challenge.service, scopes, credential)
        except ValueError:
            what = f"its token service {challenge.realm[:100]!r} is not an address"
            raise self._refused(what) from None
        rotated = exchange.fields.get("refresh_token")
        if credential.identity_token and isinstance(rotated, str) and rotated:
            self._credential = Credential(identity_token=rotated)
        if not isinstance(token, str) or not re.fullmatch(r"[!-~]+", token):
            raise self._refused(f"the token service returned no token ({exchange.status})")
        life = _life(exchange.fields, began)
        return _Header(f"Bearer {token}", challenge, began + life - min(_MARGIN, life / 5))

    def _check_realm(self, realm: str) -> bool:
        """Return whether ``realm`` may receive credentials. Raises UnauthorizedError."""
        parts = urlsplit(realm)
        host = (parts.hostname or "").lower()
        registry = urlsplit(f"//{self._reference.registry}").hostname or ""
        if parts.scheme not in ("http", "https") or not host:
            raise self._refused(f"the token service URL {realm[:100]!r} is invalid")
        if self._scheme == "https" and parts.scheme != "https":
            raise self._refused(f"the token service {host} does not use HTTPS")
        if host == registry.lower():
            return True
        try:
            self._boundary.check_name(host)
        except OutsideError:
            raise self._refused(f"the token service {host} is an internal address") from None
        known = _KNOWN_REALMS.get(registry)
        return host == known or host in self._connection.trusted_realms

    def _refused(self, why: str) -> UnauthorizedError:
        return UnauthorizedError(
            f"{self._reference.registry} requires authentication: {why}",
            remedy="login",
            registry=self._reference.registry,
            reason=why,
        )


def _life(fields: dict[str, Any], now: float) -> float:
    """Return for how many seconds from ``now`` a token is valid, from its service's response.

    ``issued_at`` shortens that for a token issued earlier. It is ignored if it is in the future, or
    so old that the token has expired: then the clocks differ.
    """
    life = fields.get("expires_in")
    life = float(life) if isinstance(life, int | float) and 0 < life < 1e9 else _LIFE
    try:
        age = now - datetime.datetime.fromisoformat(fields.get("issued_at", "")).timestamp()
    except (ValueError, TypeError, OverflowError):
        age = 0.0
    return life - age if 0 < age < life else life
