"""Orders, calls and jobs that no gateway or operator has signed, on a real NATS server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from clowder_aimage.errors import UsageError, VerificationError
from clowder_aimage.fleet.gateway.job_queue import JobQueue, QueuedJob
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.joined_worker import JoinedWorker
from clowder_aimage.fleet.key import ROOT, SIGNER, FleetKey
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.fleet.name import GATEWAY, KEY_SET, OPERATOR, WORKER
from clowder_aimage.fleet.signature import MessageSigner
from clowder_aimage.fleet.ticket import JobTicket
from clowder_aimage.fleet.worker_registry import give_order
from tests.fleet.fleet_run import PICTURES, FleetRun, ScriptedRole, prompt_as_picture
from tests.wait import PATIENCE, until_async

pytestmark = pytest.mark.integration
Play = Callable[..., None]


async def order(
    link: FleetLink, worker: str, headers: dict[str, str], seconds: float = 0.3
) -> bool:
    """Send an order to drain a worker; return True if it answers in time."""
    subject = link.names.build_control_subject(worker)
    try:
        await link.client.request(
            subject, json.dumps({"order": "drain"}).encode(), timeout=seconds, headers=headers
        )
    except (NatsTimeoutError, NoRespondersError, TimeoutError):
        return False
    return True


def build_job(worker: JoinedWorker, prompt: str, scope: str = "infer") -> FleetJob:
    """Return a job for the model of a worker."""
    digest = next(iter(worker._view.models.values()))
    fields = {"model": "tiny", "prompt": prompt, "seed": 1}
    return FleetJob("j", PICTURES, scope, "me", "tiny", "tiny", digest, fields=fields)


async def wait_until_empty(link: FleetLink) -> None:
    """Wait until no job is on the queue."""

    async def is_empty() -> bool:
        return (await link.streams.stream_info(link.names.jobs)).state.messages == 0

    await until_async(is_empty)


def test_an_order_counts_once_and_only_if_an_operator_signed_it(play_quietly: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        operator = fleet.operator()
        async with (
            fleet.worker("w", ScriptedRole(prompt_as_picture)) as worker,
            operator.open(),
            fleet.opened_gateway_link() as gateway,
        ):
            await operator.wait_until_ready(PATIENCE)
            subject = operator.names.build_control_subject("w")
            data = json.dumps({"order": "drain"}).encode()
            stranger = MessageSigner(fleet.name, FleetKey.generate(SIGNER), operator.now)
            elsewhere = operator.names.build_control_subject("v")
            for wrong in (
                {},
                gateway.sign(subject, data),
                stranger.sign(subject, data, {}),
                operator.sign(elsewhere, data),
                operator.sign(subject, b"{}"),
            ):
                assert not await order(operator, "w", wrong)
            assert not worker._build_status().is_draining
            signed = operator.sign(subject, data)
            assert await order(operator, "w", signed, PATIENCE)
            assert worker._build_status().is_draining
            assert (await give_order(operator, "w", "resume"))["is_draining"] is False
            assert not await order(operator, "w", signed)
            assert not worker._build_status().is_draining

    play_quietly(scene)


def test_a_job_that_no_gateway_signed_is_removed_and_not_served(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        async with (
            fleet.gateway() as url,
            fleet.worker("w", role) as worker,
            fleet.opened_gateway_link() as link,
        ):
            await fleet.know(url, 1)
            job = build_job(worker, "forged", "admin")
            subject = link.names.build_job_subject("interactive", job.digest[7:], "me")
            good = link.sign(subject, job.encode(), {"Aimage-Job": "j"})
            other = link.names.build_job_subject("batch", job.digest[7:], "me")
            # The consumer is there.
            assert (await fleet.ask(url, "a cat"))[0] == 200
            for headers, data in (
                ({}, job.encode()),
                (link.sign(other, job.encode(), {"Aimage-Job": "j"}), job.encode()),
                (good | {"Aimage-Job": "k"}, job.encode()),
                (good, replace(job, scope="infer").encode()),
            ):
                await link.store(subject, data, headers)

            await wait_until_empty(link)
            assert role.served == ["a cat"] and worker.done == 1

    play(scene)


def test_a_job_that_is_over_is_not_begun_again_by_its_signed_message(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        async with (
            fleet.gateway() as url,
            fleet.worker("w", role) as worker,
            fleet.opened_gateway_link() as link,
        ):
            await fleet.know(url, 1)
            queue = JobQueue(link, lambda _: True)
            queued = QueuedJob(build_job(worker, "once"), JobTicket.generate("j"))
            for queued.publications in range(3):
                await queue.put(queued)
                await wait_until_empty(link)
            assert role.served == ["once"]

    play(scene)


def test_a_key_set_is_used_only_if_the_root_signed_it_and_never_an_older_one(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(fleet: FleetRun) -> None:
        operator = fleet.operator()
        other = FleetKey.generate(ROOT)
        async with (
            fleet.worker("w", ScriptedRole(prompt_as_picture)) as worker,
            operator.open(),
        ):
            await operator.wait_until_ready(PATIENCE)
            link = worker._link
            bucket = await operator.streams.key_value(operator.names.keys)
            without = replace(fleet.key_set(3), keys=fleet.key_set().keys[:1])
            await bucket.put(KEY_SET, without.encode(fleet.root))

            async def is_removed() -> bool:
                link._due = 0.0
                key_set = link.verifier.key_set
                return key_set is not None and key_set.version == 3

            await until_async(is_removed)
            subject = operator.names.build_control_subject("w")
            signed = operator.sign(subject, json.dumps({"order": "drain"}).encode())
            assert not await order(operator, "w", signed)
            for wrong, reason in (
                (fleet.key_set(2).encode(fleet.root), "older"),
                (fleet.key_set(4).encode(other), "not signed"),
                (b"x", "JSON"),
            ):
                await bucket.put(KEY_SET, wrong)

                async def is_refused(reason: str = reason) -> bool:
                    link._due = 0.0
                    return reason in caplog.records[-1].__dict__.get("reason", "")

                await until_async(is_refused)
                # A worker with a good key set goes on with it.
                assert link.verifier.key_set == without and link.is_ready

    play(scene)


def test_a_program_says_what_its_key_lacks(play_quietly: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        root, access = FleetKey.generate(ROOT).public, fleet.access_of(WORKER)
        for kind, changed, error, reason in (
            (WORKER, replace(access, root=root), VerificationError, "not signed"),
            (
                GATEWAY,
                replace(fleet.access_of(GATEWAY), signer=FleetKey.generate(SIGNER)),
                UsageError,
                "key of this gateway",
            ),
            (OPERATOR, replace(fleet.access_of(GATEWAY)), UsageError, "key of this operator"),
        ):
            link = FleetLink(changed, kind, "w")
            async with link.open():
                with pytest.raises(error, match=reason):
                    async with asyncio.timeout(PATIENCE):
                        await link.wait_until_ready(PATIENCE)

    play_quietly(scene)
