"""A fleet in one event loop: gateways and workers of this process, on a real NATS server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from clowder_aimage.api.request_body import read_checked
from clowder_aimage.api.service import Service, make_service
from clowder_aimage.engine.settings import Settings
from clowder_aimage.fleet.gateway.metric import GatewayMetrics
from clowder_aimage.fleet.gateway.role import GatewayRole
from clowder_aimage.fleet.joined_worker import JoinedWorker, WorkerIdentity
from clowder_aimage.fleet.key import ROOT, SIGNER, FleetKey, KeySet, SignerKey
from clowder_aimage.fleet.link import FleetAccess, FleetLink
from clowder_aimage.fleet.name import GATEWAY, KEY_SET, OPERATOR, WORKER, FleetNames
from clowder_aimage.fleet.stream import FleetShape
from clowder_aimage.http.app import build_app
from clowder_aimage.http.listening_socket import listen
from clowder_aimage.http.local_call import LocalCalls
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import INFER, Role, Route, SharedRoute
from clowder_aimage.http.server import accepting
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.oci import Digest, Reference
from clowder_aimage.registry import ClientOptions
from tests import process
from tests.program import find_program
from tests.wait import PATIENCE, until, until_async

Answer = Callable[[Request, dict[str, Any]], Awaitable[web.StreamResponse]]
PICTURES = "/v1/images/generations"
# The worker of the shipped configuration of NATS.
SHIPPED_WORKER = "worker-1"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@dataclass
class Nats:
    """A NATS server with JetStream in a child process, which can be killed and started again."""

    directory: Path
    port: int = field(default_factory=free_port)
    arguments: tuple[str, ...] = ()
    _child: subprocess.Popen[Any] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> Nats:
        command = [find_program("nats-server"), "-a", "127.0.0.1", "-p", self.port, *self.arguments]
        self.directory.mkdir(exist_ok=True)
        if "-c" not in self.arguments:
            # By default the streams of all fleets may reserve 3/4 of the space that is free.
            limits = f'store_dir: "{self.directory}", max_file_store: 1TB'
            (self.directory / "nats.conf").write_text(f"jetstream {{{limits}}}\n")
            command += ["-c", self.directory / "nats.conf"]
        command += ["-l", self.directory / "log"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        self._child = process.spawn(command, is_shared=True, stderr=subprocess.DEVNULL, **pipes)
        until(self._accepts, "the server")
        return self

    def _accepts(self) -> bool:
        assert self._child is not None and self._child.poll() is None
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        if self._child is not None:
            process.end(self._child)


class ScriptedRole(Role):
    """A worker without models, whose answers are those of ``answer``."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.served: list[str] = []  # prompts

    def build_routes(self) -> list[Route]:
        return [SharedRoute("POST", PICTURES, self._make, INFER)]

    async def _make(self, request: Request) -> web.StreamResponse:
        body = await read_checked(request, dict)
        self.served.append(body["prompt"])
        return await self._answer(request, body)


