"""Live nodes for the tests of this directory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from tests.node.publisher import Publisher
from tests.process import Aimage
from tests.proxy import Proxy
from tests.real_registry import RealRegistry
from tests.worker.conftest import Worker, begin

PATIENCE = 60.0  # timeout in seconds


def until(holds: Callable[[], Any], what: str) -> Any:
    """Poll until ``holds()`` is true, and return its value."""
    end = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.05)
    return found


class LiveNode:
    """``aimage node`` in a child process, with a store and a directory of desired state."""

    def __init__(self, home: Path, *arguments: object, store: Path | None = None) -> None:
        home.mkdir(exist_ok=True)
        self.desired = home / "desired"
        self.desired.mkdir(exist_ok=True)
        self.aimage = Aimage(home, store or home / "store")
        self._arguments = arguments
        self._worker: Worker | None = None

    def start(self, *more: object, **environment: str) -> LiveNode:
        said = ("--desired", self.desired, *self._arguments, *more)
        self.worker = begin(self.aimage, *said, verb="node", **environment)
        return self

    @property
    def worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    @worker.setter
    def worker(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def url(self) -> str:
        return self.worker.url

    def want(self, *entries: dict[str, Any], file: str = "models.json") -> None:
        """Replace a file of the desired state atomically."""
        beside = self.desired / f".{file}"
        beside.write_text(json.dumps(list(entries)))
        beside.replace(self.desired / file)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.worker.get("/v1/node")
        return found

    def model(self, ref: str) -> dict[str, Any]:
        found = [each for each in self.status()["models"] if each["ref"] == ref]
        return found[0] if found else {"state": "not wanted"}

    def reaches(self, ref: str, state: str) -> dict[str, Any]:
        """Wait until a model is in a state."""

        def there() -> dict[str, Any] | None:
            found = self.model(ref)
            return found if found["state"] == state else None

        found: dict[str, Any] = until(there, f"{ref} to be {state}: {self.status()}")
        return found

    def readiness(self) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of /readyz."""
        import urllib.error
        import urllib.request

        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def metric(self, line: str) -> float:
        """Return the value of a line of /metrics, or 0 if it is missing."""
        import urllib.request

        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            for each in answer.read().decode().splitlines():
                name, _, value = each.rpartition(" ")
                if name == line:
                    return float(value)
        return 0.0

    def names(self) -> set[str]:
        return {each["reference"] for each in json.loads(self.aimage("ls", "--json").out)}

    def end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LiveNode]:
    """Return a node that is not started yet."""
    found = LiveNode(tmp_path / "node")
    yield found
    found.end()


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Aimage:
    """Return a command line with a store to publish models from."""
    home = tmp_path_factory.mktemp("author")
    aimage = Aimage(home, home / "store")
    aimage("create", "-q", "tiny", TINY)
    return aimage


@pytest.fixture
def proxy(registry: RealRegistry) -> Iterator[Proxy]:
    with Proxy(registry.host).running() as running:
        yield running


@pytest.fixture
def publisher(tmp_path: Path, repository: str, proxy: Proxy) -> Publisher:
    """Return a publisher of small models in a registry behind a proxy."""
    return Publisher(tmp_path, repository, proxy)
