"""``aimage registry``: the store, served to other tools."""

from __future__ import annotations

import click

from clowder_aimage.cli.option import common_options, settings
from clowder_aimage.cli.output import result
from clowder_aimage.errors import UsageError


@click.group(short_help="Be a registry.")
def registry() -> None:
    """Let other tools use the store as a registry."""


@registry.command(short_help="Serve the store by the OCI distribution API.")
@click.option(
    "--addr",
    default="127.0.0.1:5000",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to listen; port 0 picks a free one.",
)
@click.option("--readonly", is_flag=True, help="Answer pulls only.")
@click.option(
    "--allow-remote",
    is_flag=True,
    help="Listen on an address that other machines reach. There is no authentication.",
)
@common_options
def serve(addr: str, readonly: bool, allow_remote: bool) -> None:
    """Serve the store by the OCI distribution API, until it is interrupted.

    Any OCI tool can then pull from it and push to it: the tag t of the repository a/b is the
    AImage a/b:t. The URL is printed, on a line of its own, once connections are accepted.
    """
    try:
        from clowder_aimage.server.serve import serve as serve_layout
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "aiohttp":
            raise
        raise UsageError(
            "serving needs an HTTP server, which is not installed",
            hint="pip install 'clowder-aimage[server]'",
        ) from None
    chosen = settings()
    serve_layout(
        chosen.layout,
        addr,
        readonly=readonly,
        allow_remote=allow_remote,
        on_ready=lambda url: result({"url": url}, url, as_json=chosen.as_json),
    )
