"""A worker that takes jobs of a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import Error as JetStreamError

from clowder_aimage import __version__
from clowder_aimage.api.model_kind import EMBEDDER, TEXT
from clowder_aimage.api.service import Service
from clowder_aimage.engine.admission import NEVER
from clowder_aimage.engine.executor import run_io
from clowder_aimage.errors import AImageError, FormatError
from clowder_aimage.fleet import job_choice
from clowder_aimage.fleet.fleet_job import FleetJob
from clowder_aimage.fleet.fleet_link import LOST, FleetLink
from clowder_aimage.fleet.job_choice import JobChoice, Key
from clowder_aimage.fleet.job_frame import PIECE
from clowder_aimage.fleet.job_request import OWN, send_job
from clowder_aimage.fleet.job_run import ACK_WAIT, DONE, GIVEN_UP, JobRun, read_job
from clowder_aimage.fleet.room import Room
from clowder_aimage.fleet.store_view import StoreView
from clowder_aimage.fleet.worker_card import RosterWatch, WorkerCard
from clowder_aimage.http.background import beside
from clowder_aimage.http.private_app import PrivateApp
from clowder_aimage.http.route import Role
from clowder_aimage.oci import read_json

REPORT = 3.0  # seconds between two reports of a worker that has not changed
LOOK = 0.25  # seconds between two checks for a change
SWEEP = 1.0  # seconds between two looks for jobs that were announced to nobody
IDLE = 3600.0  # seconds after which a queue without jobs loses its consumer
JITTER = 0.002  # seconds by which workers with the same wait differ
_NEXT = json.dumps({"batch": 1, "no_wait": True}).encode()
_log = logging.getLogger("aimage.fleet")


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The id of a worker in its fleet, which no other may have, and the address of its own API."""

    id: str
    address: str = ""


