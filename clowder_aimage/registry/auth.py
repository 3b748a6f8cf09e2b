"""Answering a registry's challenge, with oras-py's token exchange made safe.

oras-py asks credential helpers and trades credentials for a token. What is added here: Basic
challenges, identity tokens, tokens that are kept until they expire, and the rules about who may
see credentials (CVE-2025-51471, CVE-2026-48978, CVE-2026-33990).

Sources: distribution, "Token Authentication Specification" and "OAuth2 Token Authentication".
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import logging
import re
import threading
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import oras.auth.token
import oras.auth.utils
import requests

from clowder_aimage.errors import UnauthorizedError
from clowder_aimage.oci import Reference
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.docker_config import (
    DOCKER_HUB,
    Credential,
    find_credential,
    read_config,
)
from clowder_aimage.registry.response_error import failure, read_capped
from clowder_aimage.registry.retry import TRANSIENT_STATUS

_MAX_TOKEN_ANSWER = 1024 * 1024
_LIFE = 60.0  # seconds that a token lives where its service does not say
_MARGIN = 30.0  # seconds, or a fifth of its life, before its end in which a token is renewed
_CLIENT = "aimage"
_KNOWN_REALMS = dict.fromkeys(DOCKER_HUB, "auth.docker.io") | {
    "registry.gitlab.com": "gitlab.com",
}
_SCHEME = re.compile(r"(?:^|,)\s*([A-Za-z]+)(?=\s+[A-Za-z_]+\s*=|\s*$|\s*,)")
_PARAMETER = re.compile(r'([A-Za-z_]+)\s*=\s*(?:"([^"]*)"|([^\s",]+))')
logging.getLogger("oras").setLevel(logging.CRITICAL + 1)  # it prints, and could print secrets


class _TokenSession:
    """The ``requests`` interface that oras-py's token exchange calls, with a cap on answers."""

    def __init__(self, session: requests.Session, timeout: tuple[float, float]) -> None:
        self._session = session
        self._timeout = timeout
        self.answer: requests.Response | None = None

    def request(self, method: str, url: str, **options: Any) -> requests.Response:
        """Ask a token service; 429 and what passes by itself is raised, to be tried again."""
        options.pop("verify", None)  # the session knows
        response = self._session.request(
            method, url, stream=True, allow_redirects=False, timeout=self._timeout, **options
        )
        if response.status_code in TRANSIENT_STATUS:
            raise failure(response, "a request for a token")
        response._content = read_capped(response, _MAX_TOKEN_ANSWER)
        self.answer = response
        return response

    def get(self, url: str, **options: Any) -> requests.Response:
        return self.request("GET", url, **options)


@dataclass(frozen=True, slots=True)
class _Challenge:
    """A WWW-Authenticate header's best offer (RFC 9110, 11.6.1): Bearer before Basic."""

    scheme: str
    realm: str = ""
    service: str | None = None
    scope: str | None = None

    @classmethod
    def parse(cls, header: str) -> _Challenge:
        """Read a header, which may hold several challenges."""
        quoted = re.sub(r'"[^"]*"', lambda found: "_" * len(found[0]), header)  # not in strings
        starts = [(found.start(1), found[1].lower()) for found in _SCHEME.finditer(quoted)]
        ends = [start for start, _ in starts[1:]] + [len(header)]
        offers = {scheme: header[at:end] for (at, scheme), end in zip(starts, ends, strict=False)}
        scheme = next((name for name in ("bearer", "basic") if name in offers), "")
        found = {name: a or b for name, a, b in _PARAMETER.findall(offers.get(scheme, ""))}
        return cls(scheme, found.get("realm", ""), found.get("service"), found.get("scope"))


@dataclass(frozen=True, slots=True)
class _Held:
    """A header that answered a challenge, and until when it is good."""

    header: str = field(repr=False)
    challenge: _Challenge
    until: float


