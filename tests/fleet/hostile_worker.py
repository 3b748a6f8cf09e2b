"""A hostile worker: a program with a worker's access to NATS that attacks the rest of its fleet.

``python -m tests.fleet.hostile_worker URL FLEET NAME [SECONDS [delay]]`` attacks until it is ended,
as the worker NAME, whose user is in URL. It tries to make others act: by publishing itself, by
letting the server publish for it (its responses go to any subject that a client names), by
repeating signed messages of others, and by guessing where they wait for answers. With "delay" it
does also what a worker can do: it acknowledges jobs of others, and takes jobs without serving them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from clowder_aimage.fleet.frame import ADMITTED, BEGIN, DATA, DEAD, END, HEAD, Frame
from clowder_aimage.fleet.key import SIGNER, FleetKey
from clowder_aimage.fleet.link import LOST
from clowder_aimage.fleet.name import GATEWAY, INTERACTIVE, KEY_SET, FleetNames
from clowder_aimage.fleet.signature import MessageSigner
from clowder_aimage.fleet.ticket import Admission, JobTicket
from clowder_aimage.fleet.worker_registry import WorkerStatus

# In the responses that it forges.
EVIL = "evil"
_API = "$JS.API"
# Messages of others that it remembers.
_REMEMBERED = 8
_Hand = Callable[[str, bytes, dict[str, str]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Forgery:
    """A message of which the hostile worker wishes that it reached others."""

    subject: str
    data: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class HostileWorker:
    """The attacks of one worker, ``name``. ``victims`` are workers that it attacks.

    ``tried`` counts messages by kind of attack. It takes a job only in ``steal``.
    """

    def __init__(self, url: str, names: FleetNames, name: str, victims: tuple[str, ...]) -> None:
        self._url, self._names, self._name = url, names, name
        self._victims = set(victims)
        self._client = Client()
        self._api = names.api
        self._jobs: deque[str] = deque(["a" * 32], maxlen=_REMEMBERED)
        self._heard: deque[Msg] = deque(maxlen=_REMEMBERED)
        # The queues of jobs: priority and digest.
        self._queues: set[tuple[str, str]] = {(INTERACTIVE, "a" * 64)}
        self._last_job = 1
        self._signer = MessageSigner(names.fleet, FleetKey.generate(SIGNER))
        self.tried: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def connected(self) -> Any:
        """Connect, and listen to all that a worker may hear."""
        await self._client.connect(self._url, error_cb=self._ignore, allow_reconnect=True)
        names = self._names
        bucket = f"$KV.{names.workers}."
        for subject in (
            *(names.announcements, names.build_cancel_subject("*"), f"{bucket}*"),
            *(names.build_call_subject(self._name), names.build_control_subject(self._name)),
            *(names.build_call_subject("*"), names.build_job_subject("*", "*"), "$JS.ACK.>"),
        ):
            await self._client.subscribe(subject, cb=self._hear)
        await self._client.flush()
        # Without an account of its own it has the usual API.
        answer = await self._request(f"{_API}.STREAM.INFO.{names.jobs}")
        self._api = names.api if answer is None or b'"error"' in answer else _API
        try:
            yield self
        finally:
            with contextlib.suppress(*LOST):
                await self._client.close()

    async def _ignore(self, error: Exception) -> None:
        """Ignore refusals: they are what the tests hope for."""

    async def _hear(self, message: Msg) -> None:
        """Learn jobs, queues and workers, and remember what others have signed."""
        names = self._names
        if message.subject.startswith(f"$KV.{names.workers}."):
            self._victims.add(message.subject.rpartition(".")[2])
            return
        self._heard.append(message)
        if message.subject == names.announcements:
            subject, _, number = message.data.decode().partition(" ")
            if queue := names.parse_job_subject(subject):
                self._queues.add(queue)
                self._last_job = int(number or 1)
        elif message.subject.startswith(f"{names.fleet}.cancel."):
            self._jobs.append(message.subject.rpartition(".")[2])

    async def _request(self, subject: str, data: bytes = b"") -> bytes | None:
        with contextlib.suppress(*LOST):
            return (await self._client.request(subject, data, timeout=1.0)).data
        return None

    async def _publish(
        self,
        subject: str,
        data: bytes = b"",
        reply: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        with contextlib.suppress(*LOST, NatsError):
            await self._client.publish(subject, data, reply=reply, headers=headers or None)

    # -- the hands: ways to let a message reach a subject

    @property
    def _status_subject(self) -> str:
        return f"$KV.{self._names.workers}.{self._name}"

    def _list_hands(self) -> dict[str, _Hand]:
        return {
            "published": self._publish_itself,
            "direct read of its status": self._by_status,
            "direct read of its mark": self._by_mark,
            "response of a call": self._by_response,
            "job that is taken": self._by_job,
            "acknowledgement of a message": self._by_acknowledgement,
        }

    async def _publish_itself(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        await self._publish(subject, data, headers=headers)

    async def _by_status(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        await self._publish(self._status_subject, data, headers=headers)
        await self._client.flush()
        call = f"{self._api}.DIRECT.GET.KV_{self._names.workers}.{self._status_subject}"
        await self._publish(call, reply=subject)

    async def _by_mark(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        mark = self._names.build_mark_subject(self._name, "zz")
        await self._publish(mark, data, headers=headers)
        await self._client.flush()
        call = f"{self._api}.DIRECT.GET.{self._names.marks}"
        await self._publish(call, json.dumps({"last_by_subj": mark}).encode(), subject)

    async def _by_response(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        for call in (f"STREAM.INFO.{self._names.jobs}", self._choose_consumer("CONSUMER.INFO")):
            await self._publish(f"{self._api}.{call}", reply=subject)

    async def _by_job(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        # An empty queue: the response has no data, and is a valid request to delete a stream.
        consumer = self._names.build_consumer_name("batch", "f" * 64)
        for name in (consumer, self._names.build_consumer_name(INTERACTIVE, "f" * 64)):
            call = f"{self._api}.CONSUMER.MSG.NEXT.{self._names.jobs}.{name}"
            await self._publish(call, b'{"batch":1,"no_wait":true}', subject)

    async def _by_acknowledgement(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        await self._publish(self._status_subject, data, subject, headers)

    def _choose_consumer(self, call: str) -> str:
        name = self._names.build_consumer_name(*random.choice(sorted(self._queues)))
        return f"{call}.{self._names.jobs}.{name}"

    # -- what others must not believe

    def _list_forgeries(self) -> Iterator[Forgery]:
        names = self._names
        for victim in sorted(self._victims - {self._name}):
            yield self._sign(Forgery(names.build_control_subject(victim), b'{"order":"drain"}'))
            yield Forgery(names.build_control_subject(victim), b'{"order":"drain"}')
            for path, method in (("/api/delete", "DELETE"), ("/api/copy", "POST")):
                call = Forgery(names.build_call_subject(victim), _build_call(path, method))
                yield call
                yield self._sign(call)
            yield Forgery(f"$KV.{names.workers}.{victim}", _build_status(victim))
            yield Forgery(f"$KV.{names.workers}.{victim}", b"", {"KV-Operation": "DEL"})
            for job in tuple(self._jobs):
                yield from self._list_frames(victim, job)
        for job in tuple(self._jobs):
            yield from self._list_frames(GATEWAY, job)
            yield Forgery(names.build_cancel_subject(job))
        for queue in sorted(self._queues):
            subject = names.build_job_subject(*queue, caller=EVIL)
            yield Forgery(subject, _build_call("/v1/images/generations", "POST"))
            yield Forgery(names.announcements, f"{subject} {self._last_job}".encode())
        yield Forgery(f"$KV.{names.keys}.{KEY_SET}", b'{"keySet":"{}","signature":""}')
        yield Forgery(f"$KV.{names.keys}.{KEY_SET}", b"", {"KV-Operation": "PURGE"})
        yield Forgery(f"$KV.{names.batches}.{EVIL}", b"{}")
        yield from self._list_calls()

    def _list_frames(self, writer: str, job: str) -> Iterator[Forgery]:
        ticket = JobTicket.generate(job)
        head = {"status": 200, "headers": [["Content-Type", "application/json"]]}
        frames = (
            Frame(ADMITTED, 0, 0, Admission("0" * 64, (ticket.secret,)).encode()),
            Frame(BEGIN, 9, 0, b"id"),
            Frame(HEAD, 1, 1, json.dumps(head).encode()),
            Frame(DATA, 1, 2, json.dumps({"data": [{"b64_json": EVIL}]}).encode()),
            Frame(END, 1, 3),
            Frame(DEAD, 1, 1, b'{"status":500,"code":"evil","message":"evil"}'),
        )
        for frame in frames:
            mark = frame.kind not in (HEAD, DATA)
            build = self._names.build_mark_subject if mark else self._names.build_log_subject
            proven = ticket.prove(replace(frame, worker=writer))
            yield Forgery(build(writer, job), proven.data, proven.headers)

    def _list_calls(self) -> Iterator[Forgery]:
        """Yield calls of JetStream that would harm the fleet."""
        names = self._names
        streams = (names.jobs, names.logs, names.marks, names.dead, names.files, names.bodies)
        buckets = [f"KV_{bucket}" for bucket in (names.workers, names.keys, names.batches)]
        squat = {"durable_name": "squat", "ack_policy": "explicit"}
        for prefix in (_API, self._api):
            for stream in (*streams, *buckets):
                yield Forgery(f"{prefix}.STREAM.PURGE.{stream}")
                yield Forgery(f"{prefix}.STREAM.DELETE.{stream}")
                yield Forgery(f"{prefix}.STREAM.MSG.DELETE.{stream}", b'{"seq":1}')
            config = {**squat, "filter_subject": f"{names.fleet}.job.>"}
            body = json.dumps({"stream_name": names.jobs, "config": config}).encode()
            yield Forgery(f"{prefix}.CONSUMER.DURABLE.CREATE.{names.jobs}.squat", body)
            push = {"ack_policy": "none", "deliver_policy": "all"}
            for victim in sorted(self._victims):
                config = {**push, "deliver_subject": names.build_call_subject(victim)}
                bucket = f"KV_{names.workers}"
                body = json.dumps({"stream_name": bucket, "config": config}).encode()
                yield Forgery(f"{prefix}.CONSUMER.CREATE.{bucket}", body)
            for queue in sorted(self._queues):
                name = names.build_consumer_name(*queue)
                yield Forgery(f"{prefix}.CONSUMER.DELETE.{names.jobs}.{name}")

    def _sign(self, forgery: Forgery) -> Forgery:
        """Sign a message with a key that is in no key set."""
        headers = self._signer.sign(forgery.subject, forgery.data, forgery.headers)
        return Forgery(forgery.subject, forgery.data, headers)

    # -- the attacks

    async def forge(self) -> None:
        """Send each forgery by each hand."""
        for name, hand in self._list_hands().items():
            for forgery in [*self._list_forgeries()]:
                await hand(forgery.subject, forgery.data, forgery.headers)
                self.tried[name] = self.tried.get(name, 0) + 1
            await self._settle()

    async def replay(self) -> None:
        """Repeat what others have signed, where it was and elsewhere."""
        names = self._names
        for message in list(self._heard):
            subjects = [message.subject]
            for victim in sorted(self._victims):
                subjects += [names.build_call_subject(victim), names.build_control_subject(victim)]
            for subject in subjects:
                for hand in self._list_hands().values():
                    await hand(subject, message.data, dict(message.headers or {}))
                self.tried["replayed"] = self.tried.get("replayed", 0) + 1
        await self._settle()

    async def acknowledge(self) -> None:
        """Acknowledge and terminate jobs that others got, or that wait."""
        for queue in sorted(self._queues):
            consumer = self._names.build_consumer_name(*queue)
            for number in range(max(1, self._last_job - 3), self._last_job + 2):
                for body in (b"+ACK", b"+TERM", b'-NAK {"delay": 60000000000}', b"+WPI"):
                    subject = f"$JS.ACK.{self._names.jobs}.{consumer}.1.{number}.{number}.1.0"
                    await self._publish(subject, body)
                    self.tried["acknowledged"] = self.tried.get("acknowledged", 0) + 1
        await self._settle()

    async def steal(self) -> None:
        """Let jobs be delivered to others, and take one without serving it."""
        inboxes = [f"_INBOX_worker_{victim}.x" for victim in sorted(self._victims)]
        for _ in tuple(self._queues):
            call = self._choose_consumer("CONSUMER.MSG.NEXT")
            for reply in (*inboxes, self._names.build_log_subject(self._name, "x")):
                await self._publish(f"{self._api}.{call}", b'{"batch":1,"no_wait":true}', reply)
                self.tried["stolen"] = self.tried.get("stolen", 0) + 1
        await self._settle()

    async def guess_answers(self) -> None:
        """Answer to requests of gateways that others got, by guessing where they wait."""
        for message in [each for each in tuple(self._heard) if each.reply]:
            for number in range(20):
                await self._publish(f"{message.reply[:-2]}{number:02x}", b"{}")
                self.tried["guessed"] = self.tried.get("guessed", 0) + 1
        await self._settle()

    async def report(self) -> None:
        """Report as a worker that is there, so that gateways send it requests."""
        await self._publish(self._status_subject, _build_status(self._name))

    async def attack(self, *, delays: bool = True, reports: bool = True) -> None:
        """Try everything once."""
        await self.forge()
        if reports:
            await self.report()
        await self.replay()
        await self.guess_answers()
        if delays:
            await self.acknowledge()
            await self.steal()

    async def run(
        self, *, delays: bool = True, reports: bool = True, seconds: float = math.inf
    ) -> None:
        """Attack again and again."""
        clock = asyncio.get_running_loop().time
        # The client of NATS may swallow a cancellation.
        end = clock() + seconds
        while clock() < end:
            with contextlib.suppress(*LOST):
                await self.attack(delays=delays, reports=reports)
            await asyncio.sleep(0)

    async def _settle(self) -> None:
        with contextlib.suppress(*LOST, NatsError):
            await self._client.flush(timeout=10)


def _build_call(path: str, method: str) -> bytes:
    fields = {"model": "tiny", "source": "tiny", "destination": "evil", "prompt": EVIL}
    call = {
        "id": "f" * 32,
        "path": path,
        "method": method,
        "scope": "admin",
        **dict.fromkeys(("caller", "asked", "model", "digest"), ""),
        "fields": fields,
        "headers": {"Host": "localhost"},
    }
    return json.dumps(call).encode()


def _build_status(name: str) -> bytes:
    return WorkerStatus(id=name, slots=1, is_draining=True).encode()


async def main(url: str, fleet: str, name: str, seconds: str = "inf", delay: str = "") -> None:
    """Attack for some seconds."""
    hostile = HostileWorker(url, FleetNames(fleet), name, ())
    async with hostile.connected():
        await hostile.run(delays=bool(delay), reports=False, seconds=float(seconds))
    sys.stdout.write(json.dumps(hostile.tried) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
