"""docker's config.json and containers' auth.json.

oras-py's reader of these files is not used: it has neither keys with a path nor the two kinds of
tokens, and merges files in any order.

Sources: docker CLI, "Configuration files"; containers-auth.json(5); docker-credential-helpers.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clowder_aimage.content.atomic_file import write_file
from clowder_aimage.content.open_directory import resolve
from clowder_aimage.errors import StoreError, UsageError
from clowder_aimage.oci.reference import DOCKER_HUB
from clowder_aimage.registry.credential_helper import (
    CredentialHelperError,
    Query,
    get_program,
    query_helper,
)
from clowder_aimage.registry.credential_trace import CredentialTrace

DOCKER_HUB_KEY = "https://index.docker.io/v1/"
# The user name that helpers give with an identity token.
_IDENTITY_USER = "<token>"
# The fields of an entry that have credentials.
_FIELDS = ("auth", "username", "password", "identitytoken", "registrytoken")
_URL_ALPHABET = str.maketrans("-_", "+/")


@dataclass(frozen=True, slots=True)
class Credential:
    """A name and password, an identity token (exchanged for access tokens), or an access token.

    ``place`` is the file, helper or variable that it is from.
    """

    basic: str | None = field(default=None, repr=False)
    identity_token: str | None = field(default=None, repr=False)
    registry_token: str | None = field(default=None, repr=False)
    place: str = field(default="", compare=False)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to send."""
        return not (self.basic or self.identity_token or self.registry_token)

    @property
    def pair(self) -> tuple[str, str]:
        """The name and the password of ``basic``."""
        user, _, password = base64.b64decode(self.basic or "").decode().partition(":")
        return user, password

    @classmethod
    def of_basic(cls, basic: str) -> Credential | None:
        """Parse base64 of ``user:password``; return None for other text.

        It may be wrapped, have no padding, or use the alphabet of URLs: Go and Kubernetes read
        these too.
        """
        text = "".join(basic.split()).rstrip("=").translate(_URL_ALPHABET)
        try:
            decoded = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
            user, colon, password = decoded.rstrip(b"\0").decode().partition(":")
        except ValueError:
            return None
        if user == _IDENTITY_USER and colon:
            return cls(identity_token=password)
        return cls.of_pair(user, password) if colon else None

    @classmethod
    def of_pair(cls, user: str, password: str) -> Credential:
        """Return the credential of a name and a password."""
        if user == _IDENTITY_USER:
            return cls(identity_token=password)
        return cls(basic=encode_basic(user, password))


def encode_basic(user: str, password: str) -> str:
    """Return base64 of a name and a password; arguments are the bytes that the shell passed.

    Raises UsageError: these are not UTF-8, in which docker and its helpers store them.
    """
    # Without a locale, Python keeps other bytes than ASCII as surrogates.
    try:
        raw = f"{user}:{password}".encode("utf-8", "surrogateescape")
        raw.decode()
    except UnicodeError:
        raise UsageError("the username or the password is not in UTF-8") from None
    return base64.b64encode(raw).decode()


@dataclass(frozen=True, slots=True)
class AuthSource:
    """A configuration of credentials, and the place that it is from."""

    place: str
    config: Mapping[str, Any] = field(repr=False)


def build_config_key(registry: str) -> str:
    """Return the key of a registry in docker's config: its host, except for Docker Hub."""
    return DOCKER_HUB_KEY if registry in DOCKER_HUB else registry


def parse_scope(key: str) -> str | None:
    """Return the host, or host and path, of a key of ``auths``; None for other tokens.

    A key with a scheme, or one that ends in an API version, is docker's and names a host; any other
    path is in the containers format. The names of Docker Hub become docker.io, and the port of
    HTTPS is left out. Docker Desktop
    stores tokens of Docker Hub that are not passwords below the host's key.
    """
    scheme, separator, location = key.rpartition("://")
    host, _, path = location.partition("/")
    path = path.strip("/")
    if path in ("v1/access-token", "v1/refresh-token"):
        return None
    if (separator and scheme) or path in ("v1", "v2"):
        path = ""
    host = host.lower().removesuffix(":443")
    host = "docker.io" if host in DOCKER_HUB else host
    return f"{host}/{path}" if path else host


def find_credential(
    sources: Iterable[AuthSource],
    registry: str,
    repository: str,
    trace: CredentialTrace,
    query: Query = query_helper,
) -> Credential | None:
    """Return the credential for a repository from the first source that has one.

    In each: a key with a path, the host's own helper, the host's key, the helper for all hosts.
    localhost and 127.0.0.1 are the same. What is skipped is recorded.
    """
    for source in sources:
        for host in _list_local_names(registry):
            credential = _find(source, host, repository, trace, query)
            if credential is not None:
                trace.add(credential.place, "found")
                return credential
        trace.add_empty(source.place)
    return None


def _list_local_names(registry: str) -> list[str]:
    """Return the name of a registry, and the other one if it is localhost or 127.0.0.1."""
    host, colon, port = registry.partition(":")
    other = {"localhost": "127.0.0.1", "127.0.0.1": "localhost"}.get(host)
    return [registry, other + colon + port] if other else [registry]


def _find(
    source: AuthSource, registry: str, repository: str, trace: CredentialTrace, query: Query
) -> Credential | None:
    host, config = parse_scope(registry), source.config
    path = f"{host}/{repository}"
    inline = _parse_inline(source, path, trace)
    while path != host:
        if path in inline:
            return inline[path]
        path = path.rpartition("/")[0]
    host_helper, store = _find_host_helper(config, registry), config.get("credsStore")
    credential = _ask(host_helper, registry, trace, query) if host_helper else None
    credential = credential or inline.get(path)
    return credential or (_ask(store, registry, trace, query) if store else None)


