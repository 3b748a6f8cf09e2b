"""``aimage serve``: be a worker."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from clowder_aimage.cli.option import (
    common_options,
    config_file,
    connection,
    connection_options,
    settings,
)
from clowder_aimage.cli.output import result
from clowder_aimage.errors import UsageError

_PATH = click.Path(dir_okay=False, path_type=Path)


@click.command(short_help="Make pictures for clients.")
@click.option(
    "--addr",
    metavar="HOST:PORT",
    help="Where to listen; port 0 picks a free one. [default: 127.0.0.1:11434 without --socket]",
)
@click.option("--socket", type=_PATH, help="Listen on this unix socket.")
@click.option("--max-models", type=click.IntRange(1), help="Models in memory. [default: 1]")
@click.option("--queue", type=click.IntRange(0), help="Requests that may wait. [default: 8]")
@click.option(
    "--keep-alive",
    metavar="DURATION",
    help="How long an idle model stays: 5m, 0, or -1 for ever. [default: 5m]",
)
@click.option(
    "--deadline", metavar="DURATION", help="How long a request may take. [default: no limit]"
)
@click.option(
    "--grace",
    metavar="DURATION",
    help="How long requests get to end when the worker is to. [default: 30s]",
)
@click.option("--default-model", metavar="REF", help="For requests that name none.")
@click.option("--alias", "aliases", multiple=True, metavar="NAME=REF", help="Another name. Repeat.")
@click.option(
    "--wanted", multiple=True, metavar="REF", help="A model to have before being ready. Repeat."
)
@click.option("--dtype", help="To compute in: float32 (f32) or bfloat16 (bf16).")
@click.option("--token-file", type=_PATH, help="Serve only those who know a token in this file.")
@click.option(
    "--allow-host",
    "allow_hosts",
    multiple=True,
    metavar="NAME",
    help="A name that clients may call this worker by. Repeat.",
)
@click.option("--log-format", type=click.Choice(["console", "json"]), help="[default: console]")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="[default: info]",
)
@connection_options
@common_options
def serve(
    plain_http: bool, insecure: bool, ca_file: Path | None, aliases: tuple[str, ...], **options: Any
) -> None:
    """Make pictures for clients, until it is interrupted.

    It speaks OpenAI's images API, the picture part of ollama's, and Clowder's; /openapi.json says
    what. The URL is printed, on a line of its own, once connections are accepted.

    What is not said here comes from AIMAGE_SERVE_ADDR and so on, then from "worker" in the
    configuration: see 'aimage config show'.
    """
    try:
        from clowder_aimage.worker import log
        from clowder_aimage.worker import serve as worker
        from clowder_aimage.worker.settings import effective
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clowder_aimage"):
            raise
        raise UsageError(
            f"a worker needs {error.name}, which is not installed",
            hint="pip install 'clowder-aimage[mlx,worker]'",
        ) from None

    chosen = settings()
    said, _ = effective({**options, "aliases": ",".join(aliases)}, config_file())
    log.configure(said.log_format, "warning" if chosen.quiet else said.log_level)
    worker.serve(
        said,
        chosen.layout,
        connection(plain_http, insecure, ca_file),
        on_ready=lambda names: result({"urls": names}, "\n".join(names), as_json=chosen.as_json),
    )
    _leave()


def _leave() -> NoReturn:
    """Leave at once: a thread that still downloads is not waited for; the next pull goes on."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
