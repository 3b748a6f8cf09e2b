"""``aimage registry``: the store, served to other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clowder_aimage.cli.console.option import (
    common_options,
    connection,
    connection_options,
    settings,
)
from clowder_aimage.cli.console.output import result
from clowder_aimage.errors import UsageError

if TYPE_CHECKING:
    from clowder_aimage.distribution.upstream import UpstreamRegistry


@click.group()
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
    help="Listen where other machines reach it, without asking who they are.",
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Serve only those who know the token in this file's first line.",
)
@click.option(
    "--upstream",
    metavar="HOST[/PREFIX]",
    help="Be a cache of this registry: fetch from it what the store lacks. Answers pulls only.",
)
@connection_options
@common_options
def serve(
    addr: str,
    readonly: bool,
    allow_remote: bool,
    token_file: Path | None,
    upstream: str | None,
    plain_http: bool,
    insecure: bool,
    ca_file: Path | None,
) -> None:
    """Serve the store by the OCI distribution API, until it is interrupted.

    Any OCI tool can then pull from it and push to it: the tag t of the repository a/b is the
    AImage a/b:t. The URL is printed, on a line of its own, once connections are accepted.

    With --upstream, a/b:t is what HOST/PREFIX/a/b:t is called in the store; --plain-http,
    --insecure and --ca-file say how to reach it.
    """
    try:
        from clowder_aimage.distribution import registry_role as server
        from clowder_aimage.http.access import read_token
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "aiohttp":
            raise
        raise UsageError(
            "serving needs an HTTP server, which is not installed",
            hint="pip install 'clowder-aimage[server]'",
        ) from None
    if upstream is None and (plain_http or insecure or ca_file):
        raise UsageError("--plain-http, --insecure and --ca-file are about an --upstream")
    chosen = settings()
    server.serve(
        chosen.layout,
        addr,
        readonly=readonly,
        allow_remote=allow_remote,
        token=read_token(token_file) if token_file else None,
        upstream=_upstream(upstream, plain_http, insecure, ca_file) if upstream else None,
        on_ready=lambda url: result({"url": url}, url, as_json=chosen.as_json),
    )


def _upstream(
    text: str, plain_http: bool, insecure: bool, ca_file: Path | None
) -> UpstreamRegistry:
    from clowder_aimage.distribution.upstream import UpstreamRegistry

    return UpstreamRegistry.parse(text, connection(plain_http, insecure, ca_file))
