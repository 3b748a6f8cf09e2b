"""Login and logout: credentials are stored as docker stores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clowder_aimage.errors import NotFoundError
from clowder_aimage.registry import docker_config as docker
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.credential_check import check_credentials
from clowder_aimage.registry.credential_helper import (
    erase_from_helper,
    get_program,
    run_helper,
)
from clowder_aimage.registry.credential_trace import VARIABLE, CredentialTrace


def login(registry: str, username: str, password: str, connection: ClientOptions) -> str:
    """Check credentials with the registry and store them as docker does; return the location.

    Raises UnauthorizedError if the registry or a helper refuses them, or StoreError.
    """
    path = connection.login_file
    config = docker.read_config(path)
    basic = docker.encode_basic(username, password)
    check_credentials(registry, basic, connection)
    _warn_of_precedence(registry, config, connection)
    name = docker.find_helper(config, registry)
    if name:
        user, secret = docker.Credential(basic=basic).pair
        entry = {
            "ServerURL": docker.build_config_key(registry),
            "Username": user,
            "Secret": secret,
        }
        run_helper(name, "store", json.dumps(entry))
        return get_program(name)
    config["auths"] = (config.get("auths") or {}) | {
        docker.build_config_key(registry): {"auth": basic}
    }
    docker.write_config(path, config)
    return str(path)


def _warn_of_precedence(registry: str, config: dict[str, Any], connection: ClientOptions) -> None:
    """Warn of credentials that are used instead of those in the file that ``login`` writes."""
    trace = CredentialTrace(registry, connection.on_credential)
    text = connection.docker_auth_config if connection.auth_file is None else ""
    if text and docker.may_have_credential([docker.parse_source(VARIABLE, text, trace)], registry):
        trace.add(VARIABLE, "is used instead of what is stored", is_warning=True)
    for key in docker.list_narrower_keys(config, registry):
        reason = f"the entry {key} is used instead for its repositories"
        trace.add(str(connection.login_file), reason, is_warning=True, remedy="logout")


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
    for key in keys:
        del config["auths"][key]
    if keys:
        docker.write_config(path, config)
    server = docker.build_config_key(registry)
    is_erased = bool(name and erase_from_helper(name, server, is_optional=bool(keys)))
    return is_erased or bool(keys)
