"""Run the processes of deploy/ and docker-compose.yml without an engine or systemd.

They run as far as is possible without those: up to an image.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.deploy.client import PNG, TIMEOUT, Client
from tests.deploy.confined import CANNOT
from tests.deploy.written import (
    DEPLOY,
    DOCKERFILES,
    PROGRAM,
    ROOT,
    UNITS,
    WORKER,
    compose,
    last,
    unit,
)
from tests.process import Aimage, reaped, run, spawn
from tests.real_registry import RealRegistry
from tests.worker.conftest import Worker, begin

AIMAGE = Path(sys.executable).with_name("aimage")
CONFINED = [sys.executable, str(Path(__file__).with_name("confined.py"))]
SHAPES = ROOT / "examples" / "shapes" / "model"


@pytest.fixture(autouse=True)
def _needs() -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    if not AIMAGE.is_file():
        pytest.skip("aimage is not installed beside this Python")


# -- compose


@dataclass
class Containers:
    """Local paths in place of those in the compose file's containers."""

    home: Path
    registry: str
    places: dict[str, str] = field(default_factory=dict)
    said: str = ""  # stdout of ``init``

    def __post_init__(self) -> None:
        for name in ("access", "store", "tmp"):
            (self.home / name).mkdir()
        self.places = {
            "registry:5000": self.registry,
            "/model": str(SHAPES),
            "/run/aimage": str(self.home / "access"),
            "/tmp": str(self.home / "tmp"),
            "/etc/aimage/config.json": str(self.home / "config.json"),
            ":11434": ":0",
        }
        config = (DEPLOY / "docker" / "config.json").read_text()
        (self.home / "config.json").write_text(self.here(config))

    def here(self, text: str) -> str:
        """Replace the paths in a text of the compose file."""
        known = "|".join(map(re.escape, self.places))
        return re.sub(known, lambda found: self.places[found[0]], text)

    def environment(self, service: str) -> dict[str, str]:
        said = compose()["services"][service]["environment"]
        return {key: self.here(value) for key, value in said.items()}

    def init(self) -> str:
        """Run the service ``init``; return its stdout."""
        path = f"{AIMAGE.parent}{os.pathsep}{os.environ['PATH']}"
        kept = {key: value for key, value in os.environ.items() if not key.startswith("AIMAGE_")}
        done = run(
            ["/bin/sh", DEPLOY / "docker" / "init.sh"],
            env={**kept, **self.environment("init"), "HOME": str(self.home), "PATH": path},
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def caged(self) -> list[str]:
        """Return the command prefix that confines a program as the compose file does."""
        if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
            pytest.skip("only root may make other mounts, and unshare and setpriv are needed")
        places = [str(self.home / name) for name in ("access", "store", "tmp")]
        cage = [
            "unshare",
            "--mount",
            "sh",
            str(Path(__file__).with_name("caged.sh")),
            *places,
            "--",
        ]
        tried = run([*cage, "true"], text=True)
        if tried.returncode:
            pytest.skip(f"no cage here: {tried.stderr.strip()}")
        return cage

    @contextlib.contextmanager
    def worker(self) -> Iterator[Worker]:
        """Run the service ``worker``."""
        _, *options = map(self.here, compose()["services"]["worker"]["command"])
        here = Aimage(self.home, self.home / "store")
        found = begin(here, *options, **self.environment("worker"))
        try:
            yield found
        finally:
            found.end()

    @property
    def token(self) -> str:
        scope, token = (self.home / "access" / "token").read_text().split()
        assert scope == "admin"
        return token


@pytest.fixture(scope="module")
def containers(
    tmp_path_factory: pytest.TempPathFactory, registry: RealRegistry
) -> Iterator[Containers]:
    """Return the paths after ``init`` has run."""
    with reaped():
        containers = Containers(tmp_path_factory.mktemp("containers"), registry.host)
        containers.said = containers.init()
        yield containers


def test_init_pushes_a_model_and_creates_a_token_once(containers: Containers) -> None:
    first = containers.said
    place = containers.home / "access" / "token"
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    token = containers.token
    assert re.fullmatch(r"[0-9a-f]{64}", token)
    assert first.splitlines()[-1].startswith("sha256:")
    shutil.rmtree(containers.home / "tmp" / "store")
    assert containers.init() == first
    assert containers.token == token


def test_the_worker_of_the_compose_file_generates_an_image(containers: Containers) -> None:
    """The health checks of the images succeed while it runs."""
    with containers.worker() as worker:
        checks = [health_check(path, worker.host) for path in DOCKERFILES]
        assert [run(check).returncode for check in checks] == [0] * len(checks)
        place = worker.url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
        assert Client(place).ask("GET", "/healthz")[0] == 200
        status, _ = Client(place).ask("POST", "/v1/images/generations", {"prompt": "a red circle"})
        assert status == 401
        client = Client(place, containers.token)
        assert client.picture().startswith(PNG)
        assert client.picture(model="gpt-image-1").startswith(PNG)
    assert all(run(check).returncode for check in checks)


def health_check(path: Path, host: str) -> list[str]:
    """Return the command of a HEALTHCHECK, for a worker at ``host``."""
    words = json.loads(last(path, "HEALTHCHECK").partition("CMD ")[2])
    assert any("127.0.0.1:11434" in word for word in words)
    return [
        word.replace("127.0.0.1:11434", host.replace("0.0.0.0", "127.0.0.1"))  # noqa: S104
        for word in (sys.executable, *words[1:])
    ]


def test_a_confined_program_cannot_write_elsewhere(containers: Containers) -> None:
    other = containers.home / "config.json"
    done = run([*containers.caged, "touch", other], text=True)
    assert done.returncode == 1
    assert "Read-only file system" in done.stderr


def test_a_worker_needs_no_capability_and_writes_only_to_its_volume(
    containers: Containers,
) -> None:
    _, *options = map(containers.here, compose()["services"]["worker"]["command"])
    environment = {
        "AIMAGE_STORE": str(containers.home / "store"),
        "XDG_STATE_HOME": str(containers.home / "tmp"),
        "TMPDIR": str(containers.home / "tmp"),
        "HOME": "/nobodys",
        "PATH": os.environ["PATH"],
        **containers.environment("worker"),
    }
    process = spawn(
        [*containers.caged, str(AIMAGE), "serve", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip().rpartition(":")[2]
        assert Client(f"http://127.0.0.1:{port}", containers.token).picture().startswith(PNG)
        process.terminate()
        assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()
        process.communicate()


# -- systemd


def confined(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command under the worker's system call filter; skip if it is not supported."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    done = run(
        [*CONFINED, str(WORKER), *map(str, command)],
        text=True,
        timeout=TIMEOUT,
    )
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())
    return done


@pytest.mark.parametrize(
    "attempt",
    [
        "import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)",
        "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "import os; os.chroot('/')",
        "import os; os.sched_setaffinity(0, os.sched_getaffinity(0))",
    ],
)
def test_the_filters_enforce_the_unit(attempt: str) -> None:
    done = confined(sys.executable, "-c", attempt)
    assert done.returncode == 1
    assert "Operation not permitted" in done.stderr


@dataclass
class Activated:
    """A worker that systemd-socket-activate starts at the first connection."""

    process: subprocess.Popen[bytes]
    client: Client
    word: socket.socket

    def said(self) -> str:
        """Return the next notification that it sends to systemd."""
        return self.word.recv(4096).decode()


@pytest.fixture
def activated(stocked_shapes: Path) -> Iterator[Activated]:
    """Return the command of aimage.service, with a socket of systemd's tool and its filters."""
    tool = shutil.which("systemd-socket-activate")
    if tool is None:
        pytest.skip("systemd-socket-activate is not installed")
    confined("/bin/true")
    program, *arguments = shlex.split(unit(WORKER)["ExecStart"])
    assert program == PROGRAM
    with contextlib.ExitStack() as stack:
        # a short path: socket paths are limited to 107 characters
        short = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        word = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        word.bind(str(short / "notify"))
        word.settimeout(TIMEOUT)
        environment = {
            "NOTIFY_SOCKET": str(short / "notify"),
            "AIMAGE_STORE": str(stocked_shapes),
            "AIMAGE_SERVE_DEFAULT_MODEL": "shapes",
            "HOME": str(short),
        }
        place = str(short / "aimage.sock")
        command = [tool, "-l", place]
        for key, value in environment.items():
            command += ["-E", f"{key}={value}"]
        command += [*CONFINED, str(WORKER), str(AIMAGE), *arguments]
        process = spawn(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        stack.callback(_end, process)
        assert process.stderr is not None
        assert b"Listening" in process.stderr.readline()
        yield Activated(process, Client(f"unix://{place}"), word)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def stocked_shapes(tmp_path: Path) -> Path:
    Aimage(tmp_path, tmp_path / "store")("create", "-q", "shapes", SHAPES)
    return tmp_path / "store"


def test_the_service_generates_images_under_its_own_filters(activated: Activated) -> None:
    assert activated.client.picture(seed=1).startswith(PNG)
    assert activated.said() == "READY=1"
    activated.process.send_signal(signal.SIGTERM)
    assert activated.said() == "STOPPING=1"
    assert activated.process.wait(TIMEOUT) == 0


def test_the_registry_serves_under_its_own_filters(tmp_path: Path) -> None:
    (path,) = (path for path in UNITS if path.stem == "aimage-registry")
    confined("/bin/true")
    _, *arguments = shlex.split(unit(path)["ExecStart"])
    here = [re.sub(r":\d+$", ":0", word) for word in arguments]
    process = spawn(
        [*CONFINED, str(path), str(AIMAGE), *here],
        env={**os.environ, "AIMAGE_STORE": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        client = Client(process.stdout.readline().strip())
        assert client.ask("GET", "/v2/")[0] == 200
        process.terminate()
        assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()
        process.communicate()
