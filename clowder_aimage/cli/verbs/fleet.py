"""``aimage fleet``: prepare and observe a fleet of workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.fleet_access import (
    PATIENCE,
    fleet_key_option,
    fleet_options,
    nats_option,
    open_authority,
    open_bucket,
    root_key_option,
    run_with_link,
    signing_key_option,
)
from clowder_aimage.cli.console.option import VerbGroup, common_options, parse_with
from clowder_aimage.cli.console.output import format_count, format_size, format_table, print_result
from clowder_aimage.cli.console.watch import Reading, show, watch_option
from clowder_aimage.cli.verbs.fleet_key import key
from clowder_aimage.cli.verbs.fleet_user import user
from clowder_aimage.errors import UsageError, needs

if TYPE_CHECKING:
    from clowder_aimage.fleet.key import KeySet
    from clowder_aimage.fleet.link import FleetLink

_Json = Mapping[str, Any]


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


fleet.add_command(key)
fleet.add_command(user)


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
    help="Time that results are kept for repeated requests, 2m at least.",
)
@click.option(
    "--max-bytes",
    metavar="SIZE",
    default="8GiB",
    show_default=True,
    callback=parse_with(_parse_size),
    help="Maximum size of results that are kept; a fourth of it more for each of jobs, their "
    "bodies, and files.",
)
@root_key_option
@click.option("--keys-only", is_flag=True, help="Only make the keys, without a NATS server.")
@click.option(
    "--replace-keys",
    is_flag=True,
    help="Replace a key set of another root key: all workers need the new key.",
)
@fleet_options
def init(
    nats: str | None,
    replicas: int,
    keep: float,
    max_bytes: int,
    root_key: Path | None,
    keys_only: bool,
    replace_keys: bool,
    **chosen: Any,
) -> None:
    """Make the streams and the keys of a fleet, or change the streams to these options.

    Jobs and results in the streams stay. Keys are made if there are none: the root key, and signing
    keys of an operator and of gateways, in fleet/NAME/ beside the configuration of this user. The
    public root key is printed: workers and gateways on other machines need it (--fleet-key).
    """
    with needs("a fleet", "worker,fleet"):
        from clowder_aimage.fleet.stream import MIN_KEEP, FleetShape
    authority = open_authority(chosen, root_key)
    if keys_only:
        root, _ = authority.make_keys()
        directory = authority.directory.path
        print_result(
            {"fleet": authority.names.fleet, "root": root.public, "directory": str(directory)},
            [f"the keys are in {directory}", *_format_root(root.public)],
        )
        return
    if keep < MIN_KEEP:
        raise UsageError(f"--keep: results are kept for {MIN_KEEP / 60:g} minutes at least")
    shape = FleetShape(replicas=replicas, keep=keep, max_bytes=max_bytes)

    async def make(link: FleetLink) -> tuple[list[str], KeySet | None]:
        created = await link.make(shape, PATIENCE)
        return created, await authority.init(await open_bucket(link), replaces=replace_keys)

    created, key_set = run_with_link(nats, chosen, make, is_ready=False)
    name = authority.names.fleet
    text = f"made {', '.join(created)}" if created else f"the fleet {name} is as it should be"
    root_public = authority.read_root().public if key_set is not None else None
    advice = _format_root(root_public) if root_public else ["its root key is on another machine"]
    print_result({"fleet": name, "made": created, "root": root_public}, [text, *advice])


def _format_root(public: str) -> list[str]:
    return [
        f"the public root key is {public}",
        "workers and gateways on other machines need it: --fleet-key, or AIMAGE_FLEET_KEY",
    ]


@examples("aimage fleet status --nats nats://nats.example.com")
@common_options
@fleet.command(short_help="Show the workers and the queue of a fleet.")
@nats_option
@fleet_options
@watch_option
def status(nats: str | None, watch: float | None, **chosen: Any) -> None:
    """Show each worker of a fleet, and the number of jobs that wait for each model.

    Jobs wait in a gateway until it is their caller's turn, then on the queue.
    """

    async def read(link: FleetLink) -> dict[str, Any]:
        from clowder_aimage.fleet.gateway.status import FleetStatus
        from clowder_aimage.fleet.worker_registry import read_workers

        return asdict(await FleetStatus(link, await read_workers(link)).read())

    def take_reading() -> Reading:
        fleet_status = run_with_link(nats, chosen, read)
        return Reading(fleet_status, format_status(fleet_status), list_charts(fleet_status))

    show(take_reading, watch)


def list_charts(status: _Json) -> dict[str, tuple[float | None, str]]:
    """Return the numbers of a fleet that change, with their texts."""
    running = sum(worker["running"] for worker in status["workers"])
    slots = sum(worker["slots"] for worker in status["workers"])
    rate = sum(worker["rate"] for worker in status["workers"])
    return {
        "queue": (status["jobs"], str(status["jobs"])),
        "waiting": (status["waiting"], str(status["waiting"])),
        "running": (running, f"{running} of {slots}"),
        "jobs/min": (rate, f"{rate:g}"),
        "stored": (status["stored"], format_size(status["stored"])),
    }


@examples("aimage fleet drain gpu-3", "aimage fleet drain gpu-3 --undo")
@common_options
@fleet.command(short_help="Let a worker end its work and take no more.")
@click.argument("worker")
@click.option("--undo", is_flag=True, help="Undo: let the worker take jobs again.")
@signing_key_option
@fleet_key_option
@nats_option
@fleet_options
def drain(worker: str, undo: bool, nats: str | None, **chosen: Any) -> None:
    """Let WORKER end its jobs and take no more, until --undo or its next start.

    WORKER is its name in 'aimage fleet status'. Its own API is not affected.
    """

    async def order(link: FleetLink) -> dict[str, Any]:
        from clowder_aimage.fleet.worker_registry import give_order

        return await give_order(link, worker, "resume" if undo else "drain")

    worker_status = run_with_link(nats, chosen, order, role="operator")
    verb = (
        "takes jobs"
        if undo
        else f"takes no more jobs; {format_count(worker_status['running'], 'job')} left"
    )
    print_result(worker_status, f"{worker} {verb}")


def format_status(status: _Json) -> list[str]:
    """Return the status of a fleet as text."""
    workers = status["workers"]
    head = [
        f"fleet    {status['fleet']}: {format_count(len(workers), 'worker')}",
        f"jobs     {status['jobs']} on the queue, {status['waiting']} waiting in gateways, "
        f"{status['given_up']} given up",
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
    text = (
        [*head, "", *format_table(rows, ("PER MIN", "DONE"))]
        if workers
        else [*head, "", "no worker is running"]
    )
    left_out = [(rejected["worker"], rejected["reason"]) for rejected in status["left_out"]]
    if left_out:
        text += ["", *format_table([("LEFT OUT", "REASON"), *left_out])]
    queue = [
        (jobs["priority"], names.get(jobs["digest"], jobs["digest"][7:19]), str(jobs["jobs"]))
        for jobs in status["queue"]
    ]
    return [*text, "", *format_table([("PRIORITY", "MODEL", "JOBS"), *queue])] if queue else text
