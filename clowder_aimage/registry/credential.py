"""Login and logout: credentials are stored as docker stores them."""

from __future__ import annotations

import json
import subprocess

import oras.auth.utils

from clowder_aimage.errors import NotFoundError, UnauthorizedError
from clowder_aimage.oci import Reference
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.docker_config import (
    config_key,
    helper,
    keys_of,
    read_config,
    run_helper,
    write_config,
)
from clowder_aimage.registry.session import Session


def login(registry: str, username: str, password: str, connection: ClientOptions) -> str:
    """Check credentials with the registry and store them as docker does.

    Returns:
        the file or helper that has them now.

    Raises:
        UnauthorizedError: the registry does not accept them.
        StoreError: the config file cannot be read or written.
    """
    path = connection.login_file
    config = read_config(path)
    basic = oras.auth.utils.get_basic_auth(username, password)
    try:
        with Session(Reference(registry, "login"), connection, basic_auth=basic) as session:
            session.ping()
    except UnauthorizedError as error:
        raise UnauthorizedError(
            f"{registry} does not accept that username and password ({error})"
        ) from None
    name = helper(config, registry)
    if name:
        entry = {"ServerURL": config_key(registry), "Username": username, "Secret": password}
        _change(name, "store", json.dumps(entry))
        return f"docker-credential-{name}"
    config["auths"] = (config.get("auths") or {}) | {config_key(registry): {"auth": basic}}
    write_config(path, config)
    return str(path)


def logout(registry: str, connection: ClientOptions) -> None:
    """Remove the credentials of a registry.

    Raises:
        NotFoundError: there are none.
    """
    path = connection.login_file
    config = read_config(path)
    name, known = helper(config, registry), keys_of(config, registry)
    if name:
        _change(name, "erase", config_key(registry))
    elif not known:
        raise NotFoundError(f"no credentials of {registry} in {path}")
    for key in known:
        del config["auths"][key]
    if known:
        write_config(path, config)


def _change(name: str, verb: str, text: str) -> None:
    """Store or erase credentials with a helper. Raises UnauthorizedError."""
    binary = f"docker-credential-{name}"
    try:
        run_helper(name, verb, text)
    except FileNotFoundError:
        raise UnauthorizedError(
            f"the credential helper {binary} is not installed",
            hint="install it, or remove it from docker's config.json",
        ) from None
    except subprocess.CalledProcessError as error:
        output = (error.stdout + error.stderr).decode(errors="replace").strip()
        raise UnauthorizedError(f"{binary} {verb} failed: {output[:300]}") from None
