"""Default locations of this user: the store, the configuration, credentials and certificates.

A user may have no home directory, or one that belongs to another user, as in containers that run
with any user id. Then the files in it count as absent, and the store has to be named.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clowder_aimage import __version__
from clowder_aimage.config.token_file import read_client_token
from clowder_aimage.document.optional_file import warn
from clowder_aimage.document.similarity import find_nearest
from clowder_aimage.errors import UsageError

if TYPE_CHECKING:
    from clowder_aimage.config.trust_policy import UserFiles
    from clowder_aimage.registry import ClientOptions, DialectCache

_T = TypeVar("_T")
# A variable of another program may resemble one.
_CUTOFF = 0.78
SHARED_VARIABLES = tuple(
    f"AIMAGE_{name}"
    for name in (
        "CONFIG ENHANCER FLEET FLEET_KEY HOST KEY_PASSWORD NATS NATS_CA NATS_CERT NATS_CREDS "
        "NATS_KEY NATS_NKEY SIGNING_KEY STORE STORE_SINGLE_WRITER TOKEN TOKEN_FILE TRUSTED_REALMS"
    ).split()
)
# Prefixes of the variables of a server, whose settings are an object of the configuration
_SECTIONS = {
    "worker": "AIMAGE_SERVE_",
    "node": "AIMAGE_NODE_",
    "gateway": "AIMAGE_GATEWAY_",
    "registry": "AIMAGE_REGISTRY_",
}
SINGLE_WRITER = "AIMAGE_STORE_SINGLE_WRITER"
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
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
            close = find_nearest(name, names, cutoff=_CUTOFF, prefix=prefix)
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
            if close := find_nearest(name, variables, cutoff=_CUTOFF, prefix="AIMAGE_"):
                yield name, close


def list_default_stores() -> tuple[Path, ...]:
    """Return the directories in AIMAGE_STORE, else the platform's directory for data.

    The first is written, all are read (XDG Base Directory; macOS Library). Raises UsageError:
    there is neither, as this user has no home directory.
    """
    if directories := [
        name for name in os.environ.get("AIMAGE_STORE", "").split(os.pathsep) if name
    ]:
        return tuple(Path(name) for name in directories)
    if directory := _resolve_platform_directory("XDG_DATA_HOME", ".local/share", "aimage"):
        return (directory,)
    raise UsageError("this user has no home directory for a store", remedy="name_store")


def use_store_settings() -> None:
    """Let stores of this process follow the user's settings, which are read when they matter."""
    from clowder_aimage.layout import lock

    lock.SINGLE_WRITER[:] = [is_single_writer]
    use_trust_settings()


def use_trust_settings() -> None:
    """Let this process follow the policy of signatures."""
    from clowder_aimage.config.trust_policy import use_trust_policy

    use_trust_policy(get_user_files(), read_client_options)


def get_user_files() -> UserFiles:
    """Return the functions that find the configuration of this user."""
    from clowder_aimage.config.trust_policy import UserFiles

    return UserFiles(find_config_file, names_config_file)


def is_single_writer() -> bool:
    """Return True if the user states that this host alone writes the stores. Raises UsageError."""
    if text := os.environ.get(SINGLE_WRITER):
        if (value := _BOOLEANS.get(text.lower())) is None:
            raise UsageError(f"invalid {SINGLE_WRITER}: {text!r}", hint="set it to true or false")
        return value
    from clowder_aimage.document.schema import read_configuration

    section = read_configuration(find_config_file(), lambda document: document.get("store", {}))
    return bool(section.get("single_writer", False))


def open_dialect_cache() -> DialectCache:
    """Return the cache of refused dialects in the platform's state directory."""
    from clowder_aimage.registry import DialectCache

    return DialectCache(_resolve_state_file("registries.json"))


def resolve_history_file() -> Path | None:
    """Return the file of the prompts that were typed, in the platform's state directory."""
    return _resolve_state_file("prompts")


def _resolve_state_file(name: str) -> Path | None:
    # On macOS both are in one directory: the state must be beside the store, not in it.
    program = "aimage-state" if sys.platform == "darwin" else "aimage"
    directory = _resolve_platform_directory("XDG_STATE_HOME", ".local/state", program)
    return directory / name if directory else None


def resolve_fleet_directory(fleet: str) -> Path | None:
    """Return the directory of a fleet's keys, beside the configuration; None without a home."""
    directory = _resolve_xdg_directory("XDG_CONFIG_HOME", ".config")
    return directory / "aimage" / "fleet" / fleet if directory else None


def resolve_names_file() -> Path | None:
    """Return the user's file of names, beside the configuration; None without a home."""
    directory = _resolve_xdg_directory("XDG_CONFIG_HOME", ".config")
    return directory / "aimage" / "names.yaml" if directory else None


def find_config_file() -> Path | None:
    """Return the path of the configuration: config.json, or config.yaml in the same directory.

    It is None if this user has no home directory, or may not look into it.

    Raises UsageError: both exist, or the file in AIMAGE_CONFIG does not exist.
    """
    if explicit := _read_path("AIMAGE_CONFIG"):
        with contextlib.suppress(PermissionError):
            if not explicit.is_file():
                raise UsageError(f"file in AIMAGE_CONFIG not found: {explicit}")
        return explicit
    directory = _resolve_xdg_directory("XDG_CONFIG_HOME", ".config")
    if directory is None:
        return None
    path = directory / "aimage" / "config.json"
    yaml_path = path.with_suffix(".yaml")
    try:
        has_yaml, has_json = yaml_path.is_file(), path.is_file()
    except OSError as error:
        warn(f"{path} is ignored: {error.strerror}")
        return None
    if has_yaml and has_json:
        raise UsageError(f"there are two configurations: {path} and {yaml_path}", hint="remove one")
    return yaml_path if has_yaml else path