def may_have_credential(sources: Iterable[AuthSource], registry: str) -> bool:
    """Return True if a source has an entry of a registry, or a helper for it."""
    hosts = {parse_scope(name) for name in _list_local_names(registry)}
    return any(
        find_helper(source.config, name)
        or any((parse_scope(key) or "").partition("/")[0] in hosts for key in _get_auths(source))
        for source in sources
        for name in _list_local_names(registry)
    )


def _get_auths(source: AuthSource) -> Mapping[str, Any]:
    return source.config.get("auths") or {}


def _parse_inline(source: AuthSource, path: str, trace: CredentialTrace) -> dict[str, Credential]:
    """Return the credentials in the file itself for ``path`` or above it, by host or path."""
    credentials = {}
    for key, entry in _get_auths(source).items():
        scope = parse_scope(key)
        # Docker leaves an empty entry for what its helper has.
        is_empty = not entry or (isinstance(entry, dict) and not any(map(entry.get, _FIELDS)))
        if not scope or not f"{path}/".startswith(f"{scope}/") or is_empty:
            continue
        credential = _parse_entry(entry) if isinstance(entry, dict) else None
        if credential is not None:
            # The key of a namespace hides that of its registry.
            place = f"{source.place} (the entry {key})" if "/" in scope else source.place
            credentials[scope] = replace(credential, place=place)
        else:
            reason = f"the entry {key} has no valid credentials"
            trace.add(source.place, reason, is_warning=True)
    return credentials


def _parse_entry(entry: dict[str, Any]) -> Credential | None:
    """Parse an entry: ``auth``, ``identitytoken``, ``registrytoken``, or name and password."""
    access_token = entry.get("registrytoken")
    if isinstance(access_token, str) and re.fullmatch(r"[!-~]+", access_token):
        return Credential(registry_token=access_token)
    token = entry.get("identitytoken")
    if token and isinstance(token, str):
        return Credential(identity_token=token)
    auth, user, password = (entry.get(name) for name in ("auth", "username", "password"))
    if not auth and isinstance(user, str) and isinstance(password, str):
        return Credential.of_pair(user, password)
    return Credential.of_basic(auth) if isinstance(auth, str) and auth else None


def _ask(name: str, registry: str, trace: CredentialTrace, query: Query) -> Credential | None:
    """Return a helper's credential for a registry; failures are recorded."""
    place = get_program(name)
    try:
        stored = query(name, build_config_key(registry))
    except CredentialHelperError as error:
        trace.add(place, error.reason, is_warning=True)
        return None
    if stored is None:
        trace.add_empty(place)
        return None
    return replace(Credential.of_pair(stored["Username"], stored["Secret"]), place=place)


def _find_host_helper(config: Mapping[str, Any], registry: str) -> str | None:
    """Return the helper configured for this host only, or None."""
    host, helpers = parse_scope(registry), config.get("credHelpers") or {}
    helpers_of_host = (name for key, name in helpers.items() if parse_scope(key) == host)
    return next((name for name in helpers_of_host if isinstance(name, str)), None)


def find_helper(config: Mapping[str, Any], registry: str) -> str | None:
    """Return the credential helper for a registry, or None."""
    return _find_host_helper(config, registry) or config.get("credsStore")


def list_keys(config: Mapping[str, Any], registry: str) -> list[str]:
    """Return the keys of ``auths`` for a registry and its repositories, in any spelling."""
    host = parse_scope(registry)
    keys = config.get("auths") or {}
    return [key for key in keys if (parse_scope(key) or "").partition("/")[0] == host]


def list_narrower_keys(config: Mapping[str, Any], registry: str) -> list[str]:
    """Return the keys of ``auths`` for some repositories of a registry only."""
    host = parse_scope(registry)
    return [key for key in list_keys(config, registry) if parse_scope(key) != host]


def read_config(path: Path) -> dict[str, Any]:
    """Return the file's object, or an empty one without a file. Raises StoreError."""
    try:
        raw = path.read_bytes()
        return _parse_config(raw) if raw.strip() else {}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        reason = _describe_error(error)
        raise StoreError(f"cannot read {path}: {reason}", hint="fix or remove the file") from None


def read_source(path: Path, trace: CredentialTrace) -> AuthSource:
    """Return the configuration in a file; an empty one, with a warning, if it cannot be used."""
    config: Mapping[str, Any] = {}
    try:
        config = _parse_config(path.read_bytes())
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        # There need not be a file, as after a change of users.
        is_there = os.access(path.parent, os.X_OK) and not isinstance(error, NotADirectoryError)
        trace.add(str(path), f"cannot be read: {_describe_error(error)}", is_warning=is_there)
    return AuthSource(str(path), config)


def parse_source(place: str, text: str, trace: CredentialTrace) -> AuthSource:
    """Return the configuration in a text; an empty one, with a warning, if it cannot be used."""
    try:
        return AuthSource(place, _parse_config(text.encode()))
    except ValueError as error:
        trace.add(place, f"cannot be read: {error}", is_warning=True)
        return AuthSource(place, {})


def _parse_config(raw: bytes) -> dict[str, Any]:
    """Parse a configuration, also one with a byte order mark. Raises ValueError."""
    if not raw.strip():
        raise ValueError("it is empty")
    try:
        value = json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    for key, kind in (("auths", dict), ("credHelpers", dict), ("credsStore", str)):
        if value.get(key) is not None and not isinstance(value[key], kind):
            raise ValueError(f"{key} has an unexpected type")
    return value


def _describe_error(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Replace the file, readable by its owner alone; a link to it stays. Raises StoreError."""
    data = json.dumps(config, indent="\t") + "\n"
    try:
        target = resolve(path)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(target, data.encode(), mode=0o600)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from None
