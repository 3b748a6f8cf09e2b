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


def list_server_variables(section: str) -> dict[str, str]:
    """Return the environment variables of a server, by key in its section of the configuration."""
    from clowder_aimage.document.schema import load

    keys = load("config")["$defs"][section]["properties"]
    return {key: _SECTIONS[section] + re.sub("([A-Z])", r"_\1", key).upper() for key in keys}


def check_variables(section: str) -> None:
    """Raise UsageError for an environment variable of a server that is not a setting."""
    prefix, names = _SECTIONS[section], set(list_server_variables(section).values())
    for name in os.environ:
        if name.startswith(prefix) and name not in names and not _SERVICE_LINK.search(name):
            close = _find_nearest(name, names, prefix)
            raise UsageError(
                f"unknown environment variable {name}",
                hint=f"did you mean {close}?" if close else None,
            )


def find_misspelt_variables() -> Iterator[tuple[str, str]]:
    """Yield unknown environment variables that resemble a known one, with the known one.

    These are not errors, unlike unknown settings of a server: scripts have variables such as
    AIMAGE_DIGEST.
    """
    prefixes = tuple(_SECTIONS.values())
    names = (name for name in os.environ if name.startswith("AIMAGE_"))
    for name in names:
        is_server = name.startswith(prefixes) or _SERVICE_LINK.search(name)
        if name not in SHARED_VARIABLES and not is_server:
            servers = (list_server_variables(section).values() for section in _SECTIONS)
            variables = {
                *SHARED_VARIABLES,
                *(variable for section_variables in servers for variable in section_variables),
            }
            if close := _find_nearest(name, variables, "AIMAGE_"):
                yield name, close


def _find_nearest(name: str, variables: set[str], prefix: str) -> str | None:
    import difflib

    # Without the common prefix, which would make all names similar.
    by_suffix = {variable.removeprefix(prefix): variable for variable in variables}
    close = difflib.get_close_matches(name.removeprefix(prefix), by_suffix, n=1, cutoff=0.78)
    return by_suffix[close[0]] if close else None


def list_default_stores() -> tuple[Path, ...]:
    """Return the directories in AIMAGE_STORE, else the platform's directory for data.

    The first is written, all are read (XDG Base Directory; macOS Library).
    """
    if directories := [
        name for name in os.environ.get("AIMAGE_STORE", "").split(os.pathsep) if name
    ]:
        return tuple(Path(name) for name in directories)
    return (_resolve_platform_directory("XDG_DATA_HOME", ".local/share", "aimage"),)


def open_dialect_cache() -> DialectCache:
    """Return the cache of refused dialects in the platform's state directory."""
    from clowder_aimage.registry import DialectCache

    return DialectCache(_resolve_state_directory() / "registries.json")


def resolve_history_file() -> Path:
    """Return the file of the prompts that were typed, in the platform's state directory."""
    return _resolve_state_directory() / "prompts"


def _resolve_state_directory() -> Path:
    # On macOS both are in one directory: the state must be beside the store, not in it.
    name = "aimage-state" if sys.platform == "darwin" else "aimage"
    return _resolve_platform_directory("XDG_STATE_HOME", ".local/state", name)


def find_config_file() -> Path:
    """Return the path of the configuration: config.json, or config.yaml in the same directory.

    Raises UsageError: both exist, or the file in AIMAGE_CONFIG does not exist.
    """
    explicit = _read_path("AIMAGE_CONFIG")
    if explicit is not None and not explicit.is_file():
        raise UsageError(f"file in AIMAGE_CONFIG not found: {explicit}")
    if explicit is not None:
        return explicit
    path = _resolve_xdg_directory("XDG_CONFIG_HOME", ".config") / "aimage" / "config.json"
    yaml_path = path.with_suffix(".yaml")
    if not yaml_path.is_file():
        return path
    if path.is_file():
        raise UsageError(f"there are two configurations: {path} and {yaml_path}", hint="remove one")
    return yaml_path


def read_client_options(*, ca_file: str | Path | None = None, **options: Any) -> ClientOptions:
    """Return the options of a connection, with the credentials and settings of this user.

    Raises:
        UsageError: the file in AIMAGE_CONFIG does not exist, or the configuration is not valid.
    """
    from clowder_aimage.registry import ClientOptions
    from clowder_aimage.registry.host_settings import read_settings

    realms = os.environ.get("AIMAGE_TRUSTED_REALMS", "").lower().split(",")
    registries, default = read_settings(find_config_file())
    return ClientOptions(
        **{**_list_credential_paths(), "user_agent": f"aimage/{__version__}", **options},
        ca_file=None if ca_file is None else Path(ca_file),
        trusted_realms=frozenset(realm.strip() for realm in realms if realm.strip()),
        registries=registries,
        default_registry=default,
    )


def _resolve_platform_directory(variable: str, usual: str, name: str) -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / name
    return _resolve_xdg_directory(variable, usual) / name


def _resolve_xdg_directory(variable: str, usual: str) -> Path:
    """Return the directory in a variable. A relative path is ignored, as XDG requires."""
    directory = _read_path(variable)
    return directory if directory and directory.is_absolute() else Path.home() / usual


def _read_path(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


def _list_credential_paths() -> dict[str, Any]:
    """Return the paths of credentials and certificates of docker, containers and OpenSSL."""
    home, runtime = Path.home(), _read_path("XDG_RUNTIME_DIR")
    user = home / ".config" / "containers"
    certificates = os.environ.get("SSL_CERT_DIR", "").split(os.pathsep)
    return {
        "auth_file": _read_path("REGISTRY_AUTH_FILE"),
        "docker_config": _read_path("DOCKER_CONFIG") or home / ".docker",
        "container_auth": (
            *((runtime / "containers" / "auth.json",) if runtime else ()),
            user / "auth.json",
        ),
        "ca_bundle": _read_path("SSL_CERT_FILE")
        or next((Path(name) for name in certificates if name and Path(name).is_dir()), None),
        "cert_dirs": (
            user / "certs.d",
            Path("/etc/containers/certs.d"),
            Path("/etc/docker/certs.d"),
        ),
    }
