"""docker's config.json and containers' auth.json.

oras-py encodes credentials and knows the names of the local host. Its reader of these files is not
used: it has neither keys with a path nor the two kinds of tokens, and merges files in any order.

Sources: docker CLI, "Configuration files"; containers-auth.json(5); docker-credential-helpers.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import oras.auth.utils
import oras.utils

from clowder_aimage.content.atomic_file import write_file
from clowder_aimage.content.open_directory import resolve
from clowder_aimage.errors import StoreError, UnauthorizedError
from clowder_aimage.oci.reference import DOCKER_HUB

DOCKER_HUB_KEY = "https://index.docker.io/v1/"
# Its messages could contain secrets.
logging.getLogger("oras").setLevel(logging.CRITICAL + 1)
# The user name that helpers give with an identity token.
_IDENTITY_USER = "<token>"


@dataclass(frozen=True, slots=True)
class Credential:
    """A name and password, an identity token (exchanged for access tokens), or an access token."""

    basic: str | None = field(default=None, repr=False)
    identity_token: str | None = field(default=None, repr=False)
    registry_token: str | None = field(default=None, repr=False)

    @property
    def pair(self) -> tuple[str, str]:
        """The name and the password of ``basic``."""
        user, _, password = base64.b64decode(self.basic or "").decode().partition(":")
        return user, password

    @classmethod
    def of_basic(cls, basic: str) -> Credential | None:
        """Parse base64 of ``user:password``; return None for other text."""
        try:
            text = base64.b64decode(basic, validate=True).decode()
        except (binascii.Error, ValueError):
            return None
        user, colon, password = text.rstrip("\0").partition(":")
        if user == _IDENTITY_USER and colon:
            return cls(identity_token=password)
        return cls(basic=basic) if colon else None


def build_config_key(registry: str) -> str:
    """Return the key of a registry in docker's config: its host, except for Docker Hub."""
    return DOCKER_HUB_KEY if registry in DOCKER_HUB else registry


def parse_scope(key: str) -> str | None:
    """Return the host, or host and path, of a key of ``auths``; None for other tokens.

    A key with a scheme, or one that ends in an API version, is docker's and names a host; any other
    path is in the containers format. The names of Docker Hub become docker.io. Docker Desktop
    stores tokens of Docker Hub that are not passwords below the host's key.
    """
    scheme, separator, location = key.rpartition("://")
    host, _, path = location.partition("/")
    path = path.strip("/")
    if path in ("v1/access-token", "v1/refresh-token"):
        return None
    if (separator and scheme) or path in ("v1", "v2"):
        path = ""
    host = "docker.io" if host in DOCKER_HUB else host
    return f"{host}/{path}" if path else host


def find_credential(
    configs: Iterable[dict[str, Any]], registry: str, repository: str
) -> Credential | None:
    """Return the credential for a repository from the first config that has one.

    In each: a key with a path, the host's own helper, the host's key, the helper for all hosts.
    localhost and 127.0.0.1 are the same, as in oras-py.
    """
    for config in configs:
        for host in oras.utils.iter_localhosts(registry):
            credential = _find(config, host, repository)
            if credential is not None:
                return credential
    return None


def _find(config: dict[str, Any], registry: str, repository: str) -> Credential | None:
    host, inline = parse_scope(registry), _parse_inline(config)
    path = f"{host}/{repository}"
    while path != host:
        if path in inline:
            return inline[path]
        path = path.rpartition("/")[0]
    host_helper, store = _find_host_helper(config, registry), config.get("credsStore")
    credential = _query(host_helper, registry) if host_helper else None
    credential = credential or inline.get(path)
    return credential or (_query(store, registry) if store else None)


def _parse_inline(config: dict[str, Any]) -> dict[str, Credential]:
    """Return the credentials in the file itself, by host or path."""
    entries = ((parse_scope(key), entry) for key, entry in (config.get("auths") or {}).items())
    credentials = {
        scope: _parse_entry(entry) for scope, entry in entries if isinstance(entry, dict) and scope
    }
    return {
        scope: credential for scope, credential in credentials.items() if credential is not None
    }


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
        auth = oras.auth.utils.get_basic_auth(user, password)
    return Credential.of_basic(auth) if isinstance(auth, str) and auth else None


def _query(name: str, registry: str) -> Credential | None:
    """Return a helper's credential for a registry; failures are ignored."""
    # Helpers are programs on PATH only.
    if "/" in name:
        return None
    try:
        stored = json.loads(run_helper(name, "get", build_config_key(registry)))
        basic = oras.auth.utils.get_basic_auth(stored["Username"], stored["Secret"])
    except (UnauthorizedError, OSError, ValueError, LookupError, TypeError):
        return None
    return Credential.of_basic(basic)


def run_helper(name: str, verb: str, text: str) -> bytes:
    """Run a credential helper and return its output. Raises UnauthorizedError."""
    binary = f"docker-credential-{name}"
    try:
        command = [binary, verb]
        return subprocess.run(command, input=text.encode(), check=True, capture_output=True).stdout
    except FileNotFoundError:
        raise UnauthorizedError(
            f"the credential helper {binary} is not installed",
            hint="install it, or remove it from docker's config.json",
        ) from None
    except subprocess.CalledProcessError as error:
        output = (error.stdout + error.stderr).decode(errors="replace").strip()
        raise UnauthorizedError(f"{binary} {verb} failed: {output[:300]}") from None


def _find_host_helper(config: dict[str, Any], registry: str) -> str | None:
    """Return the helper configured for this host only, or None."""
    host, helpers = parse_scope(registry), config.get("credHelpers") or {}
    helpers_of_host = (name for key, name in helpers.items() if parse_scope(key) == host)
    return next((name for name in helpers_of_host if isinstance(name, str)), None)


def find_helper(config: dict[str, Any], registry: str) -> str | None:
    """Return the credential helper for a registry, or None."""
    return _find_host_helper(config, registry) or config.get("credsStore")


def list_keys(config: dict[str, Any], registry: str) -> list[str]:
    """Return the keys of ``auths`` for a whole registry, in any spelling."""
    host = parse_scope(registry)
    return [key for key in config.get("auths") or {} if parse_scope(key) == host]


def read_config(path: Path) -> dict[str, Any]:
    """Return the file's object, or an empty one if there is no file. Raises StoreError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise _read_error(path, str(error)) from None
    if not isinstance(value, dict):
        raise _read_error(path, "it is not a JSON object")
    for key, kind in (("auths", dict), ("credHelpers", dict), ("credsStore", str)):
        if value.get(key) is not None and not isinstance(value[key], kind):
            raise _read_error(path, f"{key} has an unexpected type")
    return value


def _read_error(path: Path, reason: str) -> StoreError:
    return StoreError(f"cannot read {path}: {reason}", hint="fix or remove the file")


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Replace the file, readable by its owner alone; a link to it stays. Raises StoreError."""
    data = json.dumps(config, indent="\t") + "\n"
    try:
        target = resolve(path)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(target, data.encode(), mode=0o600)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from None
