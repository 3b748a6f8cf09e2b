"""Pulls and pushes with ollama's API: progress, shared pulls and cancellation."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("aiohttp")

from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from tests.conftest import TINY
from tests.proxy import Passed, Proxy, Reply
from tests.real_registry import RealRegistry
from tests.worker.conftest import LocalWorker

ollama = pytest.importorskip("ollama")

PATH = "tests/ollama-pull:v1"
WAITED = ["verifying sha256 digest", "writing manifest", "success"]


@pytest.fixture(scope="module")
def pushed(worker: LocalWorker, registry: RealRegistry) -> str:
    """Push the files of the embedded model, a few blobs, to the registry; return the digest."""
    name = f"{registry.host}/{PATH}"
    worker.aimage("create", "-q", "whole", TINY, "--whole-files")
    worker.aimage("tag", "whole", name)
    digest: str = worker.aimage("push", "-q", name).line
    worker.aimage("rm", name)
    return digest


@pytest.fixture(scope="module")
def runnable(worker: LocalWorker, registry: RealRegistry) -> str:
    """Push the embedded model to the registry and return its name."""
    name = f"{registry.host}/tests/ollama-run:v1"
    worker.aimage("tag", "tiny", name)
    worker.aimage("push", "-q", name)
    worker.aimage("rm", name)
    return name


@pytest.fixture
def client(empty: LocalWorker) -> Iterator[Any]:
    with ollama.Client(empty.url) as found:
        yield found


@pytest.fixture
def proxy(registry: RealRegistry, pushed: str) -> Iterator[Proxy]:
    with Proxy(registry.host).running() as running:
        yield running


class Asked:
    """A running pull and its response lines."""

    def __init__(self, worker: LocalWorker, name: str) -> None:
        self._connection = http.client.HTTPConnection(worker.host, timeout=60)
        self._connection.request("POST", "/api/pull", json.dumps({"model": name}))
        self._answer = self._connection.getresponse()
        self.first = json.loads(self._answer.readline())

    def rest(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._answer.read().splitlines()]

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


def names(client: Any) -> list[str]:
    return [model.model for model in client.list().models]


def post(worker: LocalWorker, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection(worker.host, timeout=60)) as connection:
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@pytest.mark.integration
def test_a_pull_reports_every_blob_and_lists_the_model(
    client: Any, registry: RealRegistry, pushed: str, empty: LocalWorker
) -> None:
    name = f"{registry.host}/{PATH}"
    lines = list(client.pull(name, stream=True))
    assert lines[0].status == "pulling manifest"
    assert [line.status for line in lines[-3:]] == WAITED
    last = {line.digest: line for line in lines if line.digest}
    for digest, line in last.items():
        assert line.status == f"pulling {digest[7:19]}" and line.completed == line.total
    assert [model.digest for model in client.list().models] == [pushed.removeprefix("sha256:")]
    layout = ImageLayout(empty.store)
    known = json.loads(layout.read(layout.resolve(Reference.parse(name))))
    wanted = {each["digest"]: each["size"] for each in [known["config"], *known["layers"]]}
    assert {digest: line.total for digest, line in last.items()} == wanted


def test_a_pull_of_a_present_model_succeeds(
    client: Any, registry: RealRegistry, pushed: str
) -> None:
    name = f"{registry.host}/{PATH}"
    assert client.pull(name).status == "success"
    assert client.pull(name) == ollama.ProgressResponse(status="success")
    assert names(client) == [name]


def test_concurrent_pulls_share_one_transfer(client: Any, proxy: Proxy, empty: LocalWorker) -> None:
    name = f"{proxy.host}/{PATH}"
    proxy.hold = 1
    with ExitStack() as stack:
        both = [stack.enter_context(closing(Asked(empty, name))) for _ in range(2)]
        assert [each.first["status"] for each in both] == ["pulling manifest"] * 2
        proxy.wait_until(lambda: proxy.held > 0)
        assert names(client) == []
        proxy.release()
        for each in both:
            *lines, last = each.rest()
            assert last == {"status": "success"}
            whole = {line["digest"]: line["total"] for line in lines if "digest" in line}
            assert {line["size"] for line in lines if "digest" in line} == {sum(whole.values())}
    blobs = [passed.path for passed in proxy.seen if passed.is_blob]
    assert len(blobs) == len(set(blobs)) > 10
    assert names(client) == [name]


def test_a_shared_pull_continues_after_one_client_leaves(
    client: Any, proxy: Proxy, empty: LocalWorker
) -> None:
    name = f"{proxy.host}/{PATH}"
    proxy.hold = 1
    with closing(Asked(empty, name)) as leaves:
        proxy.wait_until(lambda: proxy.held > 0)
        with closing(Asked(empty, name)) as stays:
            leaves.close()
            proxy.release()
            assert stays.rest()[-1] == {"status": "success"}
    assert names(client) == [name]


def test_a_shutdown_does_not_wait_for_a_pull(proxy: Proxy, empty: LocalWorker) -> None:
    proxy.hold = 1
    with closing(Asked(empty, f"{proxy.host}/{PATH}")):
        proxy.wait_until(lambda: proxy.held > 0)
        empty.end()


def test_a_model_that_the_registry_lacks_is_404_in_the_stream(
    client: Any, registry: RealRegistry, pushed: str, empty: LocalWorker
) -> None:
    name = f"{registry.host}/tests/nothing:v1"
    with pytest.raises(ollama.ResponseError, match="nothing"):
        list(client.pull(name, stream=True))
    with pytest.raises(ollama.ResponseError, match="nothing") as caught:
        client.pull(name)
    assert caught.value.status_code == 404
    with closing(Asked(empty, name)) as asked:
        (line,) = asked.rest()
        assert line["status"] == 404 and "nothing" in line["error"]


def test_an_unreachable_registry_is_502(client: Any) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.pull("127.0.0.1:1/tests/x:v1")
    assert caught.value.status_code == 502


def test_content_with_a_wrong_digest_is_502_and_not_tagged(
    client: Any, proxy: Proxy, empty: LocalWorker
) -> None:
    def spoil(passed: Passed, reply: Reply) -> None:
        if passed.is_blob and reply.body:
            reply.put(bytes(len(reply.body)))

    proxy.change = spoil
    with pytest.raises(ollama.ResponseError) as caught:
        client.pull(f"{proxy.host}/{PATH}")
    assert caught.value.status_code == 502
    assert names(client) == []


def test_pull_and_push_refuse_a_name_without_a_registry(client: Any) -> None:
    for call in (client.pull, client.push):
        with pytest.raises(ollama.ResponseError, match="registry") as caught:
            call("tiny")
        assert caught.value.status_code == 400


def test_insecure_is_refused_for_a_remote_registry(
    client: Any, empty: LocalWorker, registry: RealRegistry, pushed: str
) -> None:
    for path in ("/api/pull", "/api/push"):
        status, answer = post(
            empty, path, {"model": "registry.example.com/x", "insecure": True, "stream": False}
        )
        assert status == 403 and "disable TLS" in answer["error"]
    assert client.pull(f"{registry.host}/{PATH}", insecure=True).status == "success"


def test_an_invalid_stream_field_starts_no_pull(empty: LocalWorker, proxy: Proxy) -> None:
    status, _ = post(empty, "/api/pull", {"model": f"{proxy.host}/{PATH}", "stream": 1})
    assert status == 400 and not proxy.seen


def test_a_push_reports_its_blobs_and_can_be_pulled(
    worker: LocalWorker, client: Any, registry: RealRegistry, pushed: str
) -> None:
    assert pushed
    name = f"{registry.host}/tests/ollama-push:v1"
    with ollama.Client(worker.url) as stocked:
        stocked.copy("whole", name)
        lines = list(stocked.push(name, stream=True))
        assert lines[0].status == "retrieving manifest"
        assert [line.status for line in lines[-2:]] == ["pushing manifest", "success"]
        moved = {line.digest: line for line in lines if line.digest}
        assert len(moved) > 10
        assert all(line.completed == line.total for line in moved.values())
        assert stocked.push(name).status == "success"
        stocked.delete(name)
    assert client.pull(name).status == "success"


def test_a_push_of_a_missing_model_is_404(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="not found") as caught:
        client.push("127.0.0.1:1/tests/nothing:v1")
    assert caught.value.status_code == 404


def test_a_missing_model_is_pulled_before_generation(client: Any, runnable: str) -> None:
    parts = client.generate(runnable, "a dog", width=32, height=32, steps=2, stream=True)
    lines = [part.model_dump() for part in parts]
    assert lines[-1]["done"] and lines[-1]["image"]
    assert [(line["completed"], line["total"]) for line in lines if line["completed"]] == [
        (1, 2),
        (2, 2),
    ]
