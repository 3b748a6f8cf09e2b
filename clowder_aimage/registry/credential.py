"""Login and logout: credentials are stored as docker stores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oras.auth.utils

from clowder_aimage.errors import NotFoundError
from clowder_aimage.registry import docker_config as docker
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.credential_check import check_credentials
from clowder_aimage.registry.credential_helper import get_program, run_helper


def login(registry: str, username: str, password: str, connection: ClientOptions) -> str:
    """Check credentials with the registry and store them as docker does; return the location.

    Raises UnauthorizedError if the registry or a helper refuses them, or StoreError.
    """
    path = connection.login_file
    config = docker.read_config(path)
    basic = oras.auth.utils.get_basic_auth(username, password)
    check_credentials(registry, basic, connection)
    name = docker.find_helper(config, registry)
    if name:
        entry = {
            "ServerURL": docker.build_config_key(registry),
            "Username": username,
            "Secret": password,
        }
        run_helper(name, "store", json.dumps(entry))
        return get_program(name)
    config["auths"] = (config.get("auths") or {}) | {
        docker.build_config_key(registry): {"auth": basic}
    }
    docker.write_config(path, config)
    return str(path)


def logout(registry: str, connection: ClientOptions) -> str:
    """Remove the credentials of a registry from the first file that has any; return its path.

    Raises NotFoundError, StoreError or UnauthorizedError, or UsageError without a file.
    """
    paths = connection.auth_files or (connection.login_file,)
    for path in paths:
        if _remove(registry, path, docker.read_config(path)):
            return str(path)
    places = ", ".join(map(str, paths))
    raise NotFoundError(f"no credentials for {registry} in {places}")


def _remove(registry: str, path: Path, config: dict[str, Any]) -> bool:
    """Remove the credentials of a registry from a file and its helper; return True if it did."""
    name, keys = docker.find_helper(config, registry), docker.list_keys(config, registry)
    if name:
        run_helper(name, "erase", docker.build_config_key(registry))
    for key in keys:
        del config["auths"][key]
    if keys:
        docker.write_config(path, config)
    return bool(name or keys)
