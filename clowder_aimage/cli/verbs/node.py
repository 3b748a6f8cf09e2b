"""``aimage node``: keep models on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from clowder_aimage.cli.console.listener import (
    check_stores,
    listening_options,
    needs,
    node_options,
    run_server,
    spell,
)
from clowder_aimage.cli.console.option import (
    common_options,
    config_file,
    connection,
    connection_options,
    settings,
)
from clowder_aimage.cli.verbs.node_status import status
from clowder_aimage.errors import UsageError

_PATH = click.Path(dir_okay=False, path_type=Path)


@click.group(invoke_without_command=True, short_help="Keep models on this machine.")
@listening_options("node", "127.0.0.1:8050")
@node_options
@connection_options
@common_options
@click.pass_context
def node(
    context: click.Context,
    /,
    plain_http: bool,
    insecure: bool,
    ca_file: Path | None,
    **options: Any,
) -> None:
    """Keep the models on this machine that the files in --desired name, until it is interrupted.

    They are fetched from their registries, by way of --neighbour where other nodes have them, and
    followed as their tags move. The node answers Clowder's /content/ and says how it is under
    /v1/node; 'aimage node status' shows that. The URL is printed, on a line of its own, once
    connections are accepted.

    What is not said here comes from AIMAGE_NODE_ADDR and so on, then from "node" in the
    configuration: see 'aimage config show'.
    """
    if context.invoked_subcommand is not None:
        if option := _said(context):
            raise UsageError(f"{option} does not go with a verb of 'aimage node'")
        return
    with needs("a node", "worker"):
        from clowder_aimage.engine.settings import gather
        from clowder_aimage.http import log
        from clowder_aimage.node.node_settings import NodeSettings
    chosen = settings()
    said, _ = gather(NodeSettings, options, config_file(), spell)
    check_stores(chosen.stores)
    log.configure(said.log_format, "warning" if chosen.quiet else said.log_level)
    run_server(said, said, chosen, connection(plain_http, insecure, ca_file))


def _said(context: click.Context) -> str:
    """Return an option of the daemon itself on the command line; else an empty text."""
    source = click.core.ParameterSource.COMMANDLINE
    for each in context.command.params:
        if each.name and context.get_parameter_source(each.name) == source:
            return each.opts[0]
    return ""


node.add_command(status)
