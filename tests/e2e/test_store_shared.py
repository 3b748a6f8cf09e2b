"""One store and many processes: pulls during collections, and pulls that share a download."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.content.fetch import NOTED
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Digest, Manifest, Reference
from clowder_aimage.registry import ClientOptions, Repository
from tests.content.artifact import blob, manifest
from tests.process import Aimage
from tests.proxy import Proxy
from tests.real_registry import RealRegistry

MIB = 1024 * 1024
BIG = hashlib.shake_128(b"big").digest(48 * MIB)
SMALL = [hashlib.shake_128(b"%d" % number).digest(64 * 1024) for number in range(24)]
SIZE = len(BIG) + sum(map(len, SMALL)) + 2  # and the config
BUFFERS = 8 * MIB  # bytes that may be in flight over all connections
PULLERS, ROUNDS = 3, 2

pytestmark = pytest.mark.integration  # each test starts several processes


def put_in(registry: RealRegistry, docker: Path, path: str, *layers: bytes) -> Manifest:
    """Push an artifact of those layers to a registry."""
    config = blob(b"{}", "application/vnd.example.config")
    made = manifest(config, [blob(layer) for layer in layers])
    name = Reference.parse(f"{registry.host}/{path}")
    with Repository(name, ClientOptions(docker_config=docker)) as target:
        for content, data in zip((config, *made.layers), (b"{}", *layers), strict=True):
            if not target.exists(content):
                target.push(content, build_bytes_body(data))
        target.push(made.descriptor, build_bytes_body(made.raw), name)
    return made


@pytest.fixture(scope="module")
def artifact(registry: RealRegistry, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Return an artifact of a large blob and many small ones."""
    return put_in(registry, tmp_path_factory.mktemp("docker"), "shared/big:v1", BIG, *SMALL)


@pytest.fixture
def proxy(registry: RealRegistry) -> Iterator[Proxy]:
    with Proxy(registry.host).running() as running:
        yield running


def check(here: Any, made: Manifest) -> None:
    """Verify that the artifact is complete and nothing else is left."""
    layout = ImageLayout(here.store)
    wanted = {content.digest for content in (made.descriptor, *made.children)}
    for digest in wanted:
        raw = (layout.root / "blobs" / "sha256" / digest.encoded).read_bytes()
        assert Digest.of(raw) == digest
    assert len(list((layout.root / "blobs" / "sha256").iterdir())) == len(wanted)
    assert list((layout.root / ".aimage" / "ingest").iterdir()) == []


@pytest.fixture
def here(aimage: Callable[..., Aimage]) -> Iterator[Any]:
    """Return the command line; its processes end with the test."""
    made: Any = aimage()
    started = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(Aimage.start(made, *arguments, **options))
        return started[-1]

    made.start = start
    yield made
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def leases(here: Any) -> list[Any]:
    return list((here.store / ".aimage" / "lease").glob("*"))


def ended(process: Any, code: int = 0) -> None:
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, f"{process.returncode}: {out}\n{err}"
    assert "Traceback" not in err


def manifests(proxy: Proxy) -> int:
    return len([passed for passed in proxy.seen if "/manifests/" in passed.path])


# -- shared downloads


def test_pulls_started_later_share_the_download(
    here: Any, artifact: Manifest, proxy: Proxy
) -> None:
    proxy.hold = 8 * MIB
    name = f"{proxy.host}/shared/big:v1"
    first = here.start("pull", name, "--jobs", 1)
    proxy.wait_until(proxy.is_holding)
    others = [here.start("pull", name, "--jobs", 1) for _ in range(3)]
    proxy.wait_until(lambda: manifests(proxy) == 4)
    proxy.release()
    for process in (first, *others):
        ended(process)
    check(here, artifact)
    assert proxy.sent() == SIZE
    assert leases(here) == []
    assert len(json.loads((here.store / "index.json").read_bytes())["manifests"]) == 1


def test_pulls_started_together_share_one_download(
    here: Any, artifact: Manifest, proxy: Proxy
) -> None:
    """A connection whose second half is taken over may have some of it in flight."""
    name = f"{proxy.host}/shared/big:v1"
    for process in [here.start("pull", name) for _ in range(4)]:
        ended(process)
    check(here, artifact)
    assert SIZE <= proxy.sent() <= SIZE + NOTED


# -- pulls during collections


@pytest.fixture
def family(registry: RealRegistry, repository: str, tmp_path: Path) -> dict[Any, Any]:
    """Return artifacts with most blobs in common, and their names by content."""
    path = repository.partition("/")[2]
    common = SMALL[:16]
    return {
        f"{repository}:v{number}": put_in(
            registry, tmp_path, f"{path}:v{number}", *common, *SMALL[16 + 2 * number :][:2]
        )
        for number in range(PULLERS)
    }


def test_concurrent_collections_pulls_and_removals(here: Any, family: Any) -> None:
    """After each pull the artifact is complete, whatever was collected meanwhile."""
    failed, removed = [], []

    def pull_and_remove(name: Any) -> None:
        try:
            for _ in range(ROUNDS):
                here("-q", "pull", name)
                here("-q", "verify", name)
                here("-q", "rm", name)
            here("-q", "pull", name)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=pull_and_remove, args=(name,)) for name in family]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        removed.append(here.process("--json", "gc", "--grace", "0").value["blobs"])
    assert failed == []
    assert sum(removed) > 0  # otherwise the test proves nothing
    for name in family:
        here("verify", name)
    here("gc", "--grace", "0")
    here("verify")
    layout = ImageLayout(here.store)
    wanted = {c.digest for made in family.values() for c in (made.descriptor, *made.children)}
    assert {path.name for path in (layout.root / "blobs" / "sha256").iterdir()} == {
        digest.encoded for digest in wanted
    }
    assert leases(here) == []


def test_a_collection_after_a_killed_pull_keeps_resumable_downloads(
    here: Any, artifact: Manifest, proxy: Proxy
) -> None:
    """Finished blobs of the killed pull are collected; its partial blob is kept."""
    proxy.hold = 40 * MIB
    name = f"{proxy.host}/shared/big:v1"
    pull = here.start("pull", name, "--jobs", 2)
    proxy.wait_until(lambda: proxy.held == 2)
    assert here("--json", "gc", "--grace", "0").value["blobs"] == 0
    pull.kill()
    ended(pull, -signal.SIGKILL)
    mark = len(proxy.seen)
    proxy.release()
    value = here("--json", "gc", "--grace", "0").value
    assert value["left"] == 0
    assert leases(here) == []
    here("pull", name, "--jobs", 2)
    check(here, artifact)
    big = str(artifact.layers[0].digest)
    assert proxy.sent(big, since=mark) <= len(BIG) - NOTED + BUFFERS  # the download was resumed
