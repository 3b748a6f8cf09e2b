"""Four nodes converge despite simultaneous faults of the registry, a node and a disk."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from clowder_aimage.content import copy
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions, Repository
from tests.content.artifact import put_artifact
from tests.node.node_run import LiveNode
from tests.node.nodes import MIB, noise
from tests.node.publisher import events
from tests.node.small_disk import Disk, small_disk
from tests.process import spawn
from tests.program import find_program
from tests.proxy import Proxy
from tests.real_registry import PASSWORD, USER, free_port, wait_for
from tests.wait import until

pytestmark = pytest.mark.integration

NODES, LAYERS = 4, 3
LAYER = 16 * MIB
PACE = 3_000_000  # bytes per second of a connection to the registry
SECRET = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
HTPASSWD = f"{USER}:$2b$04$a7mYyL7B.7KnFTvR6z49i.8x/zQh7U6x/hFjv2IM28WT6Bc0Ag1Be\n"


class Wire:
    """A slow connection to the registry that can be cut. ``sent`` counts bytes to the nodes."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._address = ("127.0.0.1", free_port())
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_cut = True
        self.sent = 0
        self.host = f"{self._address[0]}:{self._address[1]}"

    def join(self) -> None:
        """Start listening."""
        listener = socket.create_server(self._address, backlog=64)
        self._sockets, self._is_cut = [listener], False
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """Close all connections and stop listening."""
        with self._lock:
            self._is_cut = True
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _accept(self, listener: socket.socket) -> None:
        host, port = self._upstream.split(":")
        with contextlib.suppress(OSError):
            while True:
                here = listener.accept()[0]
                there = socket.create_connection((host, int(port)))
                with self._lock:
                    self._sockets += [here, there]
                for pair, pace in (((here, there), 0), ((there, here), PACE)):
                    threading.Thread(target=self._carry, args=(*pair, pace), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, pace: int) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(32 * 1024):
                target.sendall(block)
                if pace:
                    with self._lock:
                        self.sent += len(block)
                    time.sleep(len(block) / pace)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


