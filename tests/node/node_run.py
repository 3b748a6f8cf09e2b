"""Nodes with a server, a store and a directory of desired state."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from clowder_aimage.config.token_file import read_tokens
from clowder_aimage.http.listening_socket import listen
from clowder_aimage.http.server import accepting
from clowder_aimage.layout import ImageLayout
from clowder_aimage.registry import ClientOptions
from tests.process import Aimage
from tests.wait import until
from tests.worker.conftest import ExceptionLog, Worker, begin

if TYPE_CHECKING:
    from clowder_aimage.node.settings import NodeSettings


class NodeRun:
    """A node that a test observes as its clients do, at ``url``."""

    url: str

    def __init__(
        self, home: Path, *arguments: object, store: Path | None = None, has_list: bool = True
    ) -> None:
        home.mkdir(exist_ok=True)
        self.desired = home / "desired"
        self.desired.mkdir(exist_ok=True)
        self.aimage = Aimage(home, store or home / "store")
        self._arguments = (*(("--desired", self.desired) if has_list else ()), *arguments)

    def start(self, *more: object) -> Self:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    def want(self, *entries: dict[str, Any], file: str = "models.json") -> None:
        """Replace a file of the desired state atomically."""
        beside = self.desired / f".{file}"
        beside.write_text(json.dumps(list(entries)))
        beside.replace(self.desired / file)

    def get(self, path: str) -> Any:
        """Return the JSON document at a path."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.get("/v1/node")
        return status

    def model(self, ref: str) -> dict[str, Any]:
        models = [each for each in self.status()["models"] if each["ref"] == ref]
        return models[0] if models else {"state": "not wanted"}

    def reaches(self, ref: str, state: str) -> dict[str, Any]:
        """Wait until a model is in a state."""

        def there() -> dict[str, Any] | None:
            model = self.model(ref)
            return model if model["state"] == state else None

        model: dict[str, Any] = until(there, f"{ref} to be {state}: {self.status()}")
        return model

    def readiness(self) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of /readyz."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def metric(self, line: str) -> float:
        """Return the value of a line of /metrics, or 0 if it is missing."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            for each in answer.read().decode().splitlines():
                name, _, value = each.rpartition(" ")
                if name == line:
                    return float(value)
        return 0.0

    def names(self) -> set[str]:
        return {name for name, _ in ImageLayout(self.aimage.store).list_tags()}


class LiveNode(NodeRun):
    """``aimage node`` in a child process."""

    _worker: Worker | None = None

    def start(self, *more: object, **environment: str) -> Self:
        words = (*self._arguments, *more)
        self.worker = begin(self.aimage, *words, verb="node", **environment)
        return self

    @property
    def worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    @worker.setter
    def worker(self, worker: Worker) -> None:
        self._worker, self.url = worker, worker.url

    def end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


class LocalNode(NodeRun):
    """A node in this process; its event loop has its own thread.

    ``end`` fails the test if an exception was logged meanwhile and is still in ``exceptions``.
    """

    _thread: threading.Thread | None = None

    def start(self, *more: object) -> Self:
        settings = _settings(*self._arguments, *more)
        self._log = ExceptionLog()
        self.exceptions = self._log.found
        logging.getLogger("aimage").addHandler(self._log)
        ready: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, args=(settings, ready), daemon=True)
        self._thread.start()
        self.url = ready.result(60)
        return self

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the facts of all events of a kind so far."""
        return [item.facts for item in list(self._service.events._retained) if item.kind == kind]

    def end(self) -> None:
        if self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(60)
        self._thread = None
        logging.getLogger("aimage").removeHandler(self._log)
        assert not self.exceptions

    def _run(self, settings: NodeSettings, ready: Future[str]) -> None:
        try:
            asyncio.run(self._serve(settings, ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _serve(self, settings: NodeSettings, ready: Future[str]) -> None:
        from clowder_aimage.api.service import make_service
        from clowder_aimage.api.worker_role import WorkerRole
        from clowder_aimage.http.app import build_app
        from clowder_aimage.node.daemon import Daemon

        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        tokens = read_tokens(settings.token_file) if settings.token_file else {}
        listeners = listen(settings.addr, None, has_tokens=bool(tokens))
        connection = ClientOptions(docker_config=self.aimage.home / "docker")
        self._service = service = make_service(settings, ImageLayout(self.aimage.store), connection)
        own = WorkerRole(service, makes_pictures=False)
        daemon = Daemon(service, settings, tokens)
        app = build_app(daemon, own, tokens=tokens)
        try:
            async with daemon.running(), own.running(), accepting(app, listeners):
                await own.signal_ready()
                ready.set_result(listeners.urls[0])
                await self._over.wait()
                await own.drain(0.0, asyncio.Event())
        finally:
            listeners.close()


def _settings(*arguments: object) -> NodeSettings:
    """Parse command line options of ``aimage node`` into settings."""
    from clowder_aimage.cli.verbs.node import node
    from clowder_aimage.engine.settings import gather
    from clowder_aimage.node.settings import NodeSettings

    words = [str(each) for each in arguments]
    if "--addr" not in words:
        words = ["--addr", "127.0.0.1:0", *words]
    options = node.make_context("node", words).params
    known = {name: value for name, value in options.items() if name in NodeSettings.model_fields}
    return gather(NodeSettings, known, None)[0]
