"""Fixtures that start workers, in this process or in child processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.registry import ClientOptions
from tests.conftest import TINY
from tests.process import Aimage
from tests.store import copy_store
from tests.wait import PATIENCE, until

if TYPE_CHECKING:
    from clowder_aimage.api.service import Service
    from clowder_aimage.engine.settings import Settings
    from clowder_aimage.fleet.gateway.role import GatewayRole
    from clowder_aimage.http.route import Role
    from tests.fleet.fleet_run import Nats

GATEWAY_NATS: Nats | None = None  # with --gateway, the server of the gateways before workers


@pytest.fixture(scope="session", autouse=True)
def gateways(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Put a gateway before each worker in this process if ``--gateway`` is set."""
    if not request.config.getoption("--gateway"):
        yield
        return
    from tests.fleet.fleet_run import Nats

    global GATEWAY_NATS
    GATEWAY_NATS = Nats(tmp_path_factory.mktemp("nats") / "js").start()
    yield
    GATEWAY_NATS.kill()
    GATEWAY_NATS = None


@dataclass
class Worker:
    """Run ``aimage serve`` in a child process, on a free port.

    ``lines`` holds the lines written to standard error so far.
    """

    url: str
    store: Path
    aimage: Aimage
    process: subprocess.Popen[str]
    urls: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    _others: list[Worker] = field(default_factory=list)
    _reader: threading.Thread | None = None

    def start(self, *arguments: object, **environment: str) -> Worker:
        """Start another worker on the same store. ``end`` ends both."""
        other = begin(self.aimage, *arguments, **environment)
        self._others.append(other)
        return other

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    def get(self, path: str, **headers: str) -> Any:
        """Return the JSON document at a path."""
        return get(self.url + path, headers)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal, and return the exit code and all of standard error."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        code = self.process.wait(PATIENCE)
        if self._reader is not None:
            self._reader.join(PATIENCE)
        return code, "".join(self.lines)

    def end(self) -> None:
        """End this worker and those started from it, and close the pipes."""
        for other in self._others:
            other.end()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def begin(here: Aimage, *arguments: object, verb: str = "serve", **environment: str) -> Worker:
    """Start a worker or a node.

    It listens on a free port of 127.0.0.1 unless ``arguments`` name an address.
    """
    said = [str(each) for each in arguments]
    if not {"--addr", "--socket"} & set(said) and "AIMAGE_SERVE_ADDR" not in environment:
        said = ["--addr", "127.0.0.1:0", *said]
    settings = here.environment | {"PYTHONWARNINGS": "error"} | environment
    process = Aimage(here.home, here.store, settings).start(verb, "--json", *said)
    assert process.stdout is not None
    worker = Worker("", here.store, here, process)
    worker._reader = threading.Thread(target=_read, args=(process, worker.lines), daemon=True)
    worker._reader.start()
    line = process.stdout.readline()  # empty if the process fails to start
    if not line:
        code, errors = worker.wait()
        worker.end()
        raise AssertionError(f"no worker, exit code {code}: {errors}")
    worker.urls = json.loads(line)["urls"]
    worker.url = worker.urls[0]
    return worker


