"""``aimage gateway``."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import Any

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.fleet_access import (
    ACCESS_OPTIONS,
    FLEET,
    build_fleet_access,
    fleet_key_option,
    fleet_options,
    nats_option,
    resolve_nats_servers,
    signing_key_option,
)
from clowder_aimage.cli.console.option import (
    daemon_connection_options,
    get_settings,
    in_section,
    start_traces,
    verb,
)
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.cli.verbs.serve import (
    ACCESS,
    LIMITS,
    allow_origin_option,
    caller_options,
    listening_options,
    spell,
)
from clowder_aimage.config.user_directory import find_config_file
from clowder_aimage.errors import needs
from clowder_aimage.oci import Digest, Reference


@examples(
    "aimage gateway --nats nats://nats.example.com",
    "aimage gateway --nats tls://nats.example.com --nats-creds gateway.creds",
)
@verb
@listening_options("gateway", "127.0.0.1:11434")
@in_section(ACCESS, allow_origin_option)
@in_section(
    LIMITS,
    click.option(
        "--queue",
        type=click.IntRange(0),
        help="Number of jobs that may wait in this gateway, however long it takes. [default: 1000]",
    ),
    click.option(
        "--max-wait",
        metavar="DURATION",
        help="Let further jobs wait while the estimated wait is shorter than this; 0 for none. "
        "[default: 30s]",
    ),
    click.option("--deadline", metavar="DURATION", help="Time limit of a job. [default: none]"),
    caller_options("512MiB"),
)
@in_section(FLEET, nats_option, signing_key_option, fleet_key_option)
@fleet_options
@daemon_connection_options
def gateway(**options: Any) -> None:
    """Serve models to clients by the workers of a fleet, until interrupted.

    The APIs are those of 'aimage serve'. A gateway has no models: it puts requests on a queue in
    NATS JetStream, from which workers take them ('aimage serve --join'). There may be any number of
    gateways. The URL is printed when requests are accepted.

    Options that are not given come from the environment (AIMAGE_GATEWAY_ADDR and so on), then from
    "gateway" in the configuration: see 'aimage config show'.
    """
    with needs("a gateway", "worker,fleet"):
        from clowder_aimage.engine.settings import gather
        from clowder_aimage.fleet.gateway.metric import GatewayMetrics
        from clowder_aimage.fleet.gateway.role import GatewayRole
        from clowder_aimage.fleet.gateway.settings import GatewaySettings
        from clowder_aimage.fleet.link import FleetLink
        from clowder_aimage.fleet.name import GATEWAY
        from clowder_aimage.http import log, server
        from clowder_aimage.http.caller_ledger import CallerBounds
        from clowder_aimage.http.listening_socket import listen, listen_tcp_only
        from clowder_aimage.http.metrics_role import MetricsRole
        from clowder_aimage.http.token_file import TokenFile

    access_options = {name: options.pop(name) for name in tuple(options) if name in ACCESS_OPTIONS}
    config, _ = gather(GatewaySettings, options, find_config_file(), spell)
    access = build_fleet_access(resolve_nats_servers(config.nats), access_options, GATEWAY)
    chosen = get_settings()
    start_traces()
    log.configure(config.log_format, "warning" if chosen.quiet else config.log_level)
    connection = chosen.build_server_options()
    tokens = TokenFile(config.token_file) if config.token_file else {}
    opened = listen(
        config.address,
        config.socket,
        is_default=not config.addr,
        has_tokens=bool(tokens),
        allow_remote=config.allow_remote,
        allow_hosts=config.allow_hosts,
    )

    def resolve(reference: Reference) -> Digest:
        from clowder_aimage.registry import Repository

        with Repository(reference, connection) as repository:
            return repository.describe(reference).digest

    metrics = GatewayMetrics()
    with contextlib.ExitStack() as stack:
        listeners = stack.enter_context(contextlib.closing(opened))
        metrics_endpoint = None
        if config.metrics_addr:
            metrics_listeners = stack.enter_context(
                contextlib.closing(listen_tcp_only(config.metrics_addr))
            )
            metrics_endpoint = metrics_listeners, MetricsRole(metrics.format_text)
        # Gateways in containers may have the same process id.
        link = FleetLink(access, GATEWAY, f"{os.getpid()}-{secrets.token_hex(2)}")
        role = GatewayRole(
            link,
            metrics,
            resolve=resolve,
            advice=format_advice,
            tokens=tokens,
            bounds=CallerBounds.of(config),
            deadline=config.deadline,
            most=config.queue,
        )
        server.serve(
            listeners,
            role,
            separate=metrics_endpoint,
            advice=format_advice,
            tokens=tokens,
            grace=config.grace,
            origins=config.allow_origins,
            on_ready=lambda urls: print_result({"urls": urls}, urls),
        )
