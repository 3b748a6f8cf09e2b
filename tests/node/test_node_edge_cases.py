"""Edge cases of live nodes: one-sided neighbours, unresolvable names, spellings, prefetch."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.node.node_run import LiveNode, LocalNode
from tests.node.nodes import noise
from tests.node.publisher import Publisher
from tests.node.test_node_live import asked
from tests.wait import until

SOON = {"RES_OPTIONS": "timeout:1 attempts:1"}  # fail fast without a name server
ADMIN, NODES, INFER = "admin-" + "a" * 32, "nodes-" + "b" * 32, "infer-" + "c" * 32
OTHER = "sha256:" + "ab" * 32


def bearer(token: str) -> dict[Any, Any]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def got(node: LocalNode, path: str, token: str = "") -> tuple[Any, Any]:
    """Return the status and body of a response, errors included."""
    request = urllib.request.Request(node.url + path, headers=bearer(token))
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def status_of(call: Callable[[], Any]) -> Any:
    """Return the status of a response, errors included."""
    try:
        return call()[0]
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.fixture
def other(tmp_path: Path) -> Iterator[LocalNode]:
    """Return a second node that is not started yet."""
    found = LocalNode(tmp_path / "other")
    yield found
    found.end()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Return a file with the tokens of a fleet."""
    path = tmp_path / "tokens"
    path.write_text(f"admin {ADMIN}\nnode {NODES}\ninfer {INFER}\n")
    return path


# -- neighbours


@pytest.mark.parametrize("has_tokens", [True], ids=["tokens"])
def test_a_node_without_neighbours_serves_a_node_that_names_it(
    node: LocalNode, other: LocalNode, publisher: Publisher, tokens: Path, has_tokens: bool
) -> None:
    said, token = (("--token-file", tokens), ADMIN) if has_tokens else ((), "")
    ref = publisher.publish("a", "b")

    def seen(one: LocalNode) -> Any:
        return json.loads(got(one, "/v1/node", token)[1])

    def here(one: LocalNode) -> Any:
        return next((it for it in seen(one)["models"] if it["state"] == "present"), None)

    node.want({"ref": ref})
    node.start(*said)
    until(lambda: here(node), "the first to have it")
    publisher.refuse(lambda passed: "/blobs/" in passed.path, 501)
    other.start(*said, "--neighbour", node.host)
    until(lambda: [it["state"] for it in seen(other)["neighbours"]] == ["live"], "the neighbour")
    other.want({"ref": ref})
    found = until(lambda: here(other), "the other to have it")
    assert found["sources"]["neighbour"] and not found["sources"]["registry"]
    assert seen(node)["neighbours"] == []
    sent = b'aimage_neighbour_bytes_total{direction="sent"} '

    def counted() -> bool:
        counts = got(node, "/metrics", token)[1].splitlines()
        return any(float(each[len(sent) :]) for each in counts if each.startswith(sent))

    until(counted, "what was sent to be counted")
    other.aimage("verify")


def test_a_node_without_neighbours_serves_ranges_to_node_tokens_only(
    node: LocalNode, publisher: Publisher, tokens: Path
) -> None:
    ref = publisher.publish("a")
    node.want({"ref": ref})
    node.start("--token-file", tokens)

    def is_here() -> Any:
        return json.loads(got(node, "/v1/node", INFER)[1])["models"][0]["state"] == "present"

    until(is_here, "the model")
    registry, _, rest = ref.partition("/")
    blob = f"/v2/{rest.rpartition(':')[0]}/blobs/{publisher.digest('a')}?ns={registry}"
    for path in ("/v2/", blob):
        assert [got(node, path, token)[0] for token in ("", INFER)] == [401, 403]
    assert got(node, blob, NODES) == (200, noise(publisher.size, "a"))


@pytest.mark.integration
def test_an_unresolvable_neighbour_is_silent_and_does_not_affect_pulls(
    live_node: LiveNode, publisher: Publisher
) -> None:
    ref = publisher.publish("a")
    names = ("no-such.invalid:80", "dns:no-such.invalid:80", "a..b:80", "dns:a..b:80")
    live_node.want({"ref": ref})
    live_node.start(*(word for name in names for word in ("--neighbour", name)), **SOON)
    live_node.reaches(ref, "present")

    def are_silent() -> dict[str, Any] | None:
        found = {each["url"]: each for each in live_node.status()["neighbours"]}
        reasons = {each["reason"] for each in found.values()}
        return None if "not contacted yet" in reasons or len(found) < len(names) else found

    found = until(are_silent, f"all names to be looked up: {live_node.status()['neighbours']}")
    assert {each["state"] for each in found.values()} == {"silent"}
    assert found["dns:no-such.invalid:80"]["reason"] == "cannot resolve the name"
    shown = live_node.aimage("node", "status", "--addr", live_node.host).out
    assert "4 silent" in shown
    for url in ("http://no-such.invalid:80", "dns:no-such.invalid:80"):
        (row,) = [each for each in shown.splitlines() if f" {url} is silent: " in each]
        assert row.partition(" is silent: ")[2].strip()
    assert live_node.readiness()[0] == 200
    more = publisher.publish("b", tag="v2")
    live_node.want({"ref": ref}, {"ref": more})
    live_node.reaches(more, "present")
    assert not any("cannot ping the neighbours" in each for each in live_node.worker.lines)


# -- spellings


def test_retry_accepts_every_spelling_of_a_name(node: LocalNode, publisher: Publisher) -> None:
    ref = publisher.name("latest")
    base = ref.removesuffix(":latest")
    node.want({"ref": base, "refresh": 0})  # it is only retried on request
    node.start()
    assert node.reaches(ref, "failed")["code"] == "not_found"

    def retry(name: str) -> Any:
        return status_of(lambda: asked(node, "POST", "/v1/node/retry", {"ref": name}))

    for name in (base, ref, f"oci://{base}", f"oci://{ref}", f"{ref}@{OTHER}"):
        since = len(publisher.proxy.seen)
        assert retry(name) == 202, name
        until(partial(publisher.manifests, "latest", since), f"{name} to be tried again")
        until(lambda: node.model(ref)["code"] == "not_found", "it to fail again")
    for name in (f"{base}:v1", f"{base}@{OTHER}", f"{base}x", "no//name"):
        assert retry(name) == 404, name
    publisher.publish("a", tag="latest")
    assert retry(base) == 202
    node.reaches(ref, "present")


# -- prefetch


def test_models_of_negative_priority_are_pulled_last(node: LocalNode, publisher: Publisher) -> None:
    idle = publisher.publish("idle", tag="a-idle")
    refs = [publisher.publish(f"layer {number}", tag=f"v{number}") for number in range(3)]
    publisher.proxy.hold = 1
    wants = [{"ref": ref} for ref in refs]
    node.want(*wants[:2])
    node.start()
    until(lambda: node.metric("aimage_pull_inflight") == 2, "two to begin")
    node.want({"ref": idle, "priority": -1}, *wants[:2])
    queued = 'aimage_pull_queue_depth{class="%s"}'
    until(lambda: node.metric(queued % "prefetch") == 1, "the prefetch to wait")
    node.want({"ref": idle, "priority": -1}, *wants)
    until(lambda: publisher.manifests("v2"), "the third to begin, which came after it")
    assert node.metric(queued % "prefetch") == 1 and not publisher.manifests("a-idle")
    publisher.proxy.release()
    for ref in (*refs, idle):
        node.reaches(ref, "present")