def _read(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stderr is not None
    with contextlib.suppress(ValueError):
        lines.extend(iter(process.stderr.readline, ""))


def get(url: str, headers: Mapping[str, str]) -> Any:
    with urllib.request.urlopen(
        urllib.request.Request(url, headers=dict(headers)), timeout=PATIENCE
    ) as answer:
        return json.load(answer)


def answer_to(asked: urllib.request.Request) -> tuple[int, Any, bytes]:
    """Return the status, headers and body of a response, errors included."""
    try:
        with urllib.request.urlopen(asked, timeout=100) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


class ExceptionLog(logging.Handler):
    """Collect the log records that have a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or "Traceback" in str(vars(record)):
            self.found.append(self.format(record))


class LocalWorker:
    """Run a worker in this process, on a free port; its event loop has its own thread.

    ``launch`` starts ``aimage serve`` as a process, on the same store. ``end`` fails the test if an
    exception was logged meanwhile and is still in ``exceptions``.
    """

    def __init__(self, here: Aimage, *arguments: object) -> None:
        from clowder_aimage.config.token_file import read_tokens
        from clowder_aimage.http.listening_socket import listen

        self._log = ExceptionLog()
        self.exceptions = self._log.found
        logging.getLogger("aimage").addHandler(self._log)
        self.aimage, self.store = here, here.store
        self._settings = _settings(arguments)
        path = self._settings.token_file
        self._tokens = read_tokens(path) if path else {}
        address = self._settings.addr or (None if self._settings.socket else "127.0.0.1:0")
        is_guarded = bool(self._tokens)
        self._listeners = listen(address, self._settings.socket, has_tokens=is_guarded)
        self.urls = self._listeners.urls
        self.url = self.urls[0]
        self._others: list[LocalWorker | Worker] = []
        self._gateway: GatewayRole | None = None
        self._ready: Future[Service] = Future()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.service = self._ready.result(PATIENCE)

    @property
    def has_gateway(self) -> bool:
        """Return whether clients meet a gateway, which lets requests wait in a queue of its own."""
        return GATEWAY_NATS is not None

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    def get(self, path: str, **headers: str) -> Any:
        """Return the JSON document at a path."""
        return get(self.url + path, headers)

    def start(self, *arguments: object) -> LocalWorker:
        """Start another worker on the same store. ``end`` ends both."""
        other = LocalWorker(self.aimage, *arguments)
        self._others.append(other)
        return other

    def launch(self, *arguments: object, **environment: str) -> Worker:
        """Start a worker process on the same store. ``end`` ends both."""
        other = begin(self.aimage, *arguments, **environment)
        self._others.append(other)
        return other

    def notice(self) -> None:
        """Wait until a gateway has heard what others changed in the store."""
        if self._gateway is not None:
            from clowder_aimage.api.model_description import ModelDescriptions
            from clowder_aimage.fleet.store_view import StoreView

            store, workers = LayeredStore([self.store]), self._gateway._watch.workers
            view = StoreView(store, ModelDescriptions(store))
            view.read()
            until(lambda: [status.models for status in workers.list_statuses()] == [view.models])

    def drain(self) -> None:
        """Begin a graceful shutdown without waiting for its end."""
        self._loop.call_soon_threadsafe(self._over.set)

    def end(self) -> None:
        """End this worker and those started from it."""
        for other in self._others:
            other.end()
        if self._thread.is_alive():
            self.drain()
            self._thread.join(PATIENCE)
        self._listeners.close()
        logging.getLogger("aimage").removeHandler(self._log)
        assert not self.exceptions

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _serve(self) -> None:
        from clowder_aimage.api.service import make_service
        from clowder_aimage.api.worker_role import WorkerRole
        from clowder_aimage.http.app import build_app
        from clowder_aimage.http.server import accepting

        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        connection = ClientOptions(docker_config=self.aimage.home / "docker")
        service = make_service(self._settings, LayeredStore([self.store]), connection)
        own = WorkerRole(service)
        hosts = self._listeners.hosts
        async with own.running(), self._entered(service, own) as role:
            app = build_app(
                role, tokens=self._tokens, hosts=None if hosts is None else frozenset(hosts)
            )
            async with accepting(app, self._listeners):
                self._ready.set_result(service)
                await own.signal_ready()
                await self._over.wait()
                await own.drain(0.0, asyncio.Event())

    @contextlib.asynccontextmanager
    async def _entered(self, service: Service, own: Role) -> AsyncIterator[Role]:
        """Yield the role that clients meet: the worker itself, or a gateway before it."""
        if GATEWAY_NATS is None:
            yield own
            return
        from tests.fleet.gateway_before import gateway_before

        async with gateway_before(GATEWAY_NATS, service, own) as self._gateway:
            yield self._gateway


def _settings(arguments: tuple[object, ...]) -> Settings:
    """Parse command line options of ``aimage serve`` into settings."""
    from clowder_aimage.cli.verbs.serve import serve
    from clowder_aimage.engine.settings import Settings, gather

    options = serve.make_context("serve", [str(each) for each in arguments]).params
    options["aliases"] = ",".join(options["aliases"]) or None
    given = {name: value for name, value in options.items() if name in Settings.model_fields}
    return gather(Settings, given, None)[0]


@pytest.fixture(scope="session")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that holds the embedded model as ``tiny``. Copy it before writing."""
    home = tmp_path_factory.mktemp("stocked")
    Aimage(home, home / "store")("create", "-q", "tiny", TINY)
    return home / "store"


@pytest.fixture(scope="module")
def worker(stocked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    """Return a worker with its own store, shared by the tests of a module."""
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    home = tmp_path_factory.mktemp("worker")
    copy_store(stocked, home / "store")
    found = LocalWorker(Aimage(home, home / "store"))
    yield found
    found.end()


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[LocalWorker]:
    """Return a worker with an empty store."""
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    found = LocalWorker(Aimage(tmp_path, tmp_path / "store"))
    yield found
    found.end()
