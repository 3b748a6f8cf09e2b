"""``aimage serve``: be a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from clowder_aimage.cli.console.listener import (
    NODE_OPTIONS,
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
from clowder_aimage.errors import UsageError

_PATH = click.Path(dir_okay=False, path_type=Path)


@click.command()
@listening_options("worker", "127.0.0.1:11434")
@click.option("--max-models", type=click.IntRange(1), help="Models in memory. [default: 1]")
@click.option(
    "--text-encoder",
    type=click.Choice(["auto", "keep", "release"]),
    help="Between prompts: in memory, or loaded again for a new one. [default: auto, by --memory]",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="What models may take, such as 12GiB. [default: what the machine has]",
)
@click.option("--queue", type=click.IntRange(0), help="Requests that may wait. [default: 8]")
@click.option(
    "--keep-alive",
    metavar="DURATION",
    help="How long an idle model stays: 5m, 0, or -1 for ever. [default: 5m]",
)
@click.option(
    "--deadline", metavar="DURATION", help="How long a request may take. [default: no limit]"
)
@click.option("--default-model", metavar="REF", help="For requests that name none.")
@click.option("--alias", "aliases", multiple=True, metavar="NAME=REF", help="Another name. Repeat.")
@click.option(
    "--wanted", multiple=True, metavar="REF", help="A model to have before being ready. Repeat."
)
@click.option(
    "--pull",
    type=click.Choice(["never", "if-missing", "always"]),
    help="When a model is fetched that a request names. [default: if-missing]",
)
@click.option(
    "--stream-format",
    type=click.Choice(["auto", "openai", "openai+progress", "ollama"]),
    help="Whose events streams have where the request does not say. [default: auto, by the client]",
)
@click.option(
    "--png-facts/--no-png-facts",
    default=None,
    help="Whether PNG files say how they were made, prompt and seed. [default: they do]",
)
@click.option("--dtype", help="To compute in: float32 (f32) or bfloat16 (bf16).")
@click.option(
    "--public-url",
    metavar="URL",
    help="What links to pictures begin with. [default: the address that was asked]",
)
@click.option("--node", "is_node", is_flag=True, help="Keep models here, too: see 'aimage node'.")
@node_options
@connection_options
@common_options
def serve(
    plain_http: bool,
    insecure: bool,
    ca_file: Path | None,
    aliases: tuple[str, ...],
    is_node: bool,
    **options: Any,
) -> None:
    """Serve models to clients until interrupted.

    The APIs are OpenAI's for images, ollama's for images, and Clowder's; /openapi.json describes
    them. The URL is printed, on a line of its own, once connections are accepted.

    What is not said here comes from AIMAGE_SERVE_ADDR and so on, then from "worker" in the
    configuration: see 'aimage config show'.
    """
    with needs("a worker", "mlx,worker"):
        from clowder_aimage.engine.settings import Settings, gather
        from clowder_aimage.http import log
        from clowder_aimage.node.node_settings import NodeSettings

    chosen = settings()
    kept = {name: options.pop(name) for name in NODE_OPTIONS}
    if not is_node and (odd := next((key for key, value in kept.items() if value), None)):
        raise UsageError(f"--{odd.removesuffix('s')} is for a node", hint="add --node")
    options["aliases"] = ",".join(aliases) or None
    said, _ = gather(Settings, options, config_file(), spell)
    node = gather(NodeSettings, kept, config_file(), spell)[0] if is_node else None
    check_stores(chosen.stores)
    log.configure(said.log_format, "warning" if chosen.quiet else said.log_level)
    run_server(said, node, chosen, connection(plain_http, insecure, ca_file))