class JoinedWorker(Role):
    """Takes jobs as long as there is room, and reports what this worker has.

    ``own`` is the role with the interfaces that serve the jobs.
    """

    def __init__(self, link: FleetLink, service: Service, own: Role, place: WorkerPlace) -> None:
        self._link, self._service, self._place = link, service, place
        self._local = PrivateApp(own)
        self._watch = RosterWatch(link)
        self._view = StoreView(service.store)
        self._room = Room(service.settings.max_models, service.settings.parallel)
        self._choice = JobChoice(self._wait)
        self._news = asyncio.Event()
        self._runs: dict[str, JobRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._consumers: set[Key] = set()
        self._is_heard = False
        self._swept = self._reported = 0.0
        self._told: object = None
        self._begun = time.monotonic()
        self.done = self.failed = 0
        self.takes_jobs = True

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._link.on_ready.append(self._news.set)
        async with (
            self._link.open(),
            self._local.open(),
            beside(
                self._watch.run(),
                _for_ever(self._report, LOOK),
                _for_ever(self._sweep, LOOK),
                _for_ever(self._take, 0),
            ),
        ):
            try:
                yield
            finally:
                await self._end()

    async def drain(self, grace: float, hurry: asyncio.Event) -> None:
        """Take no more jobs; end running ones within ``grace``, and give the others back."""
        self.takes_jobs = False
        await self._put_card()
        waiting = [asyncio.create_task(hurry.wait()), asyncio.create_task(self._idle())]
        await asyncio.wait(waiting, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await self._end()

    async def _idle(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _end(self) -> None:
        """Give back the jobs that are being served, and leave the fleet."""
        self.takes_jobs = False
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        with contextlib.suppress(*LOST, JetStreamError):
            if self._link.is_ready:
                bucket = await self._link.streams.key_value(self._link.names.workers)
                await bucket.delete(self._place.id)

    @property
    def _loaded(self) -> frozenset[str]:
        """The digests of the models in memory."""
        return frozenset(self._idle_models())

    def _idle_models(self) -> dict[str, float]:
        """Return the seconds since the last use of each model in memory, by digest."""
        loaded = self._service.engine.loaded()
        return {str(one.digest): one.clock() - one.used for one in loaded if one.is_ready}

    # -- taking jobs

    def _wait(self, digest: str) -> float | None:
        """Return the seconds to wait before asking for a model's jobs; None if there is no room."""
        name, place = f"sha256:{digest}", self._place.id
        kind = self._view.kinds.get(name)
        is_text = kind in (TEXT, EMBEDDER)
        if not self._room.has(name, is_text=is_text):
            return None
        if kind is None and self._service.settings.pull == NEVER:
            return None
        roster = self._watch.roster
        if kind is not None:
            is_hot = roster.loaded_elsewhere(name, place)
            idle = self._idle_models()
            if self._room.of(name) and not is_text:
                return job_choice.FOLLOW
            if name in idle or self._room.of(name):
                return job_choice.to_repeat(idle.get(name, 0.0)) if is_hot else job_choice.AT_ONCE
            victims = [seconds for one, seconds in idle.items() if not self._room.of(one)]
            is_full = len(idle) >= self._room.slots
            oldest = max(victims, default=0.0) if is_full else None
            return job_choice.to_load(oldest, is_elsewhere=is_hot)
        is_there = roster.on_disk_elsewhere(name, place)
        return job_choice.FETCH_TOO if is_there else job_choice.FETCH

    async def _take(self) -> None:
        """Ask for a job once there may be one that this worker has room for."""
        key, soonest = self._choice.next(time.monotonic())
        if key is None or not self.takes_jobs or not self._link.is_ready:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(soonest if self.takes_jobs else None):
                    await self._news.wait()
            return
        message = await self._ask(key)
        if message is None:
            self._choice.forget(key)
            return
        digest = f"sha256:{key[1]}"
        self._room.take(digest)
        task = asyncio.create_task(self._serve(message, digest))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, key: Key) -> Msg | None:
        """Return a job of a queue; None if it is empty, or was not to be reached."""
        names = self._link.names
        consumer = names.consumer(*key)
        try:
            if key not in self._consumers:
                await self._link.streams.add_consumer(names.jobs, self._consumer(key))
                self._consumers.add(key)
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{names.jobs}.{consumer}"
            message = await self._link.client.request(
                subject, _NEXT, timeout=2.0, old_style=True
            )  # with an inbox of its own, as the answer has the subject of the job
        except NoRespondersError:  # it was removed, as nobody asked for a long time
            self._consumers.discard(key)
            return None
        except (*LOST, JetStreamError):
            return None
        status = (message.headers or {}).get("Status")
        return message if status is None else None

    def _consumer(self, key: Key) -> ConsumerConfig:
        names = self._link.names
        return ConsumerConfig(
            durable_name=names.consumer(*key),
            filter_subject=names.job(*key),
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT,
            max_deliver=-1,
            max_ack_pending=65536,
            inactive_threshold=IDLE,
        )

    async def _serve(self, message: Msg, digest: str) -> None:
        try:
            job = await read_job(self._link, message)
            run = JobRun(
                self._link,
                self._local,
                self._service,
                self._place.id,
                self._watch.roster,
                message,
                job,
            )
            self._runs[job.id] = run
            try:
                outcome = await run.serve()
            finally:
                del self._runs[job.id]
            self.done += outcome == DONE
            self.failed += outcome == GIVEN_UP
        except FormatError as error:
            _log.error("a job cannot be read", extra={"reason": error.message})
            await message.term()
        except LOST as error:
            _log.warning("a job was given back", extra={"reason": repr(error)})
        except Exception:
            _log.exception("a job was given back")
        finally:
            self._room.leave(digest)
            self._news.set()

    async def _sweep(self) -> None:
        """Listen to the fleet once connected, and look for jobs that were announced to nobody."""
        names = self._link.names
        if not self._link.is_ready:
            return
        if not self._is_heard:
            await self._listen()
        now = time.monotonic()
        if self.takes_jobs and now >= self._swept:
            self._swept = now + SWEEP * random.uniform(0.8, 1.2)  # noqa: S311
            info = await self._link.streams.stream_info(names.jobs, subjects_filter=">")
            for subject in info.state.subjects or {}:
                self._hear(subject)

    def _hear(self, subject: str) -> None:
        key = self._link.names.wanted(subject)
        if key is not None:
            self._choice.hear(key, time.monotonic() + random.uniform(0, JITTER))  # noqa: S311
            self._news.set()

    # -- messages of the fleet

    async def _listen(self) -> None:
        names, subscribe = self._link.names, self._link.client.subscribe
        await subscribe(names.news, cb=self._on_news)
        await subscribe(names.cancel("*"), cb=self._on_cancel)
        await subscribe(names.call(self._place.id), cb=self._on_call)
        await subscribe(names.control(self._place.id), cb=self._on_order)
        self._is_heard = True

    async def _on_news(self, message: Msg) -> None:
        self._hear(message.data.decode("ascii", "replace"))

    async def _on_cancel(self, message: Msg) -> None:
        run = self._runs.get(message.subject.rpartition(".")[2])
        if run is not None:
            run.cancel()

    async def _on_call(self, message: Msg) -> None:
        """Serve a request that is for this worker alone."""
        task = asyncio.create_task(self._answer(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Msg) -> None:
        facts: dict[str, Any] = {"status": 500, "headers": []}
        try:
            job = FleetJob.decode(message.data)
            async with send_job(self._local, job) as response:
                body, facts["status"] = await response.read(), response.status
                known = [(name, text) for name, text in response.headers.items()]
                facts["headers"] = [one for one in known if one[0].lower() not in OWN]
            if job.method not in ("GET", "HEAD"):  # the gateway hears of a change before its end
                await run_io(self._view.read)
                await self._put_card()
        except (AImageError, aiohttp.ClientError) as error:
            body = str(error).encode()
        if len(body) > self._link.client.max_payload - PIECE:
            body, facts = b"the response is too large", {"status": 507, "headers": []}
        with contextlib.suppress(*LOST):
            headers = {"Aimage-Answer": json.dumps(facts)}
            await self._link.client.publish(message.reply, body, headers=headers)

    async def _on_order(self, message: Msg) -> None:
        """Take or refuse jobs from now on, as an operator says; answer with the card."""
        with contextlib.suppress(FormatError):
            order = read_json(message.data, "an order")
            self.takes_jobs = order.get("order") != "drain" if isinstance(order, Mapping) else True
            _log.info("takes jobs" if self.takes_jobs else "takes no more jobs")
            self._news.set()
        await self._put_card()
        with contextlib.suppress(*LOST):
            await message.respond(self._card().encode())

    # -- reporting

    def _card(self) -> WorkerCard:
        settings = self._service.settings
        minutes = max(1.0, time.monotonic() - self._begun) / 60
        return WorkerCard(
            id=self._place.id,
            version=__version__,
            address=self._place.address,
            slots=self._room.slots,
            running=self._room.running,
            loaded=tuple(sorted(self._loaded)),
            models=self._view.models,
            kinds=self._view.kinds,
            aliases=dict(settings.aliases),
            default_model=settings.default_model,
            default_for=tuple(settings.default_for),
            may_pull=settings.pull != NEVER,
            is_draining=not self.takes_jobs,
            done=self.done,
            failed=self.failed,
            rate=round(self.done / minutes, 2),
        )

    async def _put_card(self) -> None:
        with contextlib.suppress(*LOST, JetStreamError):
            if self._link.is_ready:
                bucket = await self._link.streams.key_value(self._link.names.workers)
                await bucket.put(self._place.id, self._card().encode())

    async def _report(self) -> None:
        """Put the card if it has changed, or is old."""
        await run_io(self._view.read)
        state = self._loaded, self._view.models, self._room.running, self.takes_jobs
        is_due = state != self._told or time.monotonic() - self._reported >= REPORT
        if is_due and self._is_heard and self._link.is_ready:
            self._told, self._reported = state, time.monotonic()
            await self._put_card()


async def _for_ever(work: Callable[[], Awaitable[None]], pause: float) -> None:
    """Repeat work with a pause; an error is logged, and no reason to end."""
    while True:
        try:
            await work()
        except (*LOST, AImageError):
            await asyncio.sleep(LOOK)
        except Exception:
            _log.exception("background work failed")
            await asyncio.sleep(1.0)
        await asyncio.sleep(pause)
