"""A node with a server, and a registry: pulls, tag changes, pruning, failures and restarts."""

from __future__ import annotations

import json
import shutil
import signal
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.node import eviction
from clowder_aimage.node import node as node_module
from tests.node.node_run import LiveNode, LocalNode, NodeRun
from tests.node.nodes import MIB, noise, push_model
from tests.node.publisher import Publisher
from tests.process import Aimage
from tests.proxy import Proxy, Reply
from tests.real_registry import RealRegistry
from tests.wait import until


def manifests(proxy: Proxy, since: int = 0) -> list[Any]:
    """Return method, status and conditionality of the requests for manifests."""
    return [
        (each.method, each.status, "If-None-Match" in each.headers)
        for each in proxy.seen[since:]
        if "/manifests/" in each.path
    ]


def asked(node: Any, method: str, path: str, body: Any = None) -> tuple[Any, Any]:
    """Send a request to the node and return the status and the JSON of the response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(node.url + path, data=data, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        raw = answer.read()
        return answer.status, json.loads(raw) if raw else None


def test_a_desired_model_is_pulled_pinned_and_makes_the_node_ready(
    node: LocalNode, publisher: Publisher, proxy: Proxy
) -> None:
    ref = publisher.publish("a", "b")
    proxy.hold = 1000
    node.want({"ref": ref, "pin": True, "priority": 3})
    node.start()
    until(lambda: proxy.held, "the pull to begin")
    status, body = node.readiness()
    assert status == 503 and body["reasons"] == [{"reason": "model missing", "model": ref}]
    until(lambda: node.metric("aimage_desired_missing") == 1, "the model to be missing")
    pulling = node.reaches(ref, "pulling")
    assert pulling["total"] > 0 and pulling["completed"] < pulling["total"]
    proxy.release()
    present = node.reaches(ref, "present")
    assert present["sources"]["registry"] == pulling["total"]
    assert (present["pin"], present["priority"], present["origin"]) == (True, 3, "models.json")
    assert node.readiness() == (200, {"status": "ok", "reasons": [], "warnings": []})
    # A node reports a model, then records and pins it
    until(lambda: node.aimage("pin", "--json").value == {"pinned": [ref]}, "the model to be pinned")
    until(lambda: not node.metric("aimage_desired_missing"), "nothing to be missing")
    assert node.metric('aimage_pull_bytes_total{source="registry"}') == pulling["total"]
    node.aimage("verify")


@pytest.mark.integration
def test_an_idle_node_only_checks_each_tag_once_per_interval(
    live_node: LiveNode, tmp_path: Path, registry: RealRegistry, repository: str
) -> None:
    with Proxy(registry.host).running() as proxy:
        check_idle(live_node, Publisher(tmp_path, repository, proxy), proxy)


def check_idle(node: NodeRun, publisher: Publisher, proxy: Proxy) -> None:
    first, second, third = (publisher.publish(tag, tag=tag) for tag in ("v1", "v2", "v3"))
    every = {"refresh": 1, "pullPolicy": "Always"}
    node.want({"ref": first, **every}, {"ref": second, **every}, {"ref": third, "refresh": 0})
    node.start()
    for ref in (first, second):
        node.reaches(ref, "present")
    until(lambda: node.readiness()[0] == 200, "all to be there")
    since, blobs = len(proxy.seen), proxy.sent()
    proxy.wait_until(lambda: len(manifests(proxy, since)) >= 6)  # three rounds of two tags
    seen = proxy.seen[since:]
    until(lambda: all(each.status for each in seen), "their answers")
    assert {(each.method, each.status) for each in seen} == {("GET", 304)}, seen
    assert all("If-None-Match" in each.headers for each in seen)
    assert proxy.sent() == blobs
    paths = [each.path.rpartition("/")[2] for each in seen]
    assert abs(paths.count("v1") - paths.count("v2")) <= 1 and "v3" not in paths


def test_a_moved_tag_is_pulled_or_reported_as_drift_per_policy(
    node: LocalNode, publisher: Publisher, proxy: Proxy
) -> None:
    followed, kept, pinned = (publisher.publish("a", tag=it) for it in ("follow", "keep", "pinned"))
    follow = {"ref": followed, "refresh": 1, "pullPolicy": "Always"}
    keep = {"ref": kept, "refresh": 1, "pullPolicy": "IfNotPresent"}
    node.want(follow, keep)
    node.start()
    before = node.reaches(followed, "present")["digest"]
    node.reaches(kept, "present")
    digest = publisher.pushed(publisher.publish("b", tag="other"))
    node.want(follow, keep, {"ref": pinned, "digest": digest, "refresh": 1})
    old = node.model(kept)["digest"]
    for tag in ("follow", "keep", "pinned"):
        publisher.publish("moved", tag=tag)
    new = publisher.pushed(followed)
    until(lambda: node.model(followed)["digest"] == new != before, "the tag to be followed")
    drifted = until(lambda: node.model(kept)["drift"], "the drift to be seen")
    assert drifted == publisher.pushed(kept)
    assert node.model(kept)["digest"] == old != drifted
    until(lambda: node.metric("aimage_desired_drifted") == 1, "the drift to be counted")
    by_digest = node.reaches(f"{pinned}@{digest}", "present")
    assert (by_digest["digest"], by_digest["drift"]) == (digest, None)
    assert not [each for each in proxy.seen if each.path.endswith("/manifests/pinned")]


def test_invalid_empty_and_missing_lists_remove_nothing_and_are_reported(
    node: LocalNode, publisher: Publisher
) -> None:
    ref = publisher.publish("a")
    node.want({"ref": ref})
    node.start()
    node.reaches(ref, "present")

    (node.desired / "models.json").write_text('[{"ref": ')
    until(lambda: node.readiness()[1]["warnings"] == ["desired state invalid"], "the warning")
    assert node.metric("aimage_config_last_reload_successful") == 0
    # The last valid state applies; the metric is set at the end of a round.
    until(lambda: node.metric("aimage_desired_images") == 1, "the metric")
    desired = node.status()["desired"]
    assert not desired["valid"] and "models.json" in desired["error"]

    node.want()
    until(lambda: node.readiness()[1]["warnings"] == ["no desired models"], "the other warning")
    assert node.metric("aimage_config_last_reload_successful") == 1
    until(lambda: node.metric("aimage_desired_images") == 0, "the metric")

    shutil.rmtree(node.desired)
    until(lambda: node.readiness()[1]["warnings"] == ["desired state invalid"], "the warning")
    assert node.readiness()[0] == 200
    assert node.names() == {ref}
    node.aimage("verify")


def test_prune_removes_former_names_but_for_pins_and_other_pulls(
    node: LocalNode, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "SETTLE", 0.1)
    monkeypatch.setattr(node_module, "SETTLE_EMPTY", 0.2)
    monkeypatch.setattr(eviction, "OFTEN", 0.0)
    wanted, unwanted, pinned, other = (publisher.publish(tag, tag=tag) for tag in "abcd")
    node.aimage("pull", "-q", other)
    node.want({"ref": wanted}, {"ref": unwanted}, {"ref": pinned})
    node.start("--prune")
    for ref in (wanted, unwanted, pinned):
        node.reaches(ref, "present")
    node.aimage("pin", pinned)
    node.want({"ref": wanted})
    until(lambda: unwanted not in node.names(), "the unwanted to go")
    assert node.names() == {wanted, pinned, other}
    node.want()
    until(lambda: wanted not in node.names(), "the last wanted to go")
    assert node.names() == {pinned, other}
    (node.desired / "models.json").write_text("no list")
    until(lambda: node.readiness()[1]["warnings"] == ["desired state invalid"], "the warning")
    assert node.names() == {pinned, other}
    node.aimage("verify")


def test_present_models_stay_ready_without_the_registry(
    node: LocalNode, publisher: Publisher, proxy: Proxy
) -> None:
    ref = publisher.publish("a")
    node.want({"ref": ref, "refresh": 1, "pullPolicy": "Always"})
    node.start()
    node.reaches(ref, "present")
    # Not 503, that of an overloaded registry, which requests wait for
    proxy.instead = lambda passed: Reply(502)
    until(lambda: node.model(ref)["reason"], "the registry's failure to be reported")
    assert node.model(ref)["state"] == "present"
    assert node.readiness()[0] == 200
    node.end()
    node.start()  # also after a restart
    node.reaches(ref, "present")
    assert node.readiness()[0] == 200
    until(lambda: node.model(ref)["reason"], "the registry's failure to be reported")
    proxy.instead = None
    assert publisher.publish("after") == ref
    until(lambda: node.model(ref)["reason"] is None, "the registry to be asked again")


def test_an_unauthorized_pull_is_retried_when_the_credentials_change(
    node: LocalNode, publisher: Publisher, proxy: Proxy
) -> None:
    ref = publisher.publish("a")
    challenge = {"WWW-Authenticate": 'Basic realm="x"'}
    proxy.instead = lambda it: None if "Authorization" in it.headers else Reply(401, challenge)
    node.want({"ref": ref})
    node.start()
    failed = node.reaches(ref, "failed")
    assert failed["code"] == "unauthorized"
    line = 'aimage_desired_failed{code="unauthorized"}'
    until(lambda: node.metric(line) == 1, "the failure to be counted")
    since = len(proxy.seen)
    asked(node, "POST", "/v1/node/retry", {"ref": ref})
    until(lambda: len(proxy.seen) > since, "the retry that was asked for")
    node.reaches(ref, "failed")
    since = len(proxy.seen)
    config = node.aimage.home / "docker" / "config.json"
    config.parent.mkdir(exist_ok=True)
    assert len(proxy.seen) == since
    config.write_text(json.dumps({"auths": {proxy.host: {"auth": "dTpw"}}}))
    node.reaches(ref, "present")
    until(lambda: not node.metric(line), "the failure to be forgotten")


def test_a_node_with_the_desired_components_is_ready(
    node: LocalNode, author: Aimage, local_repository: str, proxy: Proxy
) -> None:
    ref = push_tiny(author, local_repository, proxy)
    node.want({"ref": ref, "components": ["vae"], "pin": True})
    node.start()
    part = node.reaches(ref, "present")
    assert node.readiness()[0] == 200
    node.want({"ref": ref})
    until(lambda: node.model(ref)["sources"]["cache"], "the rest to come")
    whole = node.reaches(ref, "present")
    assert whole["sources"]["registry"] > part["sources"]["registry"]
    node.aimage("verify")


def push_tiny(author: Aimage, repository: str, proxy: Proxy) -> str:
    """Push the embedded model, and return its name behind the proxy."""
    name = f"{repository}:v1"
    author("tag", "tiny", name)
    author("push", "-q", name)
    author("rm", name)
    return f"{proxy.host}/{repository.partition('/')[2]}:v1"


@pytest.mark.integration
def test_a_killed_pull_is_resumed(
    live_node: LiveNode, proxy: Proxy, tmp_path: Path, local_repository: str
) -> None:
    whole = 60 * MIB
    pushed = push_model(tmp_path, local_repository, noise(whole, "killed"))
    ref = str(replace(pushed, registry=proxy.host))
    proxy.hold = 50 * MIB
    live_node.want({"ref": ref})
    live_node.start()
    until(lambda: proxy.held, "half of it to be there")
    live_node.worker.stop(signal.SIGKILL)
    live_node.end()
    proxy.release()
    live_node.start()
    done = live_node.reaches(ref, "present")
    assert 0 < done["sources"]["registry"] < 0.7 * whole
    live_node.aimage("verify")


@pytest.mark.integration
def test_two_nodes_on_one_store_fetch_each_blob_once(
    live_node: LiveNode, publisher: Publisher, proxy: Proxy, tmp_path: Path
) -> None:
    ref = publisher.publish(*(f"layer {number}" for number in range(20)))
    live_node.want({"ref": ref})
    other = LiveNode(tmp_path / "other", store=live_node.aimage.store)
    other.want({"ref": ref})
    try:
        live_node.start()
        other.start()
        live_node.reaches(ref, "present")
        other.reaches(ref, "present")
    finally:
        other.end()
    blobs = sum(path.stat().st_size for path in live_node.aimage.store.glob("blobs/sha256/*"))
    assert proxy.sent() <= blobs
    live_node.aimage("verify")


def test_a_node_serves_its_models_as_a_read_only_registry(
    node: LocalNode, publisher: Publisher
) -> None:
    ref = publisher.publish("a")
    node.want({"ref": ref})
    node.start()
    digest = node.reaches(ref, "present")["digest"]
    host, _, rest = ref.partition("/")
    name = rest.rpartition(":")[0]
    manifest = node.get(f"/v2/{name}/manifests/{digest}?ns={host}")
    layer = manifest["layers"][0]
    blob = f"{node.url}/v2/{name}/blobs/{layer['digest']}?ns={host}"
    with urllib.request.urlopen(blob, timeout=60) as answer:
        assert len(answer.read()) == layer["size"]
    for method, path, status in (("PUT", "manifests/x", 405), ("POST", "blobs/uploads/", 404)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            asked(node, method, f"/v2/{name}/{path}", {})
        caught.value.close()
        assert caught.value.code == status


def test_node_status_prints_the_state_of_models(node: LocalNode, publisher: Publisher) -> None:
    ref = publisher.publish("a")
    node.want({"ref": ref})
    node.start()
    node.reaches(ref, "present")
    done = node.aimage("node", "status", "--addr", node.host)
    assert ref in done.out and "present" in done.out
    assert node.aimage("node", "status", "--json", "--addr", node.host).value["ready"]
