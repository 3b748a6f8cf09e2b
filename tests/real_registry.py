"""Run a real registry in a container if a Docker engine answers, or as a child process."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import warnings
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.process import spawn
from tests.program import lack

if TYPE_CHECKING:
    from testcontainers.community.registry import DockerRegistryContainer

IMAGE = "registry:3"
USER, PASSWORD = "operator", "open sesame"
_HTPASSWD = f"{USER}:$2b$04$a7mYyL7B.7KnFTvR6z49i.8x/zQh7U6x/hFjv2IM28WT6Bc0Ag1Be\n"
_AUTHORIZATION = {"Authorization": f"Basic {b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"}
_REQUEST = re.compile(r'"(GET|HEAD|POST|PUT|PATCH|DELETE) (/v2/\S*) HTTP/[0-9.]+" (\d+)')


@dataclass
class RealRegistry:
    """``host`` is used in references; ``log`` returns the access log."""

    host: str
    log: Callable[[], bytes] | None = None

    def mark(self) -> int:
        """Return a position in the log, to count from."""
        return len(self.log()) if self.log else 0

    def count(self, mark: int, repository: str) -> Counter[str]:
        """Count requests to a repository since ``mark`` by kind: ``PUT blob`` and so on."""
        if self.log is None:
            pytest.skip("this registry keeps no log to count in")
        path = "/v2/" + repository.partition("/")[2] + "/"
        kinds: Counter[str] = Counter()
        for method, url, _ in _REQUEST.findall(self.log()[mark:].decode()):
            if url.startswith(path):
                named = (kind for kind in ("manifest", "referrer") if f"/{kind}s/" in url)
                kinds[f"{method} {next(named, 'blob')}"] += 1
        return kinds

    def blob(self, path: str, digest: object) -> bytes | None:
        """Return the bytes of a blob, or None if the repository at ``path`` does not have it."""
        try:
            with urllib.request.urlopen(
                urllib.request.Request(
                    f"http://{self.host}/v2/{path}/blobs/{digest}", headers=_AUTHORIZATION
                )
            ) as response:
                content: bytes = response.read()
        except urllib.error.HTTPError as error:
            with error:
                assert error.code == 404, error
            return None
        return content


@contextlib.contextmanager
def find_registry(directory: Path, *, private: bool = False) -> Iterator[RealRegistry]:
    """Yield a registry: a container, or Debian's docker-registry.

    Without both, skip the test, or fail it where AIMAGE_REQUIRE_TOOLS is 1.
    """
    if _engine_answers():
        registry = _container(private)
    elif shutil.which("docker-registry"):
        registry = _process(directory, private)
    else:
        lack("no registry: start a Docker engine, or install docker-registry")
    with registry as running:
        yield running


@contextlib.contextmanager
def _process(directory: Path, private: bool) -> Iterator[RealRegistry]:
    port = free_port()
    config: dict[str, object] = {
        "version": 0.1,
        "storage": {
            "filesystem": {"rootdirectory": str(directory / "data")},
            "delete": {"enabled": True},
        },
        "http": {"addr": f"127.0.0.1:{port}"},
        "log": {"level": "error"},  # beside the access log
    }
    if private:
        (directory / "htpasswd").write_text(_HTPASSWD)
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(directory / "htpasswd")}}
    (directory / "config.yml").write_text(json.dumps(config))  # JSON is valid YAML
    log = directory / "log"
    with log.open("wb") as file:
        process = spawn(
            ["docker-registry", "serve", directory / "config.yml"],
            is_shared=True,
            stdout=file,
            stderr=file,
            # a model has hundreds of blobs: less of its CPU time
            env=os.environ | {"GOGC": "800"},
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/v2/", process)
        yield RealRegistry(f"127.0.0.1:{port}", log.read_bytes)
    finally:
        process.terminate()
        process.wait(10)


@functools.cache
def _engine_answers() -> bool:
    # Imported late: most tests need no registry
    from docker.errors import DockerException
    from testcontainers.core.docker_client import DockerClient, get_docker_host

    host = get_docker_host() or "unix:///var/run/docker.sock"
    path = host.removeprefix("unix://")
    if path != host and not Path(path).exists():
        return False
    try:
        with contextlib.closing(DockerClient(timeout=10).client) as client:
            client.ping()
    except DockerException:
        return False
    return True


@contextlib.contextmanager
def _container(private: bool) -> Iterator[RealRegistry]:
    user, password = (USER, PASSWORD) if private else (None, None)
    container = container_type()(IMAGE, username=user, password=password)
    container.with_env("REGISTRY_STORAGE_DELETE_ENABLED", "true")
    container.with_env("OTEL_TRACES_EXPORTER", "none")
    with container:
        yield RealRegistry(container.get_registry(), lambda: container.get_logs()[0])


def container_type() -> type[DockerRegistryContainer]:
    """Import the class late: its module needs bcrypt, which only containers use."""
    with warnings.catch_warnings():
        # the module uses a decorator that its package has deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        from testcontainers.community.registry import DockerRegistryContainer
    return DockerRegistryContainer


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(url: str, process: subprocess.Popen[bytes], seconds: float = 20) -> None:
    """Wait until the address accepts connections."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except urllib.error.HTTPError as error:
            error.close()
            return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"{url} does not answer")
