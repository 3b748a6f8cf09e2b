"""Nodes that share blobs: each decides by its own policy, whatever its neighbours have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.node.node_run import LiveNode
from tests.trust.key_files import write_key
from tests.trust.place import Place
from tests.wait import until

pytestmark = pytest.mark.integration
_RECEIVED = 'aimage_neighbour_bytes_total{direction="received"}'


def build(home: Path, place: Place, key: Path, *arguments: object) -> LiveNode:
    """Return a node whose user demands signatures by a key."""
    node = LiveNode(home, *arguments)
    config = home / "config" / "aimage" / "config.json"
    config.parent.mkdir(parents=True)
    rules = [{"pattern": f"{place.repository}*", "keys": [str(key)]}]
    config.write_text(json.dumps({"trust": {"rules": rules}}))
    node.want({"ref": place.name})
    return node


def test_a_node_keeps_what_is_signed_for_it_only(place: Place, tmp_path: Path) -> None:
    _, other = write_key(tmp_path, "other")
    early = build(tmp_path / "early", place, place.public).start()
    assert "is refused" in json.dumps(early.reaches(place.name, "failed"))
    early.end()
    place.sign()
    first = build(tmp_path / "first", place, place.public).start()
    first.reaches(place.name, "present")
    second = build(tmp_path / "second", place, place.public, "--neighbour", first.host).start()
    second.reaches(place.name, "present")
    until(lambda: second.metric(_RECEIVED) > 0, "blobs of the neighbour")
    # Its neighbours have all of it.
    third = build(tmp_path / "third", place, other, "--neighbour", first.host).start()
    assert "is refused" in json.dumps(third.reaches(place.name, "failed"))
    assert third.metric(_RECEIVED) == 0
    assert not list((third.aimage.store / "blobs").rglob("*/*"))
    for node in (first, second, third):
        node.end()
