"""Live workers for the tests of this directory."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from tests.process import Aimage


@dataclass
class Worker:
    """``aimage serve`` in a child process, on a free port, and the store that it serves.

    ``lines`` are what it has written to standard error so far.
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
        """Another worker on the same store; it ends when this one does."""
        other = begin(self.aimage, *arguments, **environment)
        self._others.append(other)
        return other

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    def get(self, path: str, **headers: str) -> Any:
        """The JSON at a path."""
        asked = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.load(answer)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End it; its exit code and all that it wrote to standard error."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        code = self.process.wait(30)
        if self._reader is not None:
            self._reader.join(10)
        return code, "".join(self.lines)

    def end(self) -> None:
        """End it and its others, and leave nothing open."""
        for other in self._others:
            other.end()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def begin(here: Aimage, *arguments: object, verb: str = "serve", **environment: str) -> Worker:
    """Start a worker, or a node; it listens on a free port of 127.0.0.1 unless ``arguments`` say
    where."""
    said = [str(each) for each in arguments]
    if not {"--addr", "--socket"} & set(said) and "AIMAGE_SERVE_ADDR" not in environment:
        said = ["--addr", "127.0.0.1:0", *said]
    settings = here.environment | {"PYTHONWARNINGS": "error"} | environment
    process = Aimage(here.home, here.store, settings).start(verb, "--json", *said)
    assert process.stdout is not None
    worker = Worker("", here.store, here, process)
    worker._reader = threading.Thread(target=_read, args=(process, worker.lines), daemon=True)
    worker._reader.start()
    line = process.stdout.readline()  # ends with the process, if it fails
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


def answer_to(asked: urllib.request.Request) -> tuple[int, Any, bytes]:
    """The status, the headers and the body of an answer, whatever it is."""
    try:
        with urllib.request.urlopen(asked, timeout=100) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


@pytest.fixture(scope="session")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds the embedded model as ``tiny``; to be copied, not written to."""
    home = tmp_path_factory.mktemp("stocked")
    Aimage(home, home / "store")("create", "-q", "tiny", TINY)
    return home / "store"


@pytest.fixture(scope="module")
def worker(stocked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that the tests of a module share, with a store of its own."""
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    home = tmp_path_factory.mktemp("worker")
    shutil.copytree(stocked, home / "store")
    found = begin(Aimage(home, home / "store"))
    yield found
    found.end()
