"""``aimage fleet user``: the users of a fleet on its NATS server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.fleet_access import (
    check_one_key,
    fleet_option,
    resolve_names,
)
from clowder_aimage.cli.console.option import Verb, common_options, needs
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.errors import UsageError


@examples(
    "aimage fleet user gpu-3 --output gpu-3.nk",
    "aimage fleet user gateway-1 --role gateway --output gateway-1.nk",
)
@common_options
@click.command(cls=Verb, short_help="Print a user for the configuration of NATS.")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["worker", "gateway", "operator"]),
    default="worker",
    show_default=True,
    help="The program of the user.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Make an nkey, and write its seed to this file, for --nats-nkey.",
)
@click.option("--public", metavar="KEY", help="Public nkey of the user (U...), made elsewhere.")
@fleet_option
def user(name: str, role: str, output: Path | None, public: str | None, **chosen: Any) -> None:
    """Print the user NAME for the configuration of the NATS server, with its permissions.

    A worker joins with NAME as its --worker-name, and can write in this name only. '*' is a user of
    workers that trust each other, with any names. Nothing is changed on the server: add the block
    to "users" of an account in its configuration, and reload it.
    """
    with needs("a fleet", "worker,fleet"):
        from clowder_aimage.fleet.key import SIGNER, FleetKey
        from clowder_aimage.fleet.key_change import build_key
        from clowder_aimage.fleet.key_files import write_seed
        from clowder_aimage.fleet.permission import (
            ANY_WORKER,
            WORKER,
            build_permissions,
            format_user,
            is_worker_name,
        )
    names = resolve_names(chosen)
    if role == WORKER and name != ANY_WORKER and not is_worker_name(name):
        message = (
            "the name of a worker has 1 to 64 letters, digits, '-' and '_', and is not gateway"
        )
        raise UsageError(message)
    check_one_key(output, public)
    permissions = build_permissions(names, role, name)
    if output is not None:
        new = FleetKey.generate(SIGNER)
        write_seed(output, new)
        public = new.public
    else:
        public = build_key("user", "gateway", public or "").public
    value = {
        "name": name,
        "role": role,
        "nkey": public,
        "publish": list(permissions.publish),
        "subscribe": list(permissions.subscribe),
    }
    print_result(value, format_user([f"# {role} {name}", f"nkey: {public}"], permissions))
