"""``aimage fleet key``: the gateways and operators whose messages workers accept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.fleet_access import (
    check_one_key,
    fleet_key_option,
    fleet_options,
    nats_option,
    open_authority,
    open_bucket,
    resolve_names,
    resolve_public_root,
    root_key_option,
    run_with_link,
)
from clowder_aimage.cli.console.option import VerbGroup, common_options, options
from clowder_aimage.cli.console.output import format_table, print_result
from clowder_aimage.errors import UsageError, needs

if TYPE_CHECKING:
    from clowder_aimage.fleet.key import KeySet
    from clowder_aimage.fleet.key_change import Keys
    from clowder_aimage.fleet.link import FleetLink

_FILE = click.Path(dir_okay=False, path_type=Path)
_new_key_options = options(
    click.option("--output", type=_FILE, help="Make a new key, and write its seed to this file."),
    click.option("--public", metavar="KEY", help="Add this public key (U...), made elsewhere."),
)


@click.group(cls=VerbGroup, short_help="Change the gateways and operators of a fleet.")
def key() -> None:
    """Show and change the key set of a fleet: the gateways and operators that workers obey."""


@examples("aimage fleet key list")
@common_options
@key.command("list", short_help="List the keys.")
@nats_option
@fleet_key_option
@fleet_options
def list_keys(nats: str | None, **chosen: Any) -> None:
    """List the gateways and operators of a fleet."""
    with needs("a fleet", "worker,fleet"):
        from clowder_aimage.fleet.key import KeySet
    names = resolve_names(chosen)
    root = resolve_public_root(names, chosen.get("fleet_key"))

    async def read(link: FleetLink) -> KeySet:
        raw, _ = await (await open_bucket(link)).read()
        if not raw:
            message = f"the fleet {names.fleet!r} has no key set"
            raise UsageError(message, remedy="fleet_init", fleet=names.fleet)
        return KeySet.decode(raw, root, names.fleet)

    print_key_set(run_with_link(nats, chosen, read, is_ready=False), root)


@examples(
    "aimage fleet key add gateway-2 --role gateway --output gateway-2.seed",
    "aimage fleet key add ci --role operator --public UABC...",
)
@common_options
@key.command(short_help="Add a gateway or an operator.")
@click.argument("name")
@click.option("--role", type=click.Choice(["gateway", "operator"]), required=True)
@_new_key_options
@root_key_option
@nats_option
@fleet_options
def add(name: str, role: str, output: Path | None, public: str | None, **chosen: Any) -> None:
    """Add the key NAME of a gateway or an operator."""
    with needs("a fleet", "worker,fleet"):
        from clowder_aimage.fleet.key_change import add_key, build_key

    def change(keys: Keys, public: str) -> Keys:
        return add_key(keys, build_key(name, role, public))

    _change_with_key(change, output, public, chosen)


@examples("aimage fleet key rotate gateway --output gateway.new.seed")
@common_options
@key.command(short_help="Replace a key; the present one stays until it is removed.")
@click.argument("name")
@_new_key_options
@root_key_option
@nats_option
@fleet_options
def rotate(name: str, output: Path | None, public: str | None, **chosen: Any) -> None:
    """Replace the key NAME. The present one stays as NAME-1 until 'aimage fleet key remove'."""
    with needs("a fleet", "worker,fleet"):
        from clowder_aimage.fleet.key_change import rotate_key

    _change_with_key(lambda keys, public: rotate_key(keys, name, public), output, public, chosen)


@examples("aimage fleet key remove gateway-1")
@common_options
@key.command(short_help="Remove a key: workers refuse what it signs.")
@click.argument("name")
@root_key_option
@nats_option
@fleet_options
def remove(name: str, **chosen: Any) -> None:
    """Remove the key NAME from the fleet: workers refuse what it signs, from now on."""
    with needs("a fleet", "worker,fleet"):
        from clowder_aimage.fleet.key_change import remove_key

    _change(lambda keys: remove_key(keys, name), chosen)


def _change_with_key(
    change: Callable[[Keys, str], Keys],
    output: Path | None,
    public: str | None,
    chosen: dict[str, Any],
) -> None:
    """Publish a change with a new key, or with one that was made elsewhere."""
    from clowder_aimage.fleet.key import SIGNER, FleetKey
    from clowder_aimage.fleet.key_files import write_seed

    check_one_key(output, public)
    new = FleetKey.generate(SIGNER)

    def apply(keys: Keys) -> Keys:
        changed = change(keys, public or new.public)
        # Before the key is in use.
        if output is not None:
            write_seed(output, new)
        return changed

    _change(apply, chosen)


def _change(change: Callable[[Keys], Keys], chosen: dict[str, Any]) -> None:
    nats, authority = chosen.pop("nats"), open_authority(chosen, chosen.pop("root_key"))
    root = authority.read_root()

    async def publish(link: FleetLink) -> KeySet:
        return await authority.change(await open_bucket(link), change)

    print_key_set(run_with_link(nats, chosen, publish, is_ready=False), root.public)


def print_key_set(key_set: KeySet, root: str) -> None:
    """Print the keys of a fleet."""
    rows = [(key.name, key.role, key.public) for key in key_set.keys]
    value = {
        "fleet": key_set.fleet,
        "root": root,
        "version": key_set.version,
        "keys": [dict(zip(("name", "role", "public"), row, strict=True)) for row in rows],
    }
    print_result(value, format_table([("NAME", "ROLE", "KEY"), *rows]))
