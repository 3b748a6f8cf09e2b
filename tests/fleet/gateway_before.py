"""A gateway before a worker: the tests of the worker's API run through it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from clowder_aimage.api.service import Service
from clowder_aimage.fleet.gateway.metric import GatewayMetrics
from clowder_aimage.fleet.gateway.role import GatewayRole
from clowder_aimage.fleet.joined_worker import JoinedWorker, WorkerIdentity
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.fleet.name import WORKER
from clowder_aimage.http.local_call import LocalCalls
from clowder_aimage.http.route import Role
from clowder_aimage.oci import Digest, Reference
from tests.fleet.fleet_run import FleetRun, Nats
from tests.wait import PATIENCE, until_async

_numbers = itertools.count()


@contextlib.asynccontextmanager
async def gateway_before(nats: Nats, service: Service, own: Role) -> AsyncIterator[GatewayRole]:
    """Yield a gateway of a fleet whose only worker is ``service``, with the role ``own``."""
    fleet = FleetRun(nats, Path(), f"before{next(_numbers)}")
    await fleet.make(max_bytes=256 << 20)
    link = FleetLink(fleet.access_of(WORKER), WORKER, "w1")
    joined = JoinedWorker(link, service, LocalCalls(own), WorkerIdentity("w1"))
    resolve = partial(_resolve, service)
    gateway = GatewayRole(fleet.gateway_link(), GatewayMetrics(), resolve=resolve)
    async with joined.running(), gateway.running():
        await link.wait_until_ready(PATIENCE)
        await until_async(lambda: gateway._watch.workers.list_statuses())
        yield gateway
        await joined.drain(0.0, asyncio.Event())


def _resolve(service: Service, reference: Reference) -> Digest:
    from clowder_aimage.registry import Repository

    with Repository(reference, service.connection) as repository:
        return repository.describe(reference).digest