class Authenticator(oras.auth.token.TokenAuth):  # type: ignore[misc]
    """Turns challenges into Authorization headers, and keeps these per set of scopes.

    Threads that need the same one at the same time share one exchange.
    """

    def __init__(
        self,
        reference: Reference,
        connection: ClientOptions,
        session: requests.Session,
        timeout: tuple[float, float],
        scheme: str,
        basic_auth: str | None,
    ) -> None:
        super().__init__()
        self._reference = reference
        self._connection = connection
        self._scheme = scheme
        self._tls_verify = not connection.insecure  # oras-py asks for it; the session decides
        self.session = _TokenSession(session, timeout)
        self._lock = threading.RLock()
        self._held: dict[str, _Held] = {}
        self._tokens: dict[tuple[_Challenge, frozenset[str]], _Held] = {}
        self._credential = Credential(basic=basic_auth) if basic_auth is not None else None
        files = () if self._credential else connection.auth_files
        told = [{"auths": dict(connection.auths)}] if connection.auths else []
        self._configs = told + [read_config(path) for path in files]

    def known(self, actions: str) -> str | None:
        """The header for requests that need ``actions`` (such as ``pull,push``), if there is one.

        A token that is about to expire is renewed first.
        """
        with self._lock:
            held = self._held.get(actions)
            if held is not None and held.until <= self._connection.clock():
                held = self._answer(actions, held.challenge)
            return None if held is None else held.header

    def answer(self, actions: str, challenge: str, refused: str | None) -> str:
        """The header that answers ``challenge``, where ``refused`` is the one that did not.

        Raises:
            UnauthorizedError: there is no answer to it.
        """
        with self._lock:
            held = self._held.get(actions)
            if held is not None and held.header != refused:
                return held.header  # another thread was here first
            asked, credential = _Challenge.parse(challenge), self._find_credential()
            if asked.scheme == "basic" and not credential.basic and held is not None:
                asked = held.challenge  # Harbor, to a token that has ended
            return self._answer(actions, asked, refused).header

    def _answer(self, actions: str, challenge: _Challenge, refused: str | None = None) -> _Held:
        credential = self._find_credential()
        if challenge.scheme == "basic" and credential.basic:
            held = _Held(f"Basic {credential.basic}", challenge, float("inf"))
        elif challenge.scheme == "bearer" and credential.registry_token:
            held = _Held(f"Bearer {credential.registry_token}", challenge, float("inf"))
            if refused == held.header:
                raise self._refused("the access token that is kept for it is not taken (any more)")
        elif challenge.scheme == "bearer":
            held = self._token(actions, challenge, refused)
        else:
            raise self._refused("no credentials for it are known")
        self._held[actions] = held
        return held

    def _find_credential(self) -> Credential:
        """Look for credentials once, when they are first asked for: helpers may be slow."""
        if self._credential is None:
            registry, repository = self._reference.registry or "", self._reference.repository
            found = find_credential(self._configs, registry, repository)
            self._credential = found or Credential()
        return self._credential

    def _token(self, actions: str, challenge: _Challenge, refused: str | None) -> _Held:
        """A token for the scopes of a challenge, or for ours where it names none."""
        ours = f"repository:{self._reference.repository}:{actions}" if actions else ""
        scopes = frozenset((challenge.scope or ours).split())
        key = (challenge, scopes)
        held = self._tokens.get(key)
        if held is None or held.header == refused or held.until <= self._connection.clock():
            held = self._tokens[key] = self._fetch(challenge, sorted(scopes))
        return held

    def _fetch(self, challenge: _Challenge, scopes: list[str]) -> _Held:
        if not challenge.realm:
            raise self._refused("its challenge names no realm")
        trusted = self._check_realm(challenge.realm)
        began = self._connection.clock()
        self.session.answer = None
        try:
            token = self._exchange(challenge, scopes, trusted)
        except (ValueError, AttributeError, TypeError, RecursionError):
            token = None  # what it sent is not the JSON object that it should be
        if not isinstance(token, str) or not re.fullmatch(r"[!-~]+", token):
            answer = self.session.answer
            said = f" ({answer.status_code})" if answer is not None else ""
            raise self._refused(f"its token service gave no token{said}")
        life = _life(self.session.answer, began)
        return _Held(f"Bearer {token}", challenge, began + life - min(_MARGIN, life / 5))

    def _exchange(self, challenge: _Challenge, scopes: list[str], trusted: bool) -> Any:
        """Ask the token service; credentials are shown to it only where it is ``trusted``."""
        credential = self._find_credential() if trusted else Credential()
        asked = {"realm": challenge.realm, "service": challenge.service, "scope": scopes}
        header = oras.auth.utils.authHeader(asked)
        if credential.identity_token:
            return self._trade(challenge, scopes, credential.identity_token)
        if credential.basic:
            self._basic_auth = credential.basic
            return self.request_token(header)
        return self.request_anonymous_token(header)

    def _trade(self, challenge: _Challenge, scopes: list[str], identity_token: str) -> Any:
        """An access token for an identity token, by POST, where it stays out of URLs."""
        form = {
            "grant_type": "refresh_token",
            "service": challenge.service or "",
            "client_id": _CLIENT,
            "scope": " ".join(scopes),
            "refresh_token": identity_token,
        }
        response = self.session.request("POST", challenge.realm, data=form)
        if response.status_code != 200:
            return None
        answer = response.json()
        rotated = answer.get("refresh_token")
        if isinstance(rotated, str) and rotated:
            self._credential = Credential(identity_token=rotated)
        return answer.get("access_token") or answer.get("token")

    def _check_realm(self, realm: str) -> bool:
        """Whether credentials may go to ``realm``. Raises where nothing may go there at all."""
        parts = urlsplit(realm)
        host = (parts.hostname or "").lower()
        registry = urlsplit(f"//{self._reference.registry}").hostname or ""
        if parts.scheme not in ("http", "https") or not host:
            raise self._refused(f"its token service {realm[:100]!r} is no address")
        if self._scheme == "https" and parts.scheme != "https":
            raise self._refused(f"its token service {host} is not encrypted, the registry is")
        if host == registry.lower():
            return True
        if not self._reference.is_loopback and _is_internal(host):
            raise self._refused(f"it sends us to {host}, an address inside this network")
        known = _KNOWN_REALMS.get(registry)
        return host == known or host in self._connection.trusted_realms

    def _refused(self, why: str) -> UnauthorizedError:
        return UnauthorizedError(
            f"{self._reference.registry} wants authentication, and {why}",
            hint=f"log in with: aimage login {self._reference.registry}",
        )


def _life(response: requests.Response | None, now: float) -> float:
    """For how many seconds from ``now`` a token is good, by its service's answer.

    ``issued_at`` shortens that for a token that was issued earlier. Where it says that the token
    has expired or is yet to be issued, one of the two clocks is wrong, and it is not heeded.
    """
    answer = json.loads(response.content) if response is not None else {}
    life = answer.get("expires_in")
    life = float(life) if isinstance(life, int | float) and 0 < life < 1e9 else _LIFE
    try:
        age = now - datetime.datetime.fromisoformat(answer.get("issued_at", "")).timestamp()
    except (ValueError, TypeError, OverflowError):
        age = 0.0
    return life - age if 0 < age < life else life


def _is_internal(host: str) -> bool:
    """Whether a host is an address of this machine or network, however it is spelt.

    The system's resolver also takes ``127.1``, ``0x7f000001`` and ``2130706433``; no real host's
    last label is a number.
    """
    name = host.rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return not ipaddress.ip_address(name).is_global
    except ValueError:
        return re.fullmatch(r"0x[0-9a-f]*|[0-9]+", name.rpartition(".")[2]) is not None
