"""Credentials: docker's config file and its credential helpers, through oras-py."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from pathlib import Path
from typing import Any

import oras.auth.utils

from clowder_aimage.errors import NotFoundError, StoreError, UnauthorizedError
from clowder_aimage.oci import Reference
from clowder_aimage.registry.connection import Connection, config_key
from clowder_aimage.registry.session import Session


def login(registry: str, username: str, password: str, connection: Connection) -> str:
    """Check credentials with the registry and keep them where docker does.

    Returns:
        where they are kept now.

    Raises:
        UnauthorizedError: the registry does not take them.
        StoreError: the config file cannot be written.
    """
    basic = oras.auth.utils.get_basic_auth(username, password)
    with Session(Reference(registry, "login"), connection, basic_auth=basic) as session:
        session.ping()
    path = connection.docker_config / "config.json"
    config = _read(path)
    helper = _helper(config, registry)
    if helper:
        _run_helper(
            helper, "store", {"ServerURL": registry, "Username": username, "Secret": password}
        )
        return f"docker-credential-{helper}"
    config.setdefault("auths", {})[config_key(registry)] = {"auth": basic}
    _write(path, config)
    return str(path)


def logout(registry: str, connection: Connection) -> None:
    """Forget the credentials of a registry. Raises NotFoundError when there are none."""
    path = connection.docker_config / "config.json"
    config = _read(path)
    helper = _helper(config, registry)
    if helper:
        _run_helper(helper, "erase", registry)
    elif config.get("auths", {}).pop(config_key(registry), None) is None:
        raise NotFoundError(f"no credentials of {registry} in {path}")
    _write(path, config)


def _helper(config: dict[str, Any], registry: str) -> str | None:
    helper = config.get("credHelpers", {}).get(registry) or config.get("credsStore")
    return helper if isinstance(helper, str) else None


def _run_helper(helper: str, verb: str, value: object) -> None:
    """Speak the docker-credential-helpers protocol (its README, "Development")."""
    text = value if isinstance(value, str) else json.dumps(value)
    binary = f"docker-credential-{helper}"
    try:
        subprocess.run([binary, verb], input=text.encode(), check=True, capture_output=True)
    except FileNotFoundError:
        raise UnauthorizedError(
            f"the credential helper {binary} is not installed",
            hint="install it, or remove it from docker's config.json",
        ) from None
    except subprocess.CalledProcessError as error:
        said = (error.stdout + error.stderr).decode(errors="replace").strip()
        raise UnauthorizedError(f"{binary} {verb} failed: {said[:300]}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}", hint="mend or remove the file") from None
    return value if isinstance(value, dict) else {}


def _write(path: Path, config: dict[str, Any]) -> None:
    """Replace the config file, readable by its owner alone."""
    temporary = path.with_name(f".config.json.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(config, file, indent="\t")
            file.write("\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror}") from None