def read_user_configuration(parse: Callable[[dict[str, Any]], _T]) -> _T:
    """Parse the configuration of this user for a client; ``parse`` gets an empty one without.

    A file at the default path that cannot be read or is malformed counts as absent, with a warning.
    Servers do not use this: their tokens may be in it.

    Raises:
        UsageError: the file in AIMAGE_CONFIG cannot be used, or a setting is not valid.
    """
    from clowder_aimage.document.schema import read_configuration

    return read_configuration(find_config_file(), parse, is_optional=not names_config_file())


def names_config_file() -> bool:
    """Return True if the environment names the configuration."""
    return _read_path("AIMAGE_CONFIG") is not None


def read_worker_host() -> str | None:
    """Return the value of AIMAGE_HOST."""
    return _read_variable("AIMAGE_HOST")


def read_worker_token() -> str | None:
    """Return the token in AIMAGE_TOKEN, else the first one in the file AIMAGE_TOKEN_FILE.

    Raises UsageError, which does not contain the token.
    """
    if (token := _read_variable("AIMAGE_TOKEN")) is not None:
        if len(token.split()) > 1:
            message = "AIMAGE_TOKEN has more than a token"
            raise UsageError(message, hint="set it to the token alone, without its scope")
        return token
    path = _read_variable("AIMAGE_TOKEN_FILE")
    return read_client_token(Path(path)) if path is not None else None


def _read_variable(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None


def read_client_options(*, ca_file: str | Path | None = None, **options: Any) -> ClientOptions:
    """Return the options of a connection, with the credentials and settings of this user.

    Raises:
        UsageError: the file in AIMAGE_CONFIG cannot be used, or the configuration is not valid.
    """
    from clowder_aimage.registry import ClientOptions
    from clowder_aimage.registry.host_settings import read_settings

    use_trust_settings()

    registries, default = read_settings(find_config_file(), is_optional=not names_config_file())
    return ClientOptions(
        **{**_list_credential_paths(), "user_agent": f"aimage/{__version__}", **options},
        ca_file=None if ca_file is None else Path(ca_file),
        trusted_realms=_parse_realms(os.environ.get("AIMAGE_TRUSTED_REALMS", "")),
        registries=registries,
        default_registry=default,
    )


def _parse_realms(text: str) -> frozenset[str]:
    """Parse a list of hosts; each may also have a scheme, a port and a path, as in a challenge."""
    names = (
        realm.strip().lower().rpartition("://")[2].partition("/")[0] for realm in text.split(",")
    )
    return frozenset(re.sub(r":[0-9]+$", "", name) for name in names if name)


def _resolve_platform_directory(variable: str, usual: str, name: str) -> Path | None:
    if sys.platform == "darwin":
        return _join_home("Library", "Application Support", name)
    directory = _resolve_xdg_directory(variable, usual)
    return directory / name if directory else None


def _resolve_xdg_directory(variable: str, usual: str) -> Path | None:
    """Return the directory in a variable. A relative path is ignored, as XDG requires."""
    return _read_directory(variable) or _join_home(usual)


def _read_directory(variable: str) -> Path | None:
    path = _read_path(variable)
    return path if path and path.is_absolute() else None


def _join_home(*names: str) -> Path | None:
    """Return a path in the home directory of this user, or None without one."""
    try:
        home = Path.home()
    except RuntimeError:
        # There is neither HOME nor an entry for the user id in /etc/passwd.
        return None
    return home.joinpath(*names) if home.is_absolute() else None


def _read_path(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value) if value else None


def _find_certificate_directory() -> Path | None:
    """Return the first directory in SSL_CERT_DIR that exists, as far as this user may know."""
    for name in filter(None, os.environ.get("SSL_CERT_DIR", "").split(os.pathsep)):
        with contextlib.suppress(PermissionError):
            if Path(name).is_dir():
                return Path(name)
    return None


def _list_credential_paths() -> dict[str, Any]:
    """Return the paths of credentials and certificates of docker, containers and OpenSSL."""
    user, runtime = _join_home(".config", "containers"), _read_directory("XDG_RUNTIME_DIR")
    user_directories = (user,) if user else ()
    return {
        "auth_file": _read_path("REGISTRY_AUTH_FILE"),
        "docker_config": _read_path("DOCKER_CONFIG") or _join_home(".docker"),
        "docker_auth_config": os.environ.get("DOCKER_AUTH_CONFIG", "").strip(),
        "container_auth": (
            *((runtime / "containers" / "auth.json",) if runtime else ()),
            *(directory / "auth.json" for directory in user_directories),
        ),
        "ca_bundle": _read_path("SSL_CERT_FILE") or _find_certificate_directory(),
        "cert_dirs": (
            *(directory / "certs.d" for directory in user_directories),
            Path("/etc/containers/certs.d"),
            Path("/etc/docker/certs.d"),
        ),
    }
