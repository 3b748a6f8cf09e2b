"""Nodes for tests, each with a store, the addresses of its neighbours, and a server thread."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from clowder_aimage.content import copy
from clowder_aimage.errors import AImageError
from clowder_aimage.http.access import check_scope
from clowder_aimage.http.api_error import OCI, convert_error
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.peer_sharing import PeerSharing
from clowder_aimage.node.peers import LIVE, SharingLimits
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.pull import PullOptions, pull
from clowder_aimage.registry import ClientOptions, Repository
from clowder_aimage.registry.peer import PeerTimeouts
from tests.content.artifact import put_artifact
from tests.wait import PATIENCE

TOKEN = "a token that only the nodes know"
MIB = 1024 * 1024
LIMITS = SharingLimits(ping=0.1, spared=0)


def noise(size: int, seed: str = "seed") -> bytes:
    """Return pseudorandom bytes."""
    return hashlib.shake_128(seed.encode()).digest(size)


def push_model(home: Path, repository: str, *layers: bytes, tag: str = "1") -> Reference:
    """Push an artifact of those layers to a registry."""
    store = ImageLayout(home / "pushed")
    reference = Reference.parse(f"{repository}:{tag}")
    put_artifact(store, str(reference), *layers)
    with Repository(reference, ClientOptions(docker_config=home)) as target:
        copy(store, reference, target)
    return reference


class Node:
    """A node with a server. ``seen`` holds the received requests with their headers.

    ``before(request)`` may return a response instead of the node.
    """

    def __init__(self, root: Path, *, token: str | None = TOKEN, **options: Any) -> None:
        self.layout = ImageLayout(root)
        self.addresses: list[str] = []
        self.token = token
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.statuses: Counter[int] = Counter()
        self.before: Callable[[web.Request], Any] | None = None
        self.bytes: Counter[str] = Counter()  # bytes fetched for peers, and traffic
        self.has_repository = True
        self.reference: Reference | None = None  # the model that a test pulls
        self._changed = threading.Condition()
        connection = options.pop("connection", None) or ClientOptions(docker_config=root)
        self.connection = connection
        timeouts = PeerTimeouts(stall=10, range=30)
        self.id = options.get("node") or secrets.token_hex(16)
        defaults: dict[str, Any] = {
            "node": self.id,
            "limits": LIMITS,
            "timeouts": timeouts,
        }
        self.sharing = PeerSharing(
            self.layout,
            connection,
            addresses=lambda: self.addresses,
            token=token,
            has_repository=lambda _: self.has_repository,
            on_bytes=self._count,
            on_traffic=self._count,
            on_state=self._told,
            **(defaults | options),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None
        self.address = ""

    def _count(self, what: str, count: int) -> None:
        with self._changed:
            self.bytes[what] += count

    def _told(self, *_: object) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- start and end

    def start(self) -> Node:
        """Listen on a free port."""
        self._thread.start()
        self.sharing.peers.start()
        self.listen()
        return self

    def listen(self, port: int = 0) -> None:
        self._do(self._serve(port))

    def hang_up(self) -> None:
        """Abort all connections and stop listening, as if the process was killed."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self._do(self._abandon(runner))

    def stop(self) -> None:
        self.sharing.close()
        self.hang_up()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    async def _serve(self, port: int) -> None:
        scopes: dict[web.AbstractRoute, str] = {}

        @web.middleware
        async def note(request: web.Request, handler: Any) -> web.StreamResponse:
            self.seen.append((request.path_qs, dict(request.headers)))
            if self.before is not None and (answer := await self.before(request)) is not None:
                return answer
            answer = await handler(request)
            self.statuses[answer.status] += 1
            return answer

        tokens = {self.token: "node"} if self.token else {}
        app = web.Application(middlewares=[_errors, note, check_scope(tokens, scopes)])
        warnings.simplefilter(
            "ignore", web.NotAppKeyWarning
        )  # the worker's application does the same
        for route in self.sharing.registry.build_routes():
            for method in (route.method, "HEAD"):
                added = app.router.add_route(method, route.path, route.handler)
                scopes[added] = route.scope
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def _abandon(self, runner: web.AppRunner) -> None:
        assert runner.server is not None
        for connection in runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the state of a neighbour makes a condition true."""
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), self.sharing.peers.list_states()

    def knows(self, *others: str) -> None:
        """Wait until the peers at these addresses are live."""
        wanted = {f"http://{other}" for other in others}
        self.wait_until(
            lambda: (
                wanted
                <= {
                    each["url"]
                    for each in self.sharing.peers.list_states()
                    if each["state"] == LIVE
                }
            )
        )

    # -- pulls

    def pull(self, reference: Reference) -> tuple[Descriptor, Counter[str]]:
        """Pull through the neighbours; return the descriptor and the bytes by source."""
        came: Counter[str] = Counter()

        def count(source: str, number: int) -> None:
            came[source] += number

        near = self.sharing.build_source_wrapper(reference, count)
        return pull(reference, self.layout, self.connection, PullOptions(wrap=near)).root, came

    def blob_requests(self) -> list[tuple[str, dict[str, str]]]:
        return [each for each in self.seen if "/blobs/" in each[0]]


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:
        if isinstance(error, AImageError):
            error = convert_error(error, OCI)
        status, headers = getattr(error, "status", 500), getattr(error, "headers", None)
        return web.json_response({"error": str(error)}, status=status, headers=headers)


@contextlib.contextmanager
def fleet(
    home: Path, count: int, *, ids: Sequence[str] = (), **options: Any
) -> Iterator[list[Node]]:
    """Run nodes that are configured as peers of each other."""
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in range(count):
            named = {"node": ids[number]} if ids else {}
            nodes.append(Node(home / f"node-{number}", **named, **options).start())
            stack.callback(nodes[-1].stop)
        acquaint(nodes)
        yield nodes


def acquaint(nodes: list[Node]) -> None:
    """Set the addresses of all nodes on each, and wait until the peers are live."""
    for node in nodes:
        node.addresses[:] = [each.address for each in nodes]
    for node in nodes:
        node.knows(*(each.address for each in nodes if each is not node))


def all_at_once(calls: list[Callable[[], Any]], seconds: float = 120) -> list[Any]:
    """Run calls in threads and return their results, or raise the first error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(seconds) for each in [pool.submit(call) for call in calls]]
