"""``aimage config``: the settings of this machine and their sources."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import (
    VerbGroup,
    VerbSettings,
    common_options,
    get_settings,
)
from clowder_aimage.cli.console.output import META, format_table, note, print_result
from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.config.user_directory import (
    SINGLE_WRITER,
    check_variables,
    find_config_file,
    is_single_writer,
    list_server_variables,
    resolve_names_file,
)
from clowder_aimage.document.schema import load, read_configuration
from clowder_aimage.errors import UsageError, needs

MASK = "***"
# Other environment variables, as listed in docs/environment.md.
_VARIABLES = (
    *(
        "AIMAGE_ENHANCER",
        "AIMAGE_FLEET",
        "AIMAGE_FLEET_KEY",
        "AIMAGE_HOST",
        "AIMAGE_NATS",
        "AIMAGE_NATS_CA",
        "AIMAGE_NATS_CERT",
        "AIMAGE_NATS_CREDS",
        "AIMAGE_NATS_KEY",
        "AIMAGE_NATS_NKEY",
        "AIMAGE_SIGNING_KEY",
        "AIMAGE_TOKEN",
        "AIMAGE_TOKEN_FILE",
        "AIMAGE_TRUSTED_REALMS",
    ),
    *("DOCKER_CONFIG", "REGISTRY_AUTH_FILE"),
    *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("https_proxy", "http_proxy", "all_proxy", "no_proxy"),
    *("SOURCE_DATE_EPOCH", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"),
)
_SECRET = ("TOKEN", "PASSWORD", "SECRET")


@dataclass(frozen=True, slots=True)
class Value:
    """A setting, its value and its source, and the value as it was typed."""

    name: str
    value: Any
    origin: str
    typed: Any = None

    @property
    def plain(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "origin": self.origin}


@click.group(cls=VerbGroup, short_help="Show the configuration.")
def config() -> None:
    """Show the configuration of this machine."""


@examples("aimage config show", "aimage config show --json")
@common_options
@config.command(short_help="Show every setting and its source.")
def show() -> None:
    """Show every setting and its source, and the file of the configuration.

    Sources are the command line, an environment variable, the configuration, or "default".
    Secrets are not shown.
    """
    chosen, file = get_settings(), find_config_file()
    variables = [(name, os.environ[name]) for name in _VARIABLES if os.environ.get(name)]
    values = [
        _build_file_value(file),
        _build_store_value(chosen),
        _build_single_writer_value(file),
        _build_run_value(file),
        *_iter_signing_settings(file),
        *_iter_server_settings(file),
        *_iter_names(file),
        *_iter_registry_settings(file),
    ]
    values += _iter_host_settings(file)
    values += [Value(name, mask_secret(name, text), "environment") for name, text in variables]
    rows = [["NAME", "VALUE", "ORIGIN"]]
    for setting in values:
        rows.append(
            [
                setting.name,
                _format_value(setting.value if setting.typed is None else setting.typed),
                setting.origin,
            ]
        )
    exists = file is not None and file.is_file()
    path = None if file is None else str(file)
    value = {"file": path, "exists": exists, "settings": [e.plain for e in values]}
    print_result(value, format_table(rows))


def _build_file_value(file: Path | None) -> Value:
    origin = "AIMAGE_CONFIG" if os.environ.get("AIMAGE_CONFIG") else "default"
    if file is None:
        return Value("config", None, origin)
    return Value("config", str(file), origin, None if file.is_file() else f"{file} (not found)")


def _build_store_value(chosen: VerbSettings) -> Value:
    try:
        stores: tuple[Path, ...] = chosen.stores
    except UsageError:
        return Value("store", None, "default")
    is_given = f"{META}store" in click.get_current_context().meta
    origin = "AIMAGE_STORE" if os.environ.get("AIMAGE_STORE") else "default"
    return Value("store", os.pathsep.join(map(str, stores)), "command line" if is_given else origin)


def _build_single_writer_value(file: Path | None) -> Value:
    section = read_configuration(file, lambda document: document.get("store", {}))
    origin = str(file) if "single_writer" in section else "default"
    if os.environ.get(SINGLE_WRITER):
        origin = SINGLE_WRITER
    return Value("store.single_writer", is_single_writer(), origin)


def _build_run_value(file: Path | None) -> Value:
    section = read_configuration(file, lambda document: document.get("run", {}))
    is_given = "remote" in section
    return Value("run.remote", section.get("remote", False), str(file) if is_given else "default")


def _iter_signing_settings(file: Path | None) -> Iterator[Value]:
    """Yield the settings that sign pictures, as written: the names of files, not their content."""
    section = read_configuration(file, lambda document: document.get("picture", {}))
    for name, value in section.get("signing", {}).items():
        yield Value(f"picture.signing.{name}", value, str(file))


def _iter_server_settings(file: Path | None) -> Iterator[Value]:
    """Yield the settings of the worker, the node and the gateway, if their extra is installed."""
    try:
        with needs("a worker", "worker"):
            from clowder_aimage.engine.settings import Settings, camel, gather, read_section
            from clowder_aimage.fleet.gateway.settings import GatewaySettings
            from clowder_aimage.node.settings import NodeSettings
    except UsageError as error:
        note(f"the worker's settings are not shown: {format_advice(error)}")
        return
    for kind in (Settings, NodeSettings, GatewaySettings):
        (values, origins), section = gather(kind, {}, file), read_section(file, kind)
        properties = load("config")["$defs"][kind.SECTION]["properties"]
        for name in kind.model_fields:
            value = values.address if name == "addr" else getattr(values, name)
            origin = origins.get(name, "default")
            typed = None
            # Such as "5m" or "12GiB".
            if type(value) in (int, float):
                usual = properties[camel(name)].get("default")
                typed = usual if origin == "default" else os.environ.get(origin, section.get(name))
            yield Value(f"{kind.SECTION}.{camel(name)}", _encode_value(value), origin, typed)


def _iter_names(file: Path | None) -> Iterator[Value]:
    """Yield the names of models in a registry, and the user's file of names if it exists."""
    listed = read_configuration(file, lambda document: document.get("names", {}))
    for name, reference in listed.items():
        yield Value(f"names.{name}", reference, str(file))
    path = resolve_names_file()
    # A directory that this user may not look into has no file for it.
    with contextlib.suppress(PermissionError):
        if path is not None and path.exists():
            yield Value("names", str(path), "default")


