"""``aimage registry``: the store, served to other tools."""

from __future__ import annotations

from pathlib import Path

import click

from clowder_aimage.cli.console.option import (
    VerbGroup,
    common_options,
    daemon_connection_options,
    needs,
    settings,
    start_traces,
)
from clowder_aimage.cli.console.output import result
from clowder_aimage.cli.verbs.serve import metrics_and_log_options
from clowder_aimage.errors import UsageError


@click.group(cls=VerbGroup)
def registry() -> None:
    """Serve the store as an OCI registry."""


@common_options
@registry.command(short_help="Serve the store over the OCI distribution API.")
@click.option(
    "--addr",
    default="127.0.0.1:5005",
    show_default=True,
    metavar="HOST:PORT",
    help="Address to listen on; port 0 selects a free one.",
)
@click.option("--readonly", is_flag=True, help="Allow pulls only.")
@click.option(
    "--allow-remote", is_flag=True, help="Accept requests from other machines without a token."
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Require the token in the first line of this file.",
)
@click.option(
    "--upstream",
    metavar="HOST[/PREFIX]",
    help="Cache this registry: fetch missing content from it. Allows pulls only.",
)
@metrics_and_log_options("AIMAGE_REGISTRY_")
@daemon_connection_options
def serve(
    addr: str,
    readonly: bool,
    allow_remote: bool,
    token_file: Path | None,
    upstream: str | None,
    metrics_addr: str | None,
    log_format: str | None,
    log_level: str | None,
) -> None:
    """Serve the store over the OCI distribution API, until it is interrupted.

    Any OCI tool can then pull from it and push to it: the tag t of the repository a/b is the
    AImage a/b:t. The URL is printed when requests are accepted.

    With --upstream, a/b:t of this registry is HOST/PREFIX/a/b:t in the store; --plain-http,
    --insecure and --ca-file apply to the connection to HOST.

    Each request is logged on stderr. /metrics has the metrics for Prometheus.
    """
    with needs("a registry", "server"):
        from clowder_aimage.distribution import registry_role as server
        from clowder_aimage.distribution.upstream import UpstreamRegistry
        from clowder_aimage.http import log
        from clowder_aimage.http.access import read_token
    chosen = settings()
    if upstream is None and chosen.has_connection:
        raise UsageError("--plain-http, --insecure and --ca-file require --upstream")
    log.configure(log_format or log.CONSOLE, "warning" if chosen.quiet else log_level or "info")
    start_traces()
    server.serve(
        chosen.layout,
        addr,
        readonly=readonly,
        allow_remote=allow_remote,
        token=read_token(token_file) if token_file else None,
        upstream=UpstreamRegistry.parse(upstream, chosen.connection()) if upstream else None,
        metrics_address=metrics_addr,
        on_ready=lambda url: result({"url": url}, url),
    )
