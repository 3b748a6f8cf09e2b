"""docker's config.json: read leniently, written carefully.

Format: docker CLI, "Configuration files"; helpers: docker-credential-helpers, "Development".
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import oras.auth.utils

from clowder_aimage.errors import StoreError

DOCKER_HUB = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
DOCKER_HUB_KEY = "https://index.docker.io/v1/"


def config_key(registry: str) -> str:
    """What docker's config calls a registry: its host, but for Docker Hub."""
    return DOCKER_HUB_KEY if registry in DOCKER_HUB else registry


def read_config(path: Path) -> dict[str, Any]:
    """The file's object, or an empty one where there is no file.

    Raises:
        StoreError: it cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(path, str(error)) from None
    if not isinstance(value, dict):
        raise _broken(path, "it is not a JSON object")
    for key, kind in (("auths", dict), ("credHelpers", dict), ("credsStore", str)):
        if value.get(key) is not None and not isinstance(value[key], kind):
            raise _broken(path, f"{key} is not what docker would write")
    return value


def _broken(path: Path, why: str) -> StoreError:
    return StoreError(f"cannot read {path}: {why}", hint="mend the file, or remove it")


def credentials(config: dict[str, Any]) -> dict[str, dict[str, str]]:
    """All inline credentials, as oras-py looks for them: by host, in the field ``auth``.

    docker also reads ``username`` and ``password``, and keys with a scheme in front.
    """
    found = {}
    for key, entry in (config.get("auths") or {}).items():
        if not isinstance(entry, dict):
            continue
        auth, user, password = (entry.get(name) for name in ("auth", "username", "password"))
        if not auth and isinstance(user, str) and isinstance(password, str):
            auth = oras.auth.utils.get_basic_auth(user, password)
        if not isinstance(auth, str):
            auth = ""
        host = key if key == DOCKER_HUB_KEY else key.rpartition("://")[2].partition("/")[0]
        found[host] = {"auth": auth} if auth else {}
    return found


def helper(config: dict[str, Any], registry: str) -> str | None:
    """The credential helper that keeps a registry's credentials, if one does."""
    named = (config.get("credHelpers") or {}).get(config_key(registry)) or config.get("credsStore")
    return named if isinstance(named, str) else None


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Replace the file, readable by its owner alone; a link to it stays a link.

    Raises:
        StoreError: it cannot be written.
    """
    target = path.resolve()
    temporary = target.with_name(f".config.json.{secrets.token_hex(8)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(config, file, indent="\t")
            file.write("\n")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror}") from None