class Mortal:
    """A registry with a password that can be killed and restarted."""

    def __init__(self, home: Path) -> None:
        find_program("docker-registry")
        self.direct = f"127.0.0.1:{free_port()}"
        self.wire = Wire(self.direct)
        self.host = self.wire.host
        (home / "htpasswd").write_text(HTPASSWD)
        auth = {"htpasswd": {"realm": "test", "path": str(home / "htpasswd")}}
        storage = {"filesystem": {"rootdirectory": str(home / "data")}}
        config = {"version": 0.1, "storage": storage, "http": {"addr": self.direct}, "auth": auth}
        self._config = home / "config.yml"
        self._config.write_text(json.dumps(config))  # JSON is YAML
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = spawn(
            ["docker-registry", "serve", str(self._config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(f"http://{self.direct}/v2/", self._process)
        self.wire.join()

    def kill(self) -> None:
        self.wire.cut()
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Mortal]:
    home = tmp_path / "registry"
    home.mkdir()
    found = Mortal(home)
    found.start()
    yield found
    found.kill()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", (LAYERS + 3) * LAYER) as found:
        yield found


def log_in(home: Path, host: str) -> None:
    """Write credentials for a registry."""
    (home / "docker").mkdir(parents=True)
    (home / "docker" / "config.json").write_text(json.dumps({"auths": {host: {"auth": SECRET}}}))


def publish(home: Path, host: str) -> str:
    """Push a model of several ranges and return its name."""
    reference = Reference.parse(f"{host}/fleet/model:v1")
    store = ImageLayout(home / "published")
    put_artifact(store, str(reference), *(noise(LAYER, f"layer {n}") for n in range(LAYERS)))
    with Repository(reference, ClientOptions(docker_config=home / "docker")) as target:
        copy(store, reference, target)
    return str(reference)


class Fleet:
    """Nodes that are connected through proxies, which record their requests."""

    def __init__(self, home: Path, mortal: Mortal, disk: Disk, stack: contextlib.ExitStack) -> None:
        ports = [free_port() for _ in range(NODES)]
        self.between = [Proxy(f"127.0.0.1:{port}") for port in ports]
        for each in self.between:
            stack.enter_context(each.running())
        known = [text for each in self.between for text in ("--neighbour", each.host)]
        self.nodes = []
        for number, port in enumerate(ports):
            place = home / f"node-{number}"
            log_in(place, mortal.host)
            store = disk.root / "store" if number == NODES - 1 else None
            said = ("--addr", f"127.0.0.1:{port}", "--high", "100", "--low", "100", *known)
            self.nodes.append(LiveNode(place, *said, store=store))
            stack.callback(self.nodes[-1].end)

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            until(partial(sees, node, "live", NODES - 1), "the nodes to meet")

    def asked(self) -> list[dict[str, str]]:
        """Return the headers of all requests between nodes."""
        return [each.headers for proxy in self.between for each in list(proxy.seen)]


@pytest.mark.parametrize("attempts", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_fleet_converges_despite_kills_and_a_full_disk(
    tmp_path: Path, mortal: Mortal, disk: Disk, attempts: int
) -> None:
    author = tmp_path / "author"
    log_in(author, mortal.direct)
    ref = publish(author, mortal.direct).replace(mortal.direct, mortal.host)
    with contextlib.ExitStack() as stack:
        fleet = Fleet(tmp_path, mortal, disk, stack)
        first, killed, other, full = fleet.nodes
        fleet.start()
        for node in fleet.nodes:
            node.want({"ref": ref})
        until(lambda: mortal.wire.sent > LAYERS * LAYER // 3, "the pull to be in the middle")
        disk.fill()
        mortal.kill()
        killed.worker.stop(signal.SIGKILL)
        killed.end()
        assert first.model(ref)["state"] != "present"
        for node in (first, other):
            until(partial(has_failed, node, ref, attempts), "the failure to be reported")
            until(partial(sees, node, "silent", 1), "the killed node to be silent")
            assert node.readiness()[1]["reasons"] == [{"reason": "model missing", "model": ref}]
        killed.start()
        mortal.start()
        until(lambda: full.model(ref)["code"] == "no_space", "the full disk to be told")
        until(lambda: full.metric('aimage_desired_failed{code="no_space"}') == 1, "... and counted")
        for node in (first, killed, other):
            node.reaches(ref, "present")
        assert full.model(ref)["state"] == "failed"  # the only one that failed
        disk.drop()
        full.reaches(ref, "present")
        check_converged(fleet, ref)
        check_told(fleet, ref, mortal.host)
        assert mortal.wire.sent < NODES * LAYERS * LAYER  # despite lost transfers
        check_nothing_leaks(fleet)


def neighbours(node: LiveNode, state: str) -> int:
    """Count neighbours in a state; the metric lags by seconds."""
    return sum(each["state"] == state for each in node.status()["neighbours"])


def has_failed(node: LiveNode, ref: str, attempts: int) -> bool:
    host = ref.partition("/")[0]
    return node.metric(f'aimage_pulls_total{{outcome="failed",registry="{host}"}}') >= attempts


def sees(node: LiveNode, state: str, count: int) -> bool:
    return neighbours(node, state) == count


def is_complete(node: LiveNode) -> bool:
    return node.readiness()[0] == 200 and not node.metric("aimage_desired_missing")


def check_converged(fleet: Fleet, ref: str) -> None:
    """Check that all nodes have the same intact model, without leftovers."""
    digests = {node.model(ref)["digest"] for node in fleet.nodes}
    assert len(digests) == 1 and None not in digests
    for node in fleet.nodes:
        node.aimage("verify")
        until(partial(is_complete, node), "the node to be ready, and no model to be missing")
        assert node.metric("aimage_digest_mismatch_total") == 0
        assert node.metric('aimage_store_bytes{kind="partial"}') < LAYERS * LAYER
        assert not [line for line in node.worker.lines if "Traceback" in line]


def check_told(fleet: Fleet, ref: str, host: str) -> None:
    """Check the events and metrics of the faults."""
    first, _, other, full = fleet.nodes
    for node in (first, other):
        told = events(node.url)
        pulls = [each["outcome"] for each in told if each["kind"] == "pull"]
        assert "failed" in pulls and pulls[-1] == "done"
        reasons = [each["reason"] for each in told if each.get("outcome") == "failed"]
        assert any(host in reason for reason in reasons), reasons
        url = f"http://{fleet.between[1].host}"
        states = [each["state"] for each in told if each.get("url") == url]
        assert states[-3:] == ["live", "silent", "live"], states
        assert [each["kind"] for each in told if each.get("model") == ref][-1] == "present"
        assert not node.metric('aimage_desired_failed{code="no_space"}')
    kinds = [each["kind"] for each in events(full.url) if each.get("model") == ref]
    assert "failed" in kinds and kinds[-1] == "present"
    done = f'aimage_pulls_total{{outcome="done",registry="{host}"}}'
    assert [node.metric(done) for node in fleet.nodes] == [1.0] * NODES
    received = 'aimage_neighbour_bytes_total{direction="received"}'
    assert sum(node.metric(received) for node in fleet.nodes) >= LAYER  # the exact number varies


def check_nothing_leaks(fleet: Fleet) -> None:
    """Check that requests between nodes contain no registry credentials."""
    headers = fleet.asked()
    assert len(headers) > NODES * LAYERS
    for each in headers:
        assert "authorization" not in {name.lower() for name in each}
        assert SECRET not in str(each) and PASSWORD not in str(each)
