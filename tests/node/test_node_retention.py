"""Models are kept despite unreadable desired state, full disks and other nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node.node_run import LocalNode
from tests.node.publisher import Publisher
from tests.proxy import Reply
from tests.wait import until

pytestmark = pytest.mark.integration  # each starts nodes several times

FULL = ("--high", "1", "--low", "0.5", "--min-age", "0")  # any disk is above these marks


def looked(node: LocalNode) -> None:
    """Wait until the disk was measured as too full."""
    until(lambda: node.metric('aimage_gc_runs_total{reason="high"}'), "a look at the disk")


def test_an_invalid_list_after_a_restart_evicts_no_model(
    node: LocalNode, publisher: Publisher
) -> None:
    ref = publisher.publish("a")
    node.want({"ref": ref})
    node.start("--prune")
    node.reaches(ref, "present")
    node.end()
    (node.desired / "models.json").write_text('[{"reff": 1}]')
    node.start("--prune", *FULL)
    looked(node)
    assert node.reaches(ref, "present")  # the last valid list applies
    code, said = node.readiness()
    assert code == 200 and said["warnings"] == ["desired state invalid"]
    assert node.names() == {ref}


def test_a_list_that_appears_after_start_evicts_no_model(
    node: LocalNode, publisher: Publisher
) -> None:
    ref = publisher.publish("a")
    node.want({"ref": ref})
    node.start("--prune")
    node.reaches(ref, "present")
    node.end()
    (node.desired / "models.json").unlink()
    node.start("--prune", *FULL)
    looked(node)
    node.want({"ref": ref})
    node.reaches(ref, "present")
    assert publisher.blobs() <= 2  # no blob was fetched again
    assert node.names() == {ref}


def test_a_node_that_never_read_its_list_is_not_ready(
    node: LocalNode, publisher: Publisher
) -> None:
    node.desired.rmdir()
    node.start()
    code, said = node.readiness()
    assert code == 503 and {"reason": "desired state never read"} in said["reasons"]
    assert node.metric("aimage_config_last_reload_successful") == 0
    until(lambda: node.metric("aimage_ready") == 0, "the metric")
    node.desired.mkdir()
    node.want({"ref": publisher.publish("a")})
    until(lambda: node.readiness()[0] == 200, "the list to be read, and followed")


def test_a_node_without_a_list_is_ready(tmp_path: Path, quick: None) -> None:
    node = LocalNode(tmp_path / "bare", has_list=False)
    try:
        node.start()
        assert node.metric("aimage_config_last_reload_successful") == 1
        assert node.readiness()[0] == 200
    finally:
        node.end()


def test_nodes_on_one_store_keep_each_others_models(
    node: LocalNode, publisher: Publisher, tmp_path: Path
) -> None:
    first, second = publisher.publish("a", tag="first"), publisher.publish("b", tag="second")
    other = LocalNode(tmp_path / "other", store=node.aimage.store)
    node.want({"ref": first})
    other.want({"ref": second})
    try:
        node.start("--prune", *FULL)
        other.start("--prune", *FULL)
        node.reaches(first, "present")
        other.reaches(second, "present")
        looked(node)
        looked(other)
        assert node.names() == {first, second}
        since = publisher.blobs()
        node.want({"ref": first, "priority": 2})
        until(lambda: node.model(first)["priority"] == 2, "the change to be seen")
        assert node.names() == {first, second} and publisher.blobs() == since
    finally:
        other.end()


def test_a_deleted_tag_of_a_present_model_is_reported(
    node: LocalNode, publisher: Publisher
) -> None:
    ref = publisher.publish("a")
    node.want({"ref": ref, "refresh": 1, "pullPolicy": "Always"})
    node.start()
    node.reaches(ref, "present")
    publisher.proxy.instead = lambda passed: Reply(404)
    until(lambda: node.model(ref)["code"] == "not_found", "the tag to be missed")
    model = node.model(ref)
    assert model["state"] == "present" and model["reason"] and model["next"]
    until(lambda: node.metric('aimage_desired_failed{code="not_found"}') == 1, "the metric")
    shown = node.aimage("node", "status", "--addr", node.host).out
    assert "present; " in shown and "404" in shown
    assert node.readiness()[0] == 200
    publisher.proxy.instead = None
    until(lambda: node.model(ref)["code"] is None, "it to be there again")


def test_a_missing_model_of_policy_never_has_its_own_code(
    node: LocalNode, publisher: Publisher
) -> None:
    ref = publisher.publish("a")
    node.want({"ref": ref, "pullPolicy": "Never"})
    node.start()
    assert node.reaches(ref, "failed")["code"] == "never_fetched"
    until(lambda: node.metric('aimage_desired_failed{code="never_fetched"}') == 1, "the metric")
    node.aimage("pull", "-q", ref)
    node.reaches(ref, "present")


def test_a_component_that_the_model_lacks_is_reported(
    node: LocalNode, publisher: Publisher
) -> None:
    ref = publisher.publish("a")
    node.aimage("pull", "-q", ref)
    node.want({"ref": ref, "components": ["nothing"]})
    node.start()
    failed = node.reaches(ref, "failed")
    assert failed["code"] in ("not_found", "invalid") and failed["reason"]
