"""Answering a registry's challenge, with oras-py's token exchange made safe.

oras-py reads docker's config, asks credential helpers and trades credentials for a token. What
is added here: ``DOCKER_CONFIG``, Basic challenges, a token per repository and direction, and
the rules about who may see credentials (CVE-2025-51471, CVE-2026-48978, CVE-2026-33990).
"""

from __future__ import annotations

import ipaddress
import logging
import re
from typing import Any
from urllib.parse import urlsplit

import oras.auth.token
import oras.auth.utils
import requests

from clowder_aimage.errors import UnauthorizedError
from clowder_aimage.oci import Reference
from clowder_aimage.registry.answer import read_capped
from clowder_aimage.registry.connection import Connection
from clowder_aimage.registry.docker_config import (
    DOCKER_HUB,
    config_key,
    credentials,
    read_config,
)

_MAX_TOKEN_ANSWER = 1024 * 1024
_KNOWN_REALMS = dict.fromkeys(DOCKER_HUB, "auth.docker.io") | {
    "registry.gitlab.com": "gitlab.com",
}
logging.getLogger("oras").setLevel(logging.CRITICAL + 1)  # it prints, and could print secrets


class _TokenSession:
    """The ``requests`` interface that oras-py's token exchange calls, with a cap on answers."""

    def __init__(self, session: requests.Session, timeout: tuple[float, float]) -> None:
        self._session = session
        self._timeout = timeout

    def request(self, method: str, url: str, **options: Any) -> requests.Response:
        options.pop("verify", None)  # the session knows
        response = self._session.request(
            method, url, stream=True, allow_redirects=False, timeout=self._timeout, **options
        )
        response._content = read_capped(response, _MAX_TOKEN_ANSWER)
        return response

    def get(self, url: str, **options: Any) -> requests.Response:
        return self.request("GET", url, **options)


class Authenticator(oras.auth.token.TokenAuth):  # type: ignore[misc]
    """Turns a 401 into the Authorization header to send instead."""

    def __init__(
        self,
        reference: Reference,
        connection: Connection,
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
        if basic_auth is not None:
            self._basic_auth = basic_auth
        else:
            self._load()

    def _load(self) -> None:
        """Find the registry's credentials in docker's config, by oras-py's rules."""
        config = read_config(self._connection.docker_config / "config.json")
        self._auth_config = {
            "auths": credentials(config),
            "credsStore": config.get("credsStore"),
            "credHelpers": config.get("credHelpers") or {},
        }
        registry = self._reference.registry or ""
        for host in oras.utils.iter_localhosts(config_key(registry)):
            if self._load_auth(host):
                return

    @property
    def has_credentials(self) -> bool:
        return bool(getattr(self, "_basic_auth", None))

    def header(self, challenge: str) -> str:
        """The Authorization header that answers ``challenge`` (WWW-Authenticate).

        Raises:
            UnauthorizedError: there is no answer to it.
        """
        scheme = challenge.strip().partition(" ")[0].lower()
        if scheme == "basic" and self.has_credentials:
            return f"Basic {self._basic_auth}"
        if scheme != "bearer":
            raise self._refused("no credentials for it are known")
        parsed = oras.auth.utils.parse_auth_header(challenge)
        if not parsed.realm:
            raise self._refused("its challenge names no realm")
        trusted = self._check_realm(parsed.realm)
        credentials = trusted and self.has_credentials
        exchange = self.request_token if credentials else self.request_anonymous_token
        try:
            token = exchange(parsed)
        except (ValueError, AttributeError, TypeError):
            token = None  # what it sent is not the JSON object that it should be
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise self._refused("its token service gave no token")
        return f"Bearer {token}"

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
