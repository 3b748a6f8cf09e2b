"""``aimage registry``: the store, served to other tools."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import (
    VerbGroup,
    VerbSettings,
    common_options,
    daemon_connection_options,
    get_settings,
    in_section,
    parse_with,
    start_traces,
)
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.cli.verbs.serve import ACCESS, metrics_and_log_options, option
from clowder_aimage.config.token_file import REGISTRY_SCOPES
from clowder_aimage.config.user_directory import check_variables, find_config_file
from clowder_aimage.content.unit import parse_size
from clowder_aimage.document.schema import read_configuration
from clowder_aimage.errors import UsageError, needs
from clowder_aimage.model.hardware import count_cores

PREFIX = "AIMAGE_REGISTRY_"
MAX_PROCESSES = 256
_option = partial(option, prefix=PREFIX)


def parse_processes(text: str) -> int:
    """Return a number of processes; ``auto`` and ``0`` are one for each core. Raises ValueError."""
    if text.strip().lower() in ("auto", "0"):
        return count_cores()
    if text.isascii() and text.isdigit() and int(text) <= MAX_PROCESSES:
        return int(text)
    raise ValueError(f"expected auto, or a number up to {MAX_PROCESSES}, not {text[:40]!r}")


@click.group(cls=VerbGroup)
def registry() -> None:
    """Serve the store as an OCI registry."""


@examples(
    "aimage registry serve --addr 127.0.0.1:5050",
    "aimage registry serve --upstream registry.example.com",
)
@common_options
@registry.command(short_help="Serve the store over the OCI distribution API.")
@in_section(
    ACCESS,
    _option(
        "--addr",
        default="127.0.0.1:5005",
        show_default=True,
        metavar="HOST:PORT",
        help="Address to listen on; port 0 selects a free one.",
    ),
    _option(
        "--token-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Require a token of this file: lines 'read TOKEN', 'write TOKEN' or 'admin TOKEN'.",
    ),
    _option(
        "--allow-remote", is_flag=True, help="Accept requests from other machines without a token."
    ),
    _option("--readonly", is_flag=True, help="Allow pulls only."),
    _option(
        "--processes",
        metavar="N",
        default="1",
        show_default=True,
        callback=parse_with(parse_processes),
        help="Processes that serve the address; 'auto' is one for each core.",
    ),
)
@in_section(
    "Content",
    _option(
        "--upstream",
        metavar="HOST[/PREFIX]",
        help="Cache this registry: fetch missing content from it. Allows pulls only.",
    ),
    _option(
        "--upload-quota",
        metavar="SIZE",
        callback=parse_with(parse_size),
        help="Bytes that all unfinished uploads may have together, such as 20GiB. "
        "[default: no limit]",
    ),
)
@metrics_and_log_options(PREFIX)
@daemon_connection_options
def serve(**options: Any) -> None:
    """Serve the store over the OCI distribution API, until it is interrupted.

    Any OCI tool can then pull from it and push to it: the tag t of the repository a/b is the
    AImage a/b:t. The URL is printed when requests are accepted.

    With --upstream, a/b:t of this registry is HOST/PREFIX/a/b:t in the store; --plain-http,
    --insecure and --ca-file apply to the connection to HOST.

    With --processes, several processes accept connections: reads and pushes of many clients use
    several cores, and any process continues an upload of another one.

    Each request is logged on stderr. /metrics has the metrics for Prometheus.

    Options that are not given come from the environment (AIMAGE_REGISTRY_ADDR and so on), then from
    "registry" in the configuration: see 'aimage config show'.
    """
    check_variables("registry")
    context, chosen = click.get_current_context(), get_settings()
    for name, value in read_registry_section(find_config_file()).items():
        if context.get_parameter_source(name) is ParameterSource.DEFAULT:
            options[name] = value
    with contextlib.ExitStack() as stack:
        if options["processes"] > 1:
            # prometheus_client reads it when it is imported, and keeps the metrics there
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="aimage-metrics-"))
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = directory
        _serve(chosen, options)


def _serve(chosen: VerbSettings, options: Mapping[str, Any]) -> None:
    with needs("a registry", "server"):
        from clowder_aimage.distribution import role as server
        from clowder_aimage.distribution.upstream import UpstreamRegistry
        from clowder_aimage.http import log
        from clowder_aimage.http.token_file import TokenFile
    token_file, upstream = options["token_file"], options["upstream"]
    if upstream is None and chosen.has_connection:
        raise UsageError("--plain-http, --insecure and --ca-file require --upstream")
    level = "warning" if chosen.quiet else options["log_level"] or "info"
    log.configure(options["log_format"] or log.CONSOLE, level)
    start_traces()
    server.serve(
        chosen.layout,
        options["addr"],
        readonly=options["readonly"],
        allow_remote=options["allow_remote"],
        tokens=TokenFile(token_file, scopes=REGISTRY_SCOPES) if token_file else None,
        upload_quota=options["upload_quota"] or 0,
        upstream=UpstreamRegistry.parse(upstream, chosen.build_server_options())
        if upstream
        else None,
        metrics_address=options["metrics_addr"],
        processes=options["processes"],
        on_ready=lambda url: print_result({"url": url}, url),
    )


def read_registry_section(file: Path | None) -> dict[str, Any]:
    """Return the section ``registry`` of a configuration, by option. Raises UsageError."""
    section = read_configuration(file, lambda document: document.get("registry", {}))
    values = {re.sub("([A-Z])", r"_\1", key).lower(): value for key, value in section.items()}
    if "upload_quota" in values:
        values["upload_quota"] = parse_size(str(values["upload_quota"]))
    if "processes" in values:
        try:
            values["processes"] = parse_processes(str(values["processes"]))
        except ValueError as error:
            raise UsageError(f"{file}: registry.processes: {error}") from None
    if file and "token_file" in values:
        values["token_file"] = file.parent / values["token_file"]
    return values
