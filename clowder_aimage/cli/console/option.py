"""Options that several verbs share, and the values they stand for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clowder_aimage import __version__
from clowder_aimage.cli.console.output import META, note
from clowder_aimage.errors import UsageError

if TYPE_CHECKING:
    from clowder_aimage.layout import ImageLayout
    from clowder_aimage.registry import ClientOptions, DialectCache
    from clowder_aimage.registry.host_settings import HostSettings

_F = TypeVar("_F", bound=Callable[..., Any])


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Store an option for the whole command line; the last one given counts."""
    if value:
        ctx.meta[META + str(param.name)] = value


def common_options(function: _F) -> _F:
    """Add ``-q``, ``--json`` and ``--store``, which stand before the verb or after it."""
    for option in (
        click.option(
            "--store",
            type=click.Path(path_type=Path),
            help="The directory of the OCI image layout. [env: AIMAGE_STORE]",
            callback=_remember,
            expose_value=False,
        ),
        click.option(
            "--json",
            "as_json",
            is_flag=True,
            help="Print the result as JSON.",
            callback=_remember,
            expose_value=False,
        ),
        click.option(
            "-q",
            "--quiet",
            is_flag=True,
            help="No progress on stderr.",
            callback=_remember,
            expose_value=False,
        ),
    ):
        function = option(function)
    return function


def connection_options(function: _F) -> _F:
    """Add the options of the connection to a registry."""
    for option in (
        click.option(
            "--ca-file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Trust the certificates in this PEM file.",
        ),
        click.option("--insecure", is_flag=True, help="Do not verify the registry's certificate."),
        click.option(
            "--plain-http",
            is_flag=True,
            help="Use HTTP without TLS. [default for loopback hosts]",
        ),
    ):
        function = option(function)
    return function


def _rate(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Parse bytes per second, written as in the configuration."""
    from clowder_aimage.registry.host_settings import parse_rate

    try:
        return None if value is None else parse_rate(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


limit_option = click.option(
    "--limit-rate",
    "limit",
    callback=_rate,
    metavar="RATE",
    help="Bytes per second in all, such as 500k or 20M. [default: the configuration's]",
)

jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1, 64),
    default=None,
    help="Layers transferred at once. [default: 8, or the configuration's]",
)


@dataclass(frozen=True, slots=True)
class VerbSettings:
    """The common options of this command line."""

    stores: tuple[Path, ...]
    as_json: bool
    quiet: bool

    @property
    def layout(self) -> ImageLayout:
        from clowder_aimage.layout import ImageLayout, LayeredStore

        first, *others = self.stores
        return LayeredStore(self.stores) if others else ImageLayout(first)


def settings() -> VerbSettings:
    """Return the common options, given before the verb or after it."""
    meta = click.get_current_context().meta
    return VerbSettings(
        stores=(meta[META + "store"],) if META + "store" in meta else default_stores(),
        as_json=bool(meta.get(META + "as_json")),
        quiet=bool(meta.get(META + "quiet")),
    )


def default_stores() -> tuple[Path, ...]:
    """Return the directories in AIMAGE_STORE, else the platform's directory for data.

    The first is written, all are read (XDG Base Directory; macOS Library).
    """
    named = [name for name in os.environ.get("AIMAGE_STORE", "").split(os.pathsep) if name]
    if named:
        return tuple(Path(name) for name in named)
    home = Path.home()
    if sys.platform == "darwin":
        return (home / "Library" / "Application Support" / "aimage",)
    base = os.environ.get("XDG_DATA_HOME", "")
    return ((Path(base) if Path(base).is_absolute() else home / ".local" / "share") / "aimage",)


def connection(
    plain_http: bool, insecure: bool, ca_file: Path | None, jobs: int | None = None
) -> ClientOptions:
    """Return the connection that the options and the environment describe."""
    from clowder_aimage.registry import ClientOptions

    if plain_http and (insecure or ca_file):
        raise UsageError(
            "--plain-http does not go with --insecure or --ca-file: there is no certificate"
        )
    if insecure:
        note("the registry's certificate is not verified: the connection is open to interception")
    return ClientOptions(
        plain_http=plain_http,
        insecure=insecure,
        ca_file=ca_file,
        **_places(),
        trusted_realms=_trusted_realms(),
        registries=_registries(),
        told_jobs=jobs or 0,
        user_agent=f"aimage/{__version__}",
    )


def _places() -> dict[str, Any]:
    """Return the paths of credentials and certificates: docker's, containers' and OpenSSL's."""
    home, runtime = Path.home(), _named("XDG_RUNTIME_DIR")
    user = home / ".config" / "containers"
    return {
        "auth_file": _named("REGISTRY_AUTH_FILE"),
        "docker_config": _named("DOCKER_CONFIG") or home / ".docker",
        "container_auth": (
            *((runtime / "containers" / "auth.json",) if runtime else ()),
            user / "auth.json",
        ),
        "ca_bundle": _named("SSL_CERT_FILE") or _cert_dir(),
        "cert_dirs": (
            user / "certs.d",
            Path("/etc/containers/certs.d"),
            Path("/etc/docker/certs.d"),
        ),
    }


def ladder() -> DialectCache:
    """Return the cache of refused dialects, in the platform's directory for state."""
    from clowder_aimage.registry import DialectCache

    home = Path.home()
    if sys.platform == "darwin":
        state = home / "Library" / "Application Support" / "aimage-state"  # the store is beside it
    else:
        named = _named("XDG_STATE_HOME")
        base = named if named and named.is_absolute() else home / ".local" / "state"
        state = base / "aimage"
    return DialectCache(state / "registries.json")


def _cert_dir() -> Path | None:
    """Return the first directory of the list in SSL_CERT_DIR that exists."""
    named = os.environ.get("SSL_CERT_DIR", "").split(os.pathsep)
    return next((Path(name) for name in named if name and Path(name).is_dir()), None)


def _named(variable: str) -> Path | None:
    """Return the path in an environment variable, None where it is empty."""
    value = os.environ.get(variable)
    return Path(value) if value else None


def _trusted_realms() -> frozenset[str]:
    realms = os.environ.get("AIMAGE_TRUSTED_REALMS", "").lower().split(",")
    return frozenset(realm.strip() for realm in realms if realm.strip())


def _registries() -> Mapping[str, HostSettings]:
    """Read the registries of the configuration file."""
    from clowder_aimage.registry.host_settings import read_settings

    return read_settings(config_file())


def config_file() -> Path:
    """Return the path of the configuration. Raises UsageError: AIMAGE_CONFIG names no file."""
    named = _named("AIMAGE_CONFIG")
    if named is not None and not named.is_file():
        raise UsageError(f"AIMAGE_CONFIG names {named}, and there is no such file")
    base = _named("XDG_CONFIG_HOME")
    home = base if base and base.is_absolute() else Path.home() / ".config"
    return named or home / "aimage" / "config.json"
