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
    prefix, known = _SECTIONS[section], set(server_variables(section).values())
    for name in os.environ:
        if name.startswith(prefix) and name not in known and not _SERVICE_LINK.search(name):
            close = _nearest(name, known, prefix)
            raise UsageError(
                f"unknown environment variable {name}",
                hint=f"did you mean {close}?" if close else None,
            )


def misspelt_variables() -> Iterator[tuple[str, str]]:
    """Yield environment variables that are none of ours, with the one that they resemble.

    Others are not ours to refuse: scripts have variables such as AIMAGE_DIGEST.
    """
    prefixes = tuple(_SECTIONS.values())
    found = (name for name in os.environ if name.startswith("AIMAGE_"))
    for name in found:
        is_server = name.startswith(prefixes) or _SERVICE_LINK.search(name)
        if name not in SHARED_VARIABLES and not is_server:
            servers = (server_variables(section).values() for section in _SECTIONS)
            known = {*SHARED_VARIABLES, *(one for many in servers for one in many)}
            if close := _nearest(name, known, "AIMAGE_"):
                yield name, close


def _nearest(name: str, known: set[str], prefix: str) -> str | None:
    import difflib

    rests = {one.removeprefix(prefix): one for one in known}
    close = difflib.get_close_matches(name.removeprefix(prefix), rests, n=1, cutoff=0.78)
    return rests[close[0]] if close else None


def default_stores() -> tuple[Path, ...]:
    """Return the directories in AIMAGE_STORE, else the platform's directory for data.

    The first is written, all are read (XDG Base Directory; macOS Library).
    """
    if named := [name for name in os.environ.get("AIMAGE_STORE", "").split(os.pathsep) if name]:
        return tuple(Path(name) for name in named)
    return (_platform_directory("XDG_DATA_HOME", ".local/share", "aimage"),)


def dialect_cache() -> DialectCache:
    """Return the cache of refused dialects in the platform's state directory."""
    from clowder_aimage.registry import DialectCache

    return DialectCache(_state_directory() / "registries.json")


def history_file() -> Path:
    """Return the file of the prompts that were typed, in the platform's state directory."""
    return _state_directory() / "prompts"


def _state_directory() -> Path:
    name = "aimage-state" if sys.platform == "darwin" else "aimage"  # a sibling of the store
    return _platform_directory("XDG_STATE_HOME", ".local/state", name)


def config_file() -> Path:
    """Return the path of the configuration: config.json, or config.yaml beside it.

    Raises UsageError: there are both, or AIMAGE_CONFIG names no file.
    """
    named = _named("AIMAGE_CONFIG")
    if named is not None and not named.is_file():
        raise UsageError(f"file in AIMAGE_CONFIG not found: {named}")
    if named is not None:
        return named
    path = _xdg_directory("XDG_CONFIG_HOME", ".config") / "aimage" / "config.json"
    other = path.with_suffix(".yaml")
    if not other.is_file():
        return path
    if path.is_file():
        raise UsageError(f"there are two configurations: {path} and {other}", hint="remove one")
    return other


def client_options(*, ca_file: str | Path | None = None, **options: Any) -> ClientOptions:
    """Return the options of a connection, with the credentials and settings of this user.

    Raises:
        UsageError: AIMAGE_CONFIG names no file, or the configuration is not valid.
    """
    from clowder_aimage.registry import ClientOptions
    from clowder_aimage.registry.host_settings import read_settings

    realms = os.environ.get("AIMAGE_TRUSTED_REALMS", "").lower().split(",")
    registries, default = read_settings(config_file())
    return ClientOptions(
        **{**_places(), "user_agent": f"aimage/{__version__}", **options},
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
    """Return the directory in a variable; a relative path is ignored."""
    named = _named(variable)
    return named if named and named.is_absolute() else Path.home() / usual


def _named(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


def _places() -> dict[str, Any]:
    """Return the paths of credentials and certificates of docker, containers and OpenSSL."""
    home, runtime = Path.home(), _named("XDG_RUNTIME_DIR")
    user = home / ".config" / "containers"
    certificates = os.environ.get("SSL_CERT_DIR", "").split(os.pathsep)
    return {
        "auth_file": _named("REGISTRY_AUTH_FILE"),
        "docker_config": _named("DOCKER_CONFIG") or home / ".docker",
        "container_auth": (
            *((runtime / "containers" / "auth.json",) if runtime else ()),
            user / "auth.json",
        ),
        "ca_bundle": _named("SSL_CERT_FILE")
        or next((Path(name) for name in certificates if name and Path(name).is_dir()), None),
        "cert_dirs": (
            user / "certs.d",
            Path("/etc/containers/certs.d"),
            Path("/etc/docker/certs.d"),
        ),
    }
