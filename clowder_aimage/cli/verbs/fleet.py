"""``aimage fleet``: prepare and observe a fleet of workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import VerbGroup, common_options, needs, options, parse_with
from clowder_aimage.cli.console.output import format_count, format_size, format_table, print_result
from clowder_aimage.errors import NetworkError, UsageError

if TYPE_CHECKING:
    from clowder_aimage.fleet.link import FleetAccess, FleetLink

# Seconds for the connection.
PATIENCE = 10.0
_T = TypeVar("_T")
_Json = Mapping[str, Any]


_FILE = click.Path(dir_okay=False, path_type=Path)
ACCESS = ("fleet", "nats_creds", "nats_nkey", "nats_ca", "nats_cert", "nats_key")

fleet_options = options(
    click.option(
        "--fleet",
        metavar="NAME",
        envvar="AIMAGE_FLEET",
        help="Name of the fleet on its NATS server. [env: AIMAGE_FLEET; default: aimage]",
    ),
    click.option(
        "--nats-creds",
        type=_FILE,
        envvar="AIMAGE_NATS_CREDS",
        help="File of NATS credentials. [env: AIMAGE_NATS_CREDS]",
    ),
    click.option(
        "--nats-nkey",
        type=_FILE,
        envvar="AIMAGE_NATS_NKEY",
        help="File with the seed of an nkey. [env: AIMAGE_NATS_NKEY]",
    ),
    click.option(
        "--nats-ca",
        type=_FILE,
        envvar="AIMAGE_NATS_CA",
        help="PEM file of the CA of the NATS server. [env: AIMAGE_NATS_CA]",
    ),
    click.option(
        "--nats-cert",
        type=_FILE,
        envvar="AIMAGE_NATS_CERT",
        help="PEM file of the client certificate for NATS. [env: AIMAGE_NATS_CERT]",
    ),
    click.option(
        "--nats-key",
        type=_FILE,
        envvar="AIMAGE_NATS_KEY",
        help="PEM file of its key. [env: AIMAGE_NATS_KEY]",
    ),
)
nats_option = click.option(
    "--nats",
    metavar="URL",
    help="Server of the fleet, such as nats://nats.example.com; several with commas. "
    "[env: AIMAGE_NATS]",
)


def resolve_nats_servers(servers: str | None) -> str:
    """Return the servers that were named, else those of AIMAGE_NATS. Raises UsageError."""
    servers = servers or os.environ.get("AIMAGE_NATS")
    if not servers:
        hint = "name one with --nats nats://HOST, or in AIMAGE_NATS"
        raise UsageError("no NATS server was named", hint=hint)
    return servers


def build_fleet_access(nats: str, chosen: Mapping[str, Any]) -> FleetAccess:
    """Return the access to a fleet by the servers ``nats`` and the options. Raises UsageError."""
    from clowder_aimage.fleet.link import FleetAccess
    from clowder_aimage.fleet.name import DEFAULT_FLEET, FleetNames

    servers = tuple(
        server if "://" in server else f"nats://{server}"
        for server in filter(None, map(str.strip, nats.split(",")))
    )
    try:
        names = FleetNames(chosen.get("fleet") or DEFAULT_FLEET)
    except ValueError as error:
        raise UsageError(f"--fleet: {error}") from None
    if bool(chosen.get("nats_cert")) != bool(chosen.get("nats_key")):
        raise UsageError("--nats-cert and --nats-key belong together")
    certificate = chosen.get("nats_cert")
    return FleetAccess(
        servers,
        names,
        creds=chosen.get("nats_creds"),
        nkey=chosen.get("nats_nkey"),
        ca_file=chosen.get("nats_ca"),
        certificate=(certificate, chosen["nats_key"]) if certificate else None,
    )


def _parse_duration(text: str) -> float:
    with needs("a fleet", "worker,fleet"):
        from clowder_aimage.engine.settings import parse_duration
    return parse_duration(text)


def _parse_size(text: str) -> int:
    from clowder_aimage.content.unit import parse_size

    return parse_size(text)


@click.group(cls=VerbGroup, short_help="Prepare and observe a fleet of workers.")
def fleet() -> None:
    """Prepare and observe a fleet: workers that take jobs from a queue in NATS JetStream."""


@examples(
    "aimage fleet init --nats nats://nats.example.com", "aimage fleet init --replicas 3 --keep 24h"
)
@common_options
@fleet.command(short_help="Make the streams of a fleet.")
@nats_option
@click.option(
    "--replicas",
    type=click.IntRange(1, 5),
    default=1,
    show_default=True,
    help="Copies of each message: 3 in a cluster of NATS servers.",
)
@click.option(
    "--keep",
    metavar="DURATION",
    default="1h",
    show_default=True,
    callback=parse_with(_parse_duration),
    help="Time that results are kept for repeated requests.",
)
@click.option(
    "--max-bytes",
    metavar="SIZE",
    default="8GiB",
    show_default=True,
    callback=parse_with(_parse_size),
    help="Maximum size of results that are kept; a fourth of it more for jobs, and for files.",
)
@fleet_options
def init(nats: str | None, replicas: int, keep: float, max_bytes: int, **chosen: Any) -> None:
    """Make the streams of a fleet on its NATS server, or change them to these options.

    Jobs and results in the streams stay.
    """
    with needs("a fleet", "worker,fleet"):
        from clowder_aimage.fleet.stream import FleetShape
    shape = FleetShape(replicas=replicas, keep=keep, max_bytes=max_bytes)

    async def make(link: FleetLink) -> list[str]:
        return await link.make(shape, PATIENCE)

    created = _run(nats, chosen, make, is_ready=False)
    name = chosen.get("fleet") or "aimage"
    text = f"made {', '.join(created)}" if created else f"the fleet {name} is as it should be"
    print_result({"fleet": name, "made": created}, text)


@examples("aimage fleet status --nats nats://nats.example.com")
@common_options
@fleet.command(short_help="Show the workers and the queue of a fleet.")
@nats_option
@fleet_options
def status(nats: str | None, **chosen: Any) -> None:
    """Show each worker of a fleet, and the number of jobs that wait for each model."""

    async def read(link: FleetLink) -> dict[str, Any]:
        from clowder_aimage.fleet.gateway.status import FleetStatus
        from clowder_aimage.fleet.worker_registry import read_workers

        return asdict(await FleetStatus(link, await read_workers(link)).read())

    fleet_status = _run(nats, chosen, read)
    print_result(fleet_status, format_status(fleet_status))


@examples("aimage fleet drain gpu-3", "aimage fleet drain gpu-3 --undo")
@common_options
@fleet.command(short_help="Let a worker end its work and take no more.")
@click.argument("worker")
@click.option("--undo", is_flag=True, help="Let the worker take jobs again.")
@nats_option
@fleet_options
def drain(worker: str, undo: bool, nats: str | None, **chosen: Any) -> None:
    """Let WORKER end its jobs and take no more, until --undo or its next start.

    WORKER is its name in 'aimage fleet status'. Its own API is not affected.
    """

    async def order(link: FleetLink) -> dict[str, Any]:
        from clowder_aimage.fleet.worker_registry import give_order

        return await give_order(link, worker, "resume" if undo else "drain")

    worker_status = _run(nats, chosen, order)
    verb = (
        "takes jobs"
        if undo
        else f"takes no more jobs; {format_count(worker_status['running'], 'job')} left"
    )
    print_result(worker_status, f"{worker} {verb}")


def _run(
    nats: str | None,
    chosen: _Json,
    work: Callable[[FleetLink], Awaitable[_T]],
    *,
    is_ready: bool = True,
) -> _T:
    """Return the result of ``work`` with a connection. Raises AImageError."""
    # Late: serve and node import this module.
    import asyncio

    with needs("a fleet", "worker,fleet"):
        from clowder_aimage.fleet.link import LOST, OPERATOR, FleetLink
    # The errors that it logs are raised, too.
    logging.getLogger("aimage").addHandler(logging.NullHandler())
    link = FleetLink(build_fleet_access(resolve_nats_servers(nats), chosen), OPERATOR)

    async def run() -> _T:
        async with link.open():
            if is_ready:
                await link.wait_until_ready(PATIENCE)
            return await work(link)

    try:
        return asyncio.run(run())
    except LOST as error:
        raise NetworkError(f"NATS did not answer: {error!r}") from None


def format_status(status: _Json) -> list[str]:
    """Return the status of a fleet as text."""
    workers, waiting = status["workers"], status["jobs"]
    head = [
        f"fleet    {status['fleet']}: {format_count(len(workers), 'worker')}, "
        f"{format_count(waiting, 'job')} on the queue, {status['given_up']} given up",
        f"stored   {format_size(status['stored'])} of {format_size(status['room'])}",
    ]
    names = {digest: name for worker in workers for name, digest in worker["models"].items()}
    rows = [("WORKER", "JOBS", "DONE", "PER MIN", "MODELS", "LOADED", "STATE")]
    for worker in workers:
        loaded = ", ".join(names.get(digest, digest[7:19]) for digest in worker["loaded"]) or "-"
        jobs, rate = f"{worker['running']}/{worker['slots']}", f"{worker['rate']:g}"
        state = "draining" if worker["is_draining"] else "ready"
        done, models = str(worker["done"]), str(len(worker["models"]))
        rows.append((worker["id"], jobs, done, rate, models, loaded, state))
    text = [*head, "", *format_table(rows)] if workers else [*head, "", "no worker is running"]
    left_out = [(rejected["worker"], rejected["reason"]) for rejected in status["left_out"]]
    if left_out:
        text += ["", *format_table([("LEFT OUT", "REASON"), *left_out])]
    queue = [
        (jobs["priority"], names.get(jobs["digest"], jobs["digest"][7:19]), str(jobs["jobs"]))
        for jobs in status["queue"]
    ]
    return [*text, "", *format_table([("PRIORITY", "MODEL", "JOBS"), *queue])] if queue else text