async def prompt_as_picture(request: Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer with the prompt and the seed."""
    text = f"{body['prompt']} {body['seed']}"
    return web.json_response({"data": [{"b64_json": text}]}, headers={"X-Aimage-Seed": "1"})


def held_role() -> tuple[ScriptedRole, asyncio.Event, asyncio.Event]:
    """Return a role whose jobs wait, the event that one has begun, and the one they wait for."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def wait(request: Request, body: dict[str, Any]) -> web.StreamResponse:
        begun.set()
        await go_on.wait()
        return await prompt_as_picture(request, body)

    return ScriptedRole(wait), begun, go_on


@dataclass
class FleetRun:
    """One fleet of a test, on a NATS server that others use too."""

    nats: Nats
    store: Path
    name: str
    passwords: dict[str, str] = field(default_factory=dict)
    url: str = ""
    replicas: int = 1
    tenant: str = ""  # before the names of its users
    worker_user: str = ""  # of all workers
    creds: Path | None = None
    session: aiohttp.ClientSession = field(init=False)
    root: FleetKey = field(default_factory=lambda: FleetKey.generate(ROOT))
    signers: dict[str, FleetKey] = field(
        default_factory=lambda: {kind: FleetKey.generate(SIGNER) for kind in (GATEWAY, OPERATOR)}
    )

    def key_set(self, version: int = 1) -> KeySet:
        """Return the key set of the gateways and the operator of this fleet."""
        gateway, operator = (self.signers[kind].public for kind in (GATEWAY, OPERATOR))
        keys = SignerKey("g", "gateway", gateway), SignerKey("o", "operator", operator)
        return KeySet(self.name, version, keys)

    def access_of(self, kind: str, worker: str = SHIPPED_WORKER) -> FleetAccess:
        """Return the access of a gateway, a worker or an operator."""
        name = self.worker_user or worker if kind == WORKER else kind
        user = f"{self.tenant}{name}:{self.passwords[kind]}@" if self.passwords else ""
        urls = (self.url or self.nats.url).replace("nats://", f"nats://{user}")
        return FleetAccess(
            tuple(urls.split(",")),
            FleetNames(self.name),
            root=self.root.public,
            signer=self.signers.get(kind),
            creds=self.creds,
        )

    def operator(self) -> FleetLink:
        return FleetLink(self.access_of(OPERATOR), OPERATOR)

    def gateway_link(self) -> FleetLink:
        return FleetLink(self.access_of(GATEWAY), GATEWAY)

    @contextlib.asynccontextmanager
    async def opened_gateway_link(self) -> AsyncIterator[FleetLink]:
        """Open a link with the rights of a gateway; yield it once it is ready."""
        link = self.gateway_link()
        async with link.open():
            await link.wait_until_ready(PATIENCE)
            yield link

    async def make(self, **shape: Any) -> None:
        link = FleetLink(self.access_of(OPERATOR), OPERATOR)
        async with link.open():
            wanted = {"max_bytes": 64 << 20, "replicas": self.replicas} | shape
            await link.make(FleetShape(**wanted), 30)
            bucket = await link.streams.key_value(link.names.keys)
            await bucket.put(KEY_SET, self.key_set().encode(self.root))

    @contextlib.asynccontextmanager
    async def gateway(
        self, *, tokens: dict[str, str] | None = None, **options: Any
    ) -> AsyncIterator[str]:
        """Run a gateway; yield its URL once it is connected, unless that is not wanted."""
        is_awaited = options.pop("is_awaited", True)
        link = FleetLink(self.access_of(GATEWAY), GATEWAY)
        role = GatewayRole(link, GatewayMetrics(), resolve=_no_registry, **options)
        listening = listen("127.0.0.1:0", has_tokens=bool(tokens))
        try:
            async with role.running(), accepting(build_app(role, tokens=tokens), listening):
                if is_awaited:
                    await link.wait_until_ready(PATIENCE)
                yield listening.urls[0]
        finally:
            listening.close()

    @contextlib.asynccontextmanager
    async def worker(
        self, name: str, own: Role | Callable[[Service], Role], **settings: Any
    ) -> AsyncIterator[JoinedWorker]:
        """Run a worker; yield it once it has reported."""
        connection = ClientOptions(docker_config=self.store)
        service = make_service(Settings(**settings), LayeredStore([self.store]), connection)
        role = own if isinstance(own, Role) else own(service)
        link = FleetLink(self.access_of(WORKER, name), WORKER, name)
        joined = JoinedWorker(link, service, LocalCalls(role), WorkerIdentity(name))
        async with role.running(), joined.running():
            await link.wait_until_ready(PATIENCE)
            await until_async(lambda: bool(joined._view.models))
            await joined._publish_status()
            yield joined
        await role.drain(0, asyncio.Event())

    async def ask(self, url: str, prompt: str, **options: Any) -> tuple[int, Any]:
        """Return status and value of a gateway's response to a request for a picture."""
        headers = options.pop("headers", {})
        body = {"model": "tiny", "prompt": prompt, **options}
        async with self.session.post(url + PICTURES, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def know(self, url: str, count: int) -> None:
        """Wait until a gateway knows a number of workers."""

        async def is_known() -> bool:
            async with self.session.get(f"{url}/v1/fleet") as answer:
                return answer.status == 200 and len((await answer.json())["workers"]) == count

        await until_async(is_known)

    async def status(self, url: str) -> dict[str, Any]:
        async with self.session.get(f"{url}/v1/fleet") as answer:
            found: dict[str, Any] = await answer.json()
            return found


async def no_jobs(fleet: FleetRun, url: str) -> None:
    """Wait until no job is on the queue."""

    async def is_empty() -> bool:
        return (await fleet.status(url))["jobs"] == 0

    await until_async(is_empty)


async def run_batch(fleet: FleetRun, begin: str, end: str, *prompts: str) -> list[str]:
    """Begin a batch at a gateway, and return the first words of its output at another one."""
    line = {"method": "POST", "url": PICTURES}
    lines = (
        {**line, "custom_id": one, "body": {"model": "tiny", "prompt": one}} for one in prompts
    )
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(map(json.dumps, lines)), filename="in.jsonl")
    async with fleet.session.post(f"{begin}/v1/files", data=form) as answer:
        assert answer.status == 200, await answer.text()
        name = (await answer.json())["id"]
    body = {"input_file_id": name, "endpoint": PICTURES, "completion_window": "24h"}
    async with fleet.session.post(f"{begin}/v1/batches", json=body) as answer:
        batch = await answer.json()

    async def is_over() -> bool:
        async with fleet.session.get(f"{end}/v1/batches/{batch['id']}") as answer:
            batch.update(await answer.json())
            return batch["status"] == "completed"

    await until_async(is_over)
    async with fleet.session.get(f"{end}/v1/files/{batch['output_file_id']}/content") as answer:
        found = [json.loads(each) for each in (await answer.text()).splitlines()]
    async with fleet.session.delete(f"{end}/v1/files/{name}") as answer:
        assert (await answer.json())["deleted"]
    made = [each["response"]["body"]["data"][0]["b64_json"] for each in found]
    return sorted(text.rpartition(" ")[0] for text in made)


def _no_registry(reference: Reference) -> Digest:
    raise AssertionError(f"{reference} was looked for in a registry")