def _iter_registry_settings(file: Path | None) -> Iterator[Value]:
    """Yield the settings of 'aimage registry serve'."""
    check_variables("registry")
    properties = load("config")["$defs"]["registry"]["properties"]
    section = read_configuration(file, lambda document: document.get("registry", {}))
    for key, variable in list_server_variables("registry").items():
        name, usual = f"registry.{key}", properties[key].get("default")
        if text := os.environ.get(variable):
            if properties[key].get("type") == "boolean":
                try:
                    yield Value(name, click.BOOL(text), variable)
                except click.BadParameter as error:
                    raise UsageError(f"{variable}: {error.message}") from None
            else:
                yield Value(name, text, variable)
        else:
            yield Value(name, section.get(key, usual), str(file) if key in section else "default")


def _iter_host_settings(file: Path | None) -> Iterator[Value]:
    """Yield the configuration of each registry as written, and its default protocol."""
    from clowder_aimage.registry import ClientOptions
    from clowder_aimage.registry.host_settings import DEFAULT, read_settings

    hosts, default = read_settings(file)
    options = ClientOptions(registries=hosts)
    if default:
        yield Value(f"registries.{DEFAULT}", default, str(file))
    registries = read_configuration(file, lambda document: document.get("registries", {}))
    for host, entry in registries.items():
        if host == DEFAULT:
            continue
        for name, value in entry.items():
            yield Value(f"registries.{host}.{name}", value, str(file))
        if "plainHttp" not in entry:
            yield Value(f"registries.{host}.plainHttp", options.uses_http(host), "default")


def mask_secret(name: str, value: str) -> str:
    """Return a variable's value with its secret masked: a token, or the password in a URL."""
    if any(word in name.upper() for word in _SECRET) and not name.endswith("_FILE"):
        return MASK
    if "@" not in value or value.startswith("/"):  # a path
        return value
    # Not parsed as a URL: a password may contain # or /.
    before, _, address = value.rpartition("@")
    scheme, separator, _ = before.partition("://")
    return f"{scheme}://{MASK}@{address}" if separator else f"{MASK}@{address}"


def _encode_value(value: Any) -> Any:
    """Return a value for JSON; an unlimited duration is -1."""
    if isinstance(value, float):
        return -1 if math.isinf(value) else value
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _format_value(value: Any) -> str:
    if value is None or value in ([], {}):
        return "-"
    return value if isinstance(value, str) else json.dumps(value)
