"""Default locations of this user: the store, the configuration, credentials and certificates."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clowder_aimage import __version__
from clowder_aimage.errors import UsageError

if TYPE_CHECKING:
    from clowder_aimage.registry import ClientOptions, DialectCache

SHARED_VARIABLES = tuple(
    f"AIMAGE_{name}"
    for name in (
        "CONFIG ENHANCER FLEET HOST NATS NATS_CA NATS_CERT NATS_CREDS NATS_KEY NATS_NKEY STORE "
        "TOKEN TOKEN_FILE TRUSTED_REALMS"
    ).split()
)
# Prefixes of the variables of a server, whose settings are an object of the configuration
_SECTIONS = {
    "worker": "AIMAGE_SERVE_",
    "node": "AIMAGE_NODE_",
    "gateway": "AIMAGE_GATEWAY_",
    "registry": "AIMAGE_REGISTRY_",
}
# Variables that Kubernetes sets for a Service named like a prefix ("Accessing the Service")
_SERVICE_LINK = re.compile(r"_(SERVICE_(HOST|PORT\w*)|PORT(_\w+)?)$")


def server_variables(section: str) -> dict[str, str]:
    """Return the environment variables of a server, by key in its section of the configuration."""
    from clowder_aimage.document.schema import load

    keys = load("config")["$defs"][section]["properties"]
    return {key: _SECTIONS[section] + re.sub("([A-Z])", r"_\1", key).upper() for key in keys}


def check_variables(section: str) -> None:
    """Raise UsageError for an environment variable of a server that is not a setting."""
    prefix, names = _SECTIONS[section], set(server_variables(section).values())
    for name in os.environ:
        if name.startswith(prefix) and name not in names and not _SERVICE_LINK.search(name):
            close = _nearest(name, names, prefix)
            raise UsageError(
                f"unknown environment variable {name}",
                hint=f"did you mean {close}?" if close else None,
            )


def misspelt_variables() -> Iterator[tuple[str, str]]:
    """Yield unknown environment variables that resemble a known one, with the known one.

    These are not errors, unlike unknown settings of a server: scripts have variables such as
    AIMAGE_DIGEST.
    """
    prefixes = tuple(_SECTIONS.values())
    names = (name for name in os.environ if name.startswith("AIMAGE_"))
    for name in names:
        is_server = name.startswith(prefixes) or _SERVICE_LINK.search(name)
        if name not in SHARED_VARIABLES and not is_server:
            servers = (server_variables(section).values() for section in _SECTIONS)
            variables = {
                *SHARED_VARIABLES,
                *(variable for section_variables in servers for variable in section_variables),
            }
            if close := _nearest(name, variables, "AIMAGE_"):
                yield name, close


def _nearest(name: str, variables: set[str], prefix: str) -> str | None:
    import difflib

    # Without the common prefix, which would make all names similar.
    by_suffix = {variable.removeprefix(prefix): variable for variable in variables}
    close = difflib.get_close_matches(name.removeprefix(prefix), by_suffix, n=1, cutoff=0.78)
    return by_suffix[close[0]] if close else None


def default_stores() -> tuple[Path, ...]:
    """Return the directories in AIMAGE_STORE, else the platform's directory for data.

    The first is written, all are read (XDG Base Directory; macOS Library).
    """
    if directories := [
        name for name in os.environ.get("AIMAGE_STORE", "").split(os.pathsep) if name
    ]:
        return tuple(Path(name) for name in directories)
    return (_platform_directory("XDG_DATA_HOME", ".local/share", "aimage"),)


def dialect_cache() -> DialectCache:
    """Return the cache of refused dialects in the platform's state directory."""
    from clowder_aimage.registry import DialectCache

    return DialectCache(_state_directory() / "registries.json")


def history_file() -> Path:
    """Return the file of the prompts that were typed, in the platform's state directory."""
    return _state_directory() / "prompts"


def _state_directory() -> Path:
    # On macOS both are in one directory: the state must be beside the store, not in it.
    name = "aimage-state" if sys.platform == "darwin" else "aimage"
    return _platform_directory("XDG_STATE_HOME", ".local/state", name)


def config_file() -> Path:
    """Return the path of the configuration: config.json, or config.yaml in the same directory.

    Raises UsageError: both exist, or the file in AIMAGE_CONFIG does not exist.
    """
    explicit = _path_from("AIMAGE_CONFIG")
    if explicit is not None and not explicit.is_file():
        raise UsageError(f"file in AIMAGE_CONFIG not found: {explicit}")
    if explicit is not None:
        return explicit
    path = _xdg_directory("XDG_CONFIG_HOME", ".config") / "aimage" / "config.json"
    yaml_path = path.with_suffix(".yaml")
    if not yaml_path.is_file():
        return path
    if path.is_file():
        raise UsageError(f"there are two configurations: {path} and {yaml_path}", hint="remove one")
    return yaml_path


def client_options(*, ca_file: str | Path | None = None, **options: Any) -> ClientOptions:
    """Return the options of a connection, with the credentials and settings of this user.

    Raises:
        UsageError: the file in AIMAGE_CONFIG does not exist, or the configuration is not valid.
    """
    from clowder_aimage.registry import ClientOptions
    from clowder_aimage.registry.host_settings import read_settings

    realms = os.environ.get("AIMAGE_TRUSTED_REALMS", "").lower().split(",")
    registries, default = read_settings(config_file())
    return ClientOptions(
        **{**_credential_paths(), "user_agent": f"aimage/{__version__}", **options},
        ca_file=None if ca_file is None else Path(ca_file),
        trusted_realms=frozenset(realm.strip() for realm in realms if realm.strip()),
        registries=registries,
        default_registry=default,
    )


def _platform_directory(variable: str, usual: str, name: str) -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / name
    return _xdg_directory(variable, usual) / name


def _xdg_directory(variable: str, usual: str) -> Path:
    """Return the directory in a variable. A relative path is ignored, as XDG requires."""
    directory = _path_from(variable)
    return directory if directory and directory.is_absolute() else Path.home() / usual


def _path_from(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


def _credential_paths() -> dict[str, Any]:
    """Return the paths of credentials and certificates of docker, containers and OpenSSL."""
    home, runtime = Path.home(), _path_from("XDG_RUNTIME_DIR")
    user = home / ".config" / "containers"
    certificates = os.environ.get("SSL_CERT_DIR", "").split(os.pathsep)
    return {
        "auth_file": _path_from("REGISTRY_AUTH_FILE"),
        "docker_config": _path_from("DOCKER_CONFIG") or home / ".docker",
        "container_auth": (
            *((runtime / "containers" / "auth.json",) if runtime else ()),
            user / "auth.json",
        ),
        "ca_bundle": _path_from("SSL_CERT_FILE")
        or next((Path(name) for name in certificates if name and Path(name).is_dir()), None),
        "cert_dirs": (
            user / "certs.d",
            Path("/etc/containers/certs.d"),
            Path("/etc/docker/certs.d"),
        ),
    }
