"""Several nodes pull from one registry: registry traffic, and failures of nodes."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.host_settings import HostSettings
from tests.node.nodes import MIB, TOKEN, acquaint, all_at_once, fleet, noise, push_model
from tests.proxy import Proxy
from tests.real_registry import PASSWORD, USER, RealRegistry
from tests.scripted import Answer, ScriptedRegistry, Seen
from tests.wait import PATIENCE

STAGGERED = 4

pytestmark = pytest.mark.integration


@pytest.fixture
def proxy(registry: RealRegistry) -> Iterator[Proxy]:
    with Proxy(registry.host).running() as found:
        yield found


def model(tmp_path: Path, repository: str, proxy: Proxy, *sizes: int) -> tuple[Reference, int]:
    """Push a model; return its name behind the proxy and the size of its layers."""
    layers = [noise(size, f"{tmp_path} {number}") for number, size in enumerate(sizes)]
    pushed = push_model(tmp_path, repository, *layers)
    return Reference(proxy.host, pushed.repository, pushed.tag), sum(sizes)


def test_four_nodes_fetch_a_model_from_the_registry_once(
    tmp_path: Path, repository: str, proxy: Proxy
) -> None:
    reference, size = model(tmp_path, repository, proxy, 35 * MIB + 5, 17 * MIB, 3 * MIB, 1000, 7)
    with fleet(tmp_path, 4) as nodes:
        done = all_at_once([partial(node.pull, reference) for node in nodes])
    assert len({root for root, _ in done}) == 1
    for node in nodes:
        assert (
            sorted(path.stat().st_size for path in node.layout.root.glob("blobs/*/*"))[-1]
            > size / 2
        )
    assert size <= proxy.sent() <= 1.05 * size
    came = sum(count["neighbour"] + count["cache"] for _, count in done)
    assert came >= 2.9 * size


def test_successive_pulls_fetch_a_model_from_the_registry_once(
    tmp_path: Path, repository: str, proxy: Proxy
) -> None:
    reference, size = model(tmp_path, repository, proxy, 33 * MIB, 100)
    with fleet(tmp_path, 3) as nodes:
        for node in nodes:
            node.pull(reference)
    assert size <= proxy.sent() <= 1.05 * size


def test_staggered_pulls_fetch_a_model_from_the_registry_once(
    tmp_path: Path, repository: str, proxy: Any
) -> None:
    proxy.pace = 20 * MIB
    sizes = [18 * MIB] * 3 + [2 * MIB] * 3
    layers = [noise(size, f"{tmp_path} {number}") for number, size in enumerate(sizes)]
    pushed = push_model(tmp_path, repository, *layers)
    reference = Reference(proxy.host, pushed.repository, pushed.tag)
    size = sum(sizes)
    with fleet(tmp_path, STAGGERED) as nodes:
        for node in nodes:
            node.has_repository = False  # it pulls the model later
        hears = [threading.Event() for _ in nodes]

        def play(number: Any) -> Any:
            assert hears[number].wait(PATIENCE)
            nodes[number].has_repository = True
            return nodes[number].pull(reference)

        def tell() -> None:
            for number, each in enumerate(hears):
                proxy.wait_until(lambda number=number: proxy.sent() >= size * number / STAGGERED)
                each.set()

        done = all_at_once([tell, *(partial(play, number) for number in range(STAGGERED))])
    assert len({root for root, _ in done[1:]}) == 1
    assert size <= proxy.sent() <= 1.05 * size


def test_a_later_node_fetches_nothing_from_the_registry(
    tmp_path: Path, repository: str, proxy: Proxy
) -> None:
    reference, size = model(tmp_path, repository, proxy, 33 * MIB, 100)
    with fleet(tmp_path / "old", 1) as old, fleet(tmp_path / "new", 1) as new:
        old[0].pull(reference)
        before = proxy.sent()
        acquaint([*old, *new])
        _, came = new[0].pull(reference)
        assert proxy.sent() == before
        assert came["neighbour"] >= size


def test_an_owner_that_dies_during_a_pull_does_not_affect_the_result(
    tmp_path: Path, repository: str, proxy: Proxy
) -> None:
    reference, _ = model(tmp_path, repository, proxy, 40 * MIB, 20 * MIB)
    with fleet(tmp_path, 3) as nodes:
        proxy.hold = 15 * MIB
        pulls = [partial(node.pull, reference) for node in nodes[:2]]

        def kill() -> None:
            proxy.wait_until(lambda: proxy.held > 0)
            nodes[2].hang_up()
            proxy.release()

        first, second, _ = all_at_once([*pulls, kill])
        assert first[0] == second[0]
        nodes[0].wait_until(
            lambda: any(each["state"] == "silent" for each in nodes[0].sharing.peers.list_states())
        )
    for node in nodes[:2]:
        assert not list((node.layout.root / ".aimage/ingest").glob("*"))


def test_pulls_with_a_corrupt_mirror_are_correct(
    tmp_path: Path, repository: str, proxy: Proxy
) -> None:
    """Owners forward corrupt ranges, so each node must verify them itself."""
    reference, size = model(tmp_path, repository, proxy, 34 * MIB)
    wrong = bytearray(noise(size, f"{tmp_path} 0"))
    digest = hashlib.sha256(wrong).hexdigest()
    for start in range(0, size, 16 * MIB):
        wrong[start + 5] ^= 1

    def answer(asked: Seen) -> Answer:
        if digest not in asked.path:
            return Answer(404)
        first, last = map(int, asked.headers["Range"].removeprefix("bytes=").split("-"))
        headers = {"Content-Range": f"bytes {first}-{last}/{size}"}
        return Answer(206, headers, bytes(wrong[first : last + 1]))

    with ScriptedRegistry(answer).running() as mirror:
        registries = {
            proxy.host: HostSettings(mirrors=(mirror.host,), plain_http=True),
            mirror.host: HostSettings(plain_http=True),
        }
        connection = ClientOptions(docker_config=tmp_path, registries=registries)
        with fleet(tmp_path, 3, connection=connection) as nodes:
            all_at_once([partial(node.pull, reference) for node in nodes])
            for node in nodes:
                (blob,) = [
                    path
                    for path in node.layout.root.glob("blobs/sha256/*")
                    if path.stat().st_size == size
                ]
                assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
        assert mirror.seen


def test_without_neighbours_a_pull_goes_to_the_registry(
    tmp_path: Path, repository: str, proxy: Proxy
) -> None:
    reference, size = model(tmp_path, repository, proxy, 20 * MIB)
    with fleet(tmp_path, 1) as (node,):
        node.addresses.clear()
        _, came = node.pull(reference)
    assert proxy.sent() >= size
    assert not came


def test_registry_credentials_are_not_sent_to_neighbours(
    tmp_path: Path, private_registry: RealRegistry
) -> None:
    secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    auths = {"auths": {private_registry.host: {"auth": secret}}}
    (tmp_path / "config.json").write_text(json.dumps(auths))
    connection = ClientOptions(docker_config=tmp_path)
    pushed = push_model(tmp_path, f"{private_registry.host}/secret/model", noise(36 * MIB))
    with fleet(tmp_path, 3, connection=connection) as nodes:
        all_at_once([partial(node.pull, pushed) for node in nodes])
        assert any(node.blob_requests() for node in nodes)
        for url, headers in [each for node in nodes for each in node.seen]:
            said = url + json.dumps(headers)
            assert secret not in said and PASSWORD not in said and "Basic" not in said
            assert headers["Authorization"] == f"Bearer {TOKEN}"
