"""Logging in and out: credentials are kept where docker keeps them."""

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
    write_config,
)
from clowder_aimage.registry.session import Session


def login(registry: str, username: str, password: str, connection: ClientOptions) -> str:
    """Check credentials with the registry and keep them where docker does.

    Returns:
        where they are kept now.

    Raises:
        UnauthorizedError: the registry does not take them.
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
        _run_helper(name, "store", json.dumps(entry))
        return f"docker-credential-{name}"
    config["auths"] = (config.get("auths") or {}) | {config_key(registry): {"auth": basic}}
    write_config(path, config)
    return str(path)


def logout(registry: str, connection: ClientOptions) -> None:
    """Forget the credentials of a registry. Raises NotFoundError when there are none."""
    path = connection.login_file
    config = read_config(path)
    name, known = helper(config, registry), keys_of(config, registry)
    if name:
        _run_helper(name, "erase", config_key(registry))
    elif not known:
        raise NotFoundError(f"no credentials of {registry} in {path}")
    for key in known:
        del config["auths"][key]
    if known:
        write_config(path, config)


def _run_helper(name: str, verb: str, text: str) -> None:
    binary = f"docker-credential-{name}"
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
