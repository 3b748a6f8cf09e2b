"""Options for the connection to a fleet and for its keys, and the values made of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clowder_aimage.cli.console.option import in_section
from clowder_aimage.config.user_directory import resolve_fleet_directory
from clowder_aimage.errors import NetworkError, UsageError, needs

if TYPE_CHECKING:
    from clowder_aimage.fleet.key import FleetKey
    from clowder_aimage.fleet.key_authority import KeyAuthority
    from clowder_aimage.fleet.key_change import KeyBucket
    from clowder_aimage.fleet.key_files import KeyDirectory
    from clowder_aimage.fleet.link import FleetAccess, FleetLink
    from clowder_aimage.fleet.name import FleetNames

# Seconds for the connection.
PATIENCE = 10.0
_T = TypeVar("_T")
_FILE = click.Path(dir_okay=False, path_type=Path)
ACCESS_OPTIONS = (
    *("fleet", "nats_creds", "nats_nkey", "nats_ca", "nats_cert", "nats_key"),
    *("fleet_key", "signing_key"),
)

fleet_option = click.option(
    "--fleet",
    metavar="NAME",
    envvar="AIMAGE_FLEET",
    help="Name of the fleet on its NATS server. [env: AIMAGE_FLEET; default: aimage]",
)
# The section of the help
FLEET = "Fleet"

fleet_options = in_section(
    FLEET,
    fleet_option,
    click.option(
        "--nats-creds",
        type=_FILE,
        envvar="AIMAGE_NATS_CREDS",
        help="File of NATS credentials. [env: AIMAGE_NATS_CREDS]",
    ),
    click.option(
        "--nats-nkey",
        type=_FILE,
        envvar="AIMAGE_NATS_NKEY",
        help="File with the seed of an nkey. [env: AIMAGE_NATS_NKEY]",
    ),
    click.option(
        "--nats-ca",
        type=_FILE,
        envvar="AIMAGE_NATS_CA",
        help="PEM file of the CA of the NATS server. [env: AIMAGE_NATS_CA]",
    ),
    click.option(
        "--nats-cert",
        type=_FILE,
        envvar="AIMAGE_NATS_CERT",
        help="PEM file of the client certificate for NATS. [env: AIMAGE_NATS_CERT]",
    ),
    click.option(
        "--nats-key",
        type=_FILE,
        envvar="AIMAGE_NATS_KEY",
        help="PEM file of its key. [env: AIMAGE_NATS_KEY]",
    ),
)
nats_option = click.option(
    "--nats",
    metavar="URL",
    help="Server of the fleet, such as nats://nats.example.com; several with commas. "
    "[env: AIMAGE_NATS]",
)
fleet_key_option = click.option(
    "--fleet-key",
    metavar="KEY|FILE",
    envvar="AIMAGE_FLEET_KEY",
    help="Public root key of the fleet (O...), or a file that has it. "
    "[env: AIMAGE_FLEET_KEY; default: that of 'aimage fleet init' on this machine]",
)
signing_key_option = click.option(
    "--signing-key",
    type=_FILE,
    envvar="AIMAGE_SIGNING_KEY",
    help="File with the signing key (SU...). "
    "[env: AIMAGE_SIGNING_KEY; default: that of 'aimage fleet init' on this machine]",
)

root_key_option = click.option(
    "--root-key",
    type=_FILE,
    help="File with the root key (SO...). [default: that of 'aimage fleet init' on this machine]",
)


def resolve_nats_servers(servers: str | None) -> str:
    """Return the servers that were named, else those of AIMAGE_NATS. Raises UsageError."""
    servers = servers or os.environ.get("AIMAGE_NATS")
    if not servers:
        hint = "name one with --nats nats://HOST, or in AIMAGE_NATS"
        raise UsageError("no NATS server is set", hint=hint)
    return servers


def resolve_names(chosen: Mapping[str, Any]) -> FleetNames:
    """Return the names of the fleet of ``--fleet``. Raises UsageError."""
    from clowder_aimage.fleet.name import DEFAULT_FLEET, FleetNames

    try:
        return FleetNames(chosen.get("fleet") or DEFAULT_FLEET)
    except ValueError as error:
        raise UsageError(f"--fleet: {error}") from None


def check_one_key(output: Path | None, public: str | None) -> None:
    """Raise UsageError unless a key is to be made, or was made elsewhere."""
    if (output is None) == (public is None):
        hint = "--output FILE writes a new key, --public U... takes one that was made elsewhere"
        raise UsageError("either --output or --public is required", hint=hint)


def open_authority(chosen: Mapping[str, Any], root_file: Path | None) -> KeyAuthority:
    """Return the keys of a fleet on this machine, with its root key. Raises UsageError."""
    from clowder_aimage.fleet.key_authority import KeyAuthority

    names = resolve_names(chosen)
    directory = open_key_directory(names)
    if directory is None:
        hint = "set XDG_CONFIG_HOME to a directory that only you may read"
        raise UsageError("this user has no home directory for the keys of a fleet", hint=hint)
    return KeyAuthority(names, directory, root_file or directory.get_seed_path("root"))


async def open_bucket(link: FleetLink) -> KeyBucket:
    """Return the bucket of the key set, once there is a connection. Raises AImageError."""
    from clowder_aimage.fleet.key_change import KeyBucket

    await link.wait_until_connected(PATIENCE)
    return await KeyBucket.open(link.streams, link.names)


def open_key_directory(names: FleetNames) -> KeyDirectory | None:
    """Return the directory of the keys of a fleet; None if this user has no home directory."""
    from clowder_aimage.fleet.key_files import KeyDirectory

    path = resolve_fleet_directory(names.fleet)
    return KeyDirectory(path) if path is not None else None


def build_fleet_access(nats: str, chosen: Mapping[str, Any], role: str = "") -> FleetAccess:
    """Return the access to a fleet by the servers ``nats`` and the options.

    A worker gets the public root key, a gateway and an operator their signing keys too. Without a
    role there is no key.

    Raises UsageError.
    """
    from clowder_aimage.fleet.link import FleetAccess

    servers = tuple(
        server if "://" in server else f"nats://{server}"
        for server in filter(None, map(str.strip, nats.split(",")))
    )
    names = resolve_names(chosen)
    if bool(chosen.get("nats_cert")) != bool(chosen.get("nats_key")):
        raise UsageError("--nats-cert and --nats-key belong together")
    certificate = chosen.get("nats_cert")
    return FleetAccess(
        servers,
        names,
        root=resolve_public_root(names, chosen.get("fleet_key")) if role else "",
        signer=_resolve_signer(names, role, chosen.get("signing_key")),
        creds=chosen.get("nats_creds"),
        nkey=chosen.get("nats_nkey"),
        ca_file=chosen.get("nats_ca"),
        certificate=(certificate, chosen["nats_key"]) if certificate else None,
    )


def resolve_public_root(names: FleetNames, text: str | None) -> str:
    """Return the public root key of ``--fleet-key``, else that in the directory. Raises UsageError.

    An error says what to do.
    """
    from clowder_aimage.fleet.key_files import read_public_root_key

    if text:
        return read_public_root_key(text)
    directory = open_key_directory(names)
    root = directory.read_public_root() if directory is not None else ""
    if not root:
        message = f"the public root key of the fleet {names.fleet!r} is not known"
        raise UsageError(message, remedy="fleet_key")
    return root


def _resolve_signer(names: FleetNames, role: str, path: Path | None) -> FleetKey | None:
    from clowder_aimage.fleet.key import SIGNER
    from clowder_aimage.fleet.key_files import read_seed
    from clowder_aimage.fleet.name import GATEWAY, OPERATOR

    if role not in (GATEWAY, OPERATOR):
        return None
    directory = open_key_directory(names)
    path = path or (directory.get_seed_path(role) if directory is not None else None)
    if path is None or not path.is_file():
        message = f"there is no signing key for this {role}: {path}"
        raise UsageError(message, remedy="signing_key", role=role)
    return read_seed(path, SIGNER)


def run_with_link(
    nats: str | None,
    chosen: Mapping[str, Any],
    work: Callable[[FleetLink], Awaitable[_T]],
    *,
    role: str = "",
    is_ready: bool = True,
) -> _T:
    """Return the result of ``work`` with a connection as an operator. Raises AImageError.

    With a ``role`` the link can sign.
    """
    # Late: serve and node import this module.
    import asyncio

    with needs("a fleet", "worker,fleet"):
        from clowder_aimage.fleet.link import LOST, FleetLink
        from clowder_aimage.fleet.name import OPERATOR
    # The errors that it logs are raised, too.
    logging.getLogger("aimage").addHandler(logging.NullHandler())
    link = FleetLink(build_fleet_access(resolve_nats_servers(nats), chosen, role), OPERATOR)

    async def run() -> _T:
        async with link.open():
            if is_ready:
                await link.wait_until_ready(PATIENCE)
            return await work(link)

    try:
        return asyncio.run(run())
    except LOST as error:
        raise NetworkError(f"NATS did not answer: {error!r}") from None
