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
from clowder_aimage.cli.console.option import Verb, common_options
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.errors import UsageError, needs

_WORKER = "worker"


@examples(
    "aimage fleet user gpu-3 --output gpu-3.nk",
    "aimage fleet user gateway-1 --role gateway --output gateway-1.nk",
)
@common_options
@click.command(cls=Verb, short_help="Print a user for the configuration of NATS.")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice([_WORKER, "gateway", "operator"]),
    default=_WORKER,
    show_default=True,
    help="The program of the user.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Make an nkey, and write its seed to this file, for --nats-nkey.",
)
@click.option("--public", metavar="KEY", help="Public nkey of the user (U...), made elsewhere.")
@click.option(
    "--account",
    metavar="NAME",
    default="aimage",
    show_default=True,
    help="Account of the fleet on the NATS server.",
)
@fleet_option
def user(
    name: str, role: str, output: Path | None, public: str | None, account: str, **chosen: Any
) -> None:
    """Print the user NAME for the configuration of the NATS server.

    For a worker it is an account with its user: add it to "accounts". The worker joins with NAME as
    its --worker-name, and can write in this name only; '*' is for workers that trust each other,
    with any names. A gateway or an operator is a user of the account of the fleet, which also needs
    the "exports" of deploy/nats/nats-server.conf. Nothing is changed on the server: reload its
    configuration.
    """
    with needs("a fleet", "worker,fleet"):
        from clowder_aimage.fleet.key import SIGNER, FleetKey
        from clowder_aimage.fleet.key_change import build_key
        from clowder_aimage.fleet.key_files import write_seed
        from clowder_aimage.fleet.permission import (
            ANY_WORKER,
            build_permissions,
            format_user,
            format_worker_account,
            is_worker_name,
        )
    names = resolve_names(chosen)
    if role == _WORKER and name != ANY_WORKER and not is_worker_name(name):
        message = (
            "the name of a worker has 1 to 64 letters, digits, '-' and '_', and is not gateway"
        )
        raise UsageError(message)
    check_one_key(output, public)
    if output is not None:
        new = FleetKey.generate(SIGNER)
        write_seed(output, new)
        public = new.public
    else:
        public = build_key("user", "gateway", public or "").public
    if role == _WORKER:
        lines = format_worker_account(f"nkey: {public}", names, name, account)
    else:
        permissions = build_permissions(names, role)
        lines = format_user([f"# {role} {name}", f"nkey: {public}"], permissions)
    print_result({"name": name, "role": role, "nkey": public, "lines": lines}, lines)
