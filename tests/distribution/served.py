"""A real server in a child process, and HTTP requests to it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import requests

from tests.process import spawn

REPOSITORY_ROOT = Path(__file__).parents[2]
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"

PROGRAM = """
import os, sys, tempfile
from pathlib import Path
flags = dict(flag.partition("=")[::2] for flag in sys.argv[3:])
if "processes" in flags:
    metrics = tempfile.TemporaryDirectory()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics.name
from clowder_aimage.layout import ImageLayout, LayeredStore
from clowder_aimage.distribution import cache, catalog_routes
from clowder_aimage.distribution import role as registry_role
from clowder_aimage.http import body_stream, connection
from clowder_aimage.http import server as http_server
if "impatient" in flags:
    body_stream.READ_TIMEOUT = registry_role.GRACE = float(flags["impatient"] or 0.2)
    connection.HEADERS = connection.IDLE = http_server.INTERVAL = 0.1
    cache.CLOSE_TIMEOUT = 0.2
catalog_routes.MAX_PAGE = int(flags.get("page", catalog_routes.MAX_PAGE))
upstream = None
if "upstream" in flags:
    from clowder_aimage.registry import ClientOptions
    from clowder_aimage.distribution import upstream as upstream_module
    upstream_module.DOWN_PAUSE = 0.0
    from clowder_aimage.registry.host_settings import HostSettings
    mirrors = tuple(filter(None, [flags.get("mirror")]))
    connection = ClientOptions(
        docker_config=Path(flags.get("docker", "/nonexistent")),
        registries={flags["upstream"]: HostSettings(mirrors=mirrors)},
    )
    upstream = upstream_module.UpstreamRegistry.parse(flags["upstream"], connection)
roots = [Path(sys.argv[1]), *map(Path, filter(None, [flags.get("other")]))]
registry_role.serve(
    LayeredStore(roots) if len(roots) > 1 else ImageLayout(*roots),
    sys.argv[2],
    readonly="readonly" in flags,
    allow_remote="remote" in flags,
    tokens={
        token: scope
        for scope in ("read", "write", "admin")
        if (token := flags.get(f"{scope}-token" if scope != "admin" else "token"))
    },
    upstream=upstream,
    processes=int(flags.get("processes", 1)),
    on_ready=lambda url: print(url, flush=True),
)
"""


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def descriptor_of(data: bytes, media_type: str = "application/x-test") -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def manifest_of(*layers: bytes, **fields: Any) -> bytes:
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": descriptor_of(b"{}", "application/vnd.oci.empty.v1+json"),
        "layers": [descriptor_of(layer) for layer in layers],
    }
    return json.dumps(document | fields).encode()


@dataclass
class RegistryClient:
    """A client of a registry of the layout ``root``."""

    root: Path
    url: str
    http: requests.Session

    def ask(self, method: str, path: str, **options: Any) -> requests.Response:
        return self.http.request(method, self.url + path, timeout=60, **options)

    def push_blob(self, data: bytes, name: str = "a/b") -> requests.Response:
        path = f"/v2/{name}/blobs/uploads/?digest={digest_of(data)}"
        answer = self.ask("POST", path, data=data)
        assert answer.status_code == 201, answer.text
        return answer

    def put_manifest(
        self,
        raw: bytes | Iterator[bytes],
        reference: str,
        name: str = "a/b",
        media_type: str = OCI_MANIFEST,
    ) -> requests.Response:
        headers = {"Content-Type": media_type}
        return self.ask("PUT", f"/v2/{name}/manifests/{reference}", data=raw, headers=headers)

    def push(self, tag: str, *layers: bytes, name: str = "a/b") -> bytes:
        """Push a whole artifact; return its manifest."""
        for data in (*layers, b"{}"):
            self.push_blob(data, name)
        raw = manifest_of(*layers)
        answer = self.put_manifest(raw, tag, name)
        assert answer.status_code == 201, answer.text
        return raw

    def begin(self, name: str = "a/b") -> str:
        """Start an upload; return its location."""
        answer = self.ask("POST", f"/v2/{name}/blobs/uploads/")
        assert answer.status_code == 202
        return answer.headers["Location"]

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def blobs(self) -> set[str]:
        return {path.name for path in (self.root / "blobs").rglob("*") if path.is_file()}

    def ingests(self) -> list[Path]:
        return list((self.root / ".aimage" / "ingest").glob("*"))


@dataclass
class Server(RegistryClient):
    """A server in a process, and a client of it."""

    process: subprocess.Popen[str]
    # its stderr: an unread pipe would fill up
    log: IO[str] = field(default_factory=io.StringIO)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        self.process.communicate(timeout=60)
        self.log.seek(0)
        return self.process.returncode, self.log.read()


def start(root: Path, *flags: str, address: str = "127.0.0.1:0") -> Server:
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115
    process = spawn(
        [sys.executable, "-c", PROGRAM, str(root), address, *flags],
        cwd=REPOSITORY_ROOT,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "error"},
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()  # ends with the process, if that fails
    if not url:
        process.wait()
        log.seek(0)
        text = log.read()
        log.close()
        raise AssertionError(f"no server: {text}")
    return Server(root, url, requests.Session(), process, log)


def error_of(answer: requests.Response) -> tuple[int, str]:
    """Return the status and the first error code; fail if the body is not a specified error."""
    assert answer.headers["Content-Type"].startswith("application/json"), answer.text
    entry = answer.json()["errors"][0]
    assert set(entry) <= {"code", "message", "detail"}
    assert entry["message"]
    return answer.status_code, entry["code"]
