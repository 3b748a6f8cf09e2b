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
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from docker.errors import DockerException
from testcontainers.core.docker_client import DockerClient, get_docker_host

from tests.process import spawn

if TYPE_CHECKING:
    from testcontainers.community.registry import DockerRegistryContainer

IMAGE = "registry:3"
USER, PASSWORD = "operator", "open sesame"
_HTPASSWD = f"{USER}:$2b$04$a7mYyL7B.7KnFTvR6z49i.8x/zQh7U6x/hFjv2IM28WT6Bc0Ag1Be\n"
_REQUEST = re.compile(r'"(GET|HEAD|POST|PUT|PATCH|DELETE) (/v2/\S*) HTTP/[0-9.]+" (\d+)')


@dataclass
class RealRegistry:
    """``host`` is used in references; ``log`` returns the access log."""

    host: str
    log: Callable[[], bytes] | None = None
    root: Path | None = None

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
                kinds[f"{method} {'manifest' if '/manifests/' in url else 'blob'}"] += 1
        return kinds

    def blob(self, digest: str) -> Path:
        """Return the path of a blob in the registry's storage."""
        if self.root is None:
            pytest.skip("this registry's disk cannot be reached")
        encoded = digest.removeprefix("sha256:")
        return self.root / "docker/registry/v2/blobs/sha256" / encoded[:2] / encoded / "data"


@contextlib.contextmanager
def find_registry(directory: Path, *, private: bool = False) -> Iterator[RealRegistry]:
    """Yield a registry: a container, or Debian's docker-registry.

    Without both, skip the test, or fail it where AIMAGE_REQUIRE_REGISTRY is 1.
    """
    if _engine_answers():
        registry = _container(directory, private)
    elif shutil.which("docker-registry"):
        registry = _process(directory, private)
    elif os.environ.get("AIMAGE_REQUIRE_REGISTRY") == "1":
        pytest.fail("no registry: neither a Docker engine nor docker-registry is here")
    else:
        pytest.skip("no registry: start a Docker engine, or install docker-registry")
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
            env=os.environ | {"GOGC": "800"},  # a model has hundreds of blobs: less of its CPU time
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/v2/", process)
        yield RealRegistry(f"127.0.0.1:{port}", log.read_bytes, directory / "data")
    finally:
        process.terminate()
        process.wait(10)


@functools.cache
def _engine_answers() -> bool:
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
def _container(directory: Path, private: bool) -> Iterator[RealRegistry]:
    """Run the registry as this user, so that tests can read and write its files."""
    root = directory / "data"
    root.mkdir()
    user, password = (USER, PASSWORD) if private else (None, None)
    container = container_type()(IMAGE, username=user, password=password)
    container.with_env("REGISTRY_STORAGE_DELETE_ENABLED", "true")
    container.with_env("OTEL_TRACES_EXPORTER", "none")
    container.with_volume_mapping(root, "/var/lib/registry", "rw")
    container.with_kwargs(user=f"{os.getuid()}:{os.getgid()}")
    with container:
        yield RealRegistry(container.get_registry(), lambda: container.get_logs()[0], root)


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
