"""Login and logout: credentials are stored as docker stores them."""

from __future__ import annotations

import json

import oras.auth.utils

from clowder_aimage.errors import NotFoundError, UnauthorizedError
from clowder_aimage.oci import Reference
from clowder_aimage.registry import docker_config as docker
from clowder_aimage.registry.client_options import ClientOptions
from clowder_aimage.registry.session import Session


def login(registry: str, username: str, password: str, connection: ClientOptions) -> str:
    """Check credentials with the registry and store them as docker does; return the location.

    Raises UnauthorizedError if the registry or a helper refuses them, or StoreError.
    """
    path = connection.login_file
    config = docker.read_config(path)
    basic = oras.auth.utils.get_basic_auth(username, password)
    try:
        with Session(Reference(registry, "login"), connection, basic_auth=basic) as session:
            session.ping()
    except UnauthorizedError as error:
        reason = error.facts.get("reason", error)
        raise UnauthorizedError(
            f"login failed: {registry} rejected the username or password ({reason})"
        ) from None
    name = docker.find_helper(config, registry)
    if name:
        entry = {
            "ServerURL": docker.build_config_key(registry),
            "Username": username,
            "Secret": password,
        }
        docker.run_helper(name, "store", json.dumps(entry))
        return f"docker-credential-{name}"
    config["auths"] = (config.get("auths") or {}) | {
        docker.build_config_key(registry): {"auth": basic}
    }
    docker.write_config(path, config)
    return str(path)


def logout(registry: str, connection: ClientOptions) -> None:
    """Remove the credentials of a registry. Raises NotFoundError."""
    path = connection.login_file
    config = docker.read_config(path)
    name, keys = docker.find_helper(config, registry), docker.list_keys(config, registry)
    if name:
        docker.run_helper(name, "erase", docker.build_config_key(registry))
    elif not keys:
        raise NotFoundError(f"no credentials for {registry} in {path}")
    for key in keys:
        del config["auths"][key]
    if keys:
        docker.write_config(path, config)
