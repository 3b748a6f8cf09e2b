"""Run a real registry as a child process, or in a container if an engine is available."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.process import run, spawn

USER, PASSWORD = "operator", "open sesame"
_HTPASSWD = f"{USER}:$2b$04$a7mYyL7B.7KnFTvR6z49i.8x/zQh7U6x/hFjv2IM28WT6Bc0Ag1Be\n"
_AUTHORIZATION = {"Authorization": f"Basic {b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"}
_REQUEST = re.compile(r'"(GET|HEAD|POST|PUT|PATCH|DELETE) (/v2/\S*) HTTP/[0-9.]+" (\d+)')


@dataclass
class RealRegistry:
    """``host`` is used in references; ``log`` contains the access log."""

    host: str
    log: Path | None = None

    def mark(self) -> int:
        """Return a position in the log, to count from."""
        return self.log.stat().st_size if self.log else 0

    def count(self, mark: int, repository: str) -> Counter[str]:
        """Count requests to a repository since ``mark`` by kind: ``PUT blob`` and so on."""
        if self.log is None:
            pytest.skip("this registry keeps no log to count in")
        path = "/v2/" + repository.partition("/")[2] + "/"
        kinds: Counter[str] = Counter()
        for method, url, _ in _REQUEST.findall(self.log.read_bytes()[mark:].decode()):
            if url.startswith(path):
                kinds[f"{method} {'manifest' if '/manifests/' in url else 'blob'}"] += 1
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
    """Return Debian's docker-registry or a container; else skip the test, or fail it in CI."""
    if shutil.which("docker-registry"):
        with _process(directory, private) as found:
            yield found
        return
    if not private and _engine():
        with _container() as found:
            yield found
        return
    if os.environ.get("AIMAGE_REQUIRE_REGISTRY") == "1":
        pytest.fail("no registry: neither docker-registry nor a Docker engine is here")
    pytest.skip("no registry: install docker-registry, or start a Docker engine")


@contextlib.contextmanager
def _process(directory: Path, private: bool) -> Iterator[RealRegistry]:
    port = free_port()
    config: dict[str, object] = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(directory / "data")}, "delete": {"enabled": True}},
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
            # a model has hundreds of blobs: it takes less CPU time on one thread
            env=os.environ | {"GOGC": "800"},
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/v2/", process)
        yield RealRegistry(f"127.0.0.1:{port}", log)
    finally:
        process.terminate()
        process.wait(10)


def _engine() -> bool:
    docker = shutil.which("docker")
    if docker is None:
        return False
    return run([docker, "info"], timeout=20).returncode == 0


@contextlib.contextmanager
def _container() -> Iterator[RealRegistry]:
    from testcontainers.registry import DockerRegistryContainer

    with DockerRegistryContainer("registry:3") as container:
        yield RealRegistry(container.get_registry())


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
