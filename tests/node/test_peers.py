"""Peers: addresses, liveness, and the owners of ranges."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.node import peers
from clowder_aimage.node.peers import LATE, Peers, SharingLimits, parse_peer, resolve_urls
from clowder_aimage.node.range_source import RANGE, BlobRange, rank_nodes
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.oci.descriptor import MAX_SIZE
from clowder_aimage.registry.peer import PeerError
from tests.node.nodes import Node, fleet
from tests.wait import until

ME, OTHER, THIRD = "0" * 32, "1" * 32, "2" * 32
SILENT = PeerError("no answer")
DIGEST = Digest.of(b"a blob")
IDS = [f"{number:032x}" for number in range(16)]


class Clients:
    """A client whose pings return or raise the values of ``answers``."""

    def __init__(self, **answers: Any) -> None:
        self.asked: list[Any]
        self.answers, self.asked = answers, []

    def ping(self, url: Any) -> Any:
        self.asked.append(url)
        answer = self.answers[urlsplit(url).hostname]
        if isinstance(answer, Exception):
            raise answer
        return answer


class World:
    """Peers with a fake clock, pinged in the thread of the test."""

    def __init__(self, *hosts: str, **answers: Any) -> None:
        self.news: list[Any]
        self.now, self.news = 1000.0, []
        self.client = Clients(**answers)
        self.peers = Peers(
            lambda: [f"{host}:80" for host in hosts],
            cast(Any, self.client),
            ME,
            lambda *news: self.news.append(news),
            limits=SharingLimits(),
            clock=lambda: self.now,
        )

    def ping(self, later: float = 0.0) -> None:
        self.now += later
        self.peers._look_up()
        for one in self.peers._take_due():
            self.peers._ping(one)

    @property
    def states(self) -> dict[Any, Any]:
        return {each["url"].split("/")[2]: each["state"] for each in self.peers.list_states()}

    @property
    def usable(self) -> set[Any]:
        return set(self.peers.select_usable())


# -- addresses


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node-1:8050", "http://node-1:8050"),
        ("http://10.0.0.7:80/", "http://10.0.0.7:80"),
        ("https://node.example.com:443", "https://node.example.com:443"),
        ("[fd00::1]:8050", "http://[fd00::1]:8050"),
        ("dns:nodes.svc:8050", "dns://nodes.svc:8050"),
    ],
)
def test_an_address_is_parsed(text: str, address: str) -> None:
    assert str(parse_peer(text)) == address


@pytest.mark.parametrize(
    "text",
    ["node", "node:0", ":80", "http://user:pw@node:80", "node:65536"],
)
def test_an_invalid_address_is_refused_with_the_valid_forms(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_peer(text)
    assert "HOST:PORT" in (caught.value.hint or "")


def test_a_dns_name_is_resolved_to_its_routable_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["10.0.0.1", "169.254.169.254", "::ffff:169.254.169.254", "fe80::1", "fd00::2", "::"]
    monkeypatch.setattr(peers, "resolve_addresses", lambda *_: [*hosts, "224.0.0.1"])
    found = resolve_urls(parse_peer("dns:nodes:8050"))
    assert found == ["http://10.0.0.1:8050", "http://[fd00::2]:8050"]


# -- liveness


def test_a_responding_node_is_live_and_this_node_is_excluded() -> None:
    world = World("me", "other", "third", me=ME, other=OTHER, third=SILENT)
    world.ping()
    assert world.states == {"other:80": "live", "third:80": "silent"}
    assert world.usable == {OTHER}
    assert ("http://other:80", "live", None) in world.news


def test_a_restarted_node_is_live_with_its_new_id() -> None:
    world = World("other", other=OTHER)
    world.ping()
    world.client.answers["other"] = SILENT
    world.ping(10)
    assert not world.usable
    world.client.answers["other"] = THIRD  # another process
    world.ping(10)
    assert world.usable == {THIRD}
    assert [news[1] for news in world.news] == ["live", "silent", "live"]


def test_an_address_removed_from_the_configuration_is_forgotten() -> None:
    world = World("other", other=OTHER)
    world.ping()
    world.peers._addresses = list
    world.ping()
    assert not world.usable and not world.states


def test_a_dns_name_keeps_its_last_addresses_if_the_lookup_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(**{"10.0.0.1": OTHER})
    world.peers._addresses = lambda: ["dns:nodes:80"]
    found = [["10.0.0.1"]]

    def look_up(*_: Any) -> list[str]:
        if not found:
            raise OSError("no answer")
        return found.pop()

    monkeypatch.setattr(peers, "resolve_addresses", look_up)
    world.ping()
    world.ping(100)
    assert world.usable == {OTHER}


def test_a_failing_node_is_excluded_with_exponential_backoff() -> None:
    world = World("other", other=OTHER)
    world.ping()
    one, pauses = world.peers.select_usable()[OTHER], []
    for _ in range(12):
        world.peers.record_failure(one, "broke off")
        world.peers.record_failure(one, "broke off")  # the same failure on another connection
        assert world.states == {"other:80": "live"} and not world.usable
        began = world.now
        while one not in world.peers.select_usable().values():
            world.now += 1.0
        pauses.append(world.now - began)
    assert pauses[:4] == [2, 4, 8, 16] and max(pauses) == 600
    world.peers.record_success(one)
    world.peers.record_failure(one, "broke off")
    world.now += 2.5
    assert world.usable


def test_a_late_response_excludes_a_node_for_a_minute_or_until_restart() -> None:
    world = World("other", other=OTHER)
    world.ping()
    world.peers.record_failure(world.peers.select_usable()[OTHER], "late", cost=LATE)
    world.now += 60
    assert not world.usable
    world.client.answers["other"] = THIRD
    world.ping(1)
    assert world.usable == {THIRD}


def test_the_ping_interval_grows_with_the_number_of_nodes() -> None:
    hosts = [f"h{number}" for number in range(200)]
    world = World(*hosts, **{host: f"{n:032x}" for n, host in enumerate(hosts, 5)})
    for _ in range(60):
        world.ping(1.0)
    assert len(world.client.asked) < 200 + 60 * 13


def test_live_nodes_notice_that_a_peer_stops_and_returns(tmp_path: Path) -> None:
    with fleet(tmp_path, 3) as nodes:
        port = int(nodes[2].address.rpartition(":")[2])
        nodes[2].hang_up()
        gone = f"http://{nodes[2].address}"

        def is_silent() -> bool:
            return {"url": gone, "state": "silent"} in [
                {"url": each["url"], "state": each["state"]}
                for each in nodes[0].sharing.peers.list_states()
            ]

        nodes[0].wait_until(is_silent)
        nodes[2].listen(port)
        nodes[0].knows(nodes[1].address, nodes[2].address)


def test_a_peer_is_found_by_its_dns_name(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        one, other = (Node(tmp_path / name).start() for name in ("one", "other"))
        stack.callback(one.stop)
        stack.callback(other.stop)
        one.addresses.append(f"dns:localhost:{other.address.rpartition(':')[2]}")
        one.knows(other.address)


def test_a_node_with_another_token_is_refused(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        one = Node(tmp_path / "one").start()
        other = Node(tmp_path / "other", token="another token").start()
        stack.callback(one.stop)
        stack.callback(other.stop)
        one.addresses.append(other.address)

        def is_refused() -> bool:
            return any(
                "rejected the token" in each["reason"] for each in one.sharing.peers.list_states()
            )

        until(is_refused)
        assert not other.statuses[200]


# -- ranges and their owners


@settings(max_examples=30)
@given(st.integers(1, MAX_SIZE), st.data())
def test_ranges_cover_a_blob_without_gap_or_overlap(size: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, (size - 1) // RANGE))
    part = BlobRange(DIGEST, size, number)
    assert 0 < part.length <= RANGE
    assert part.start == number * RANGE
    if part.end < size:
        assert BlobRange(DIGEST, size, number + 1).start == part.end
    for at in (part.start, part.end - 1):
        assert BlobRange.at(Descriptor("", DIGEST, size), at) == part


@pytest.mark.parametrize(("size", "number"), [(0, 0), (5, -1), (RANGE, 1)])
def test_an_impossible_range_is_refused(size: int, number: int) -> None:
    with pytest.raises(FormatError):
        BlobRange(DIGEST, size, number)


def test_all_nodes_agree_on_the_owner() -> None:
    assert rank_nodes(IDS, DIGEST, 3) == rank_nodes(reversed(IDS), DIGEST, 3)
    assert sorted(rank_nodes(IDS, DIGEST, 3)) == IDS


def test_ranges_are_spread_over_the_nodes() -> None:
    owners = Counter(rank_nodes(IDS, DIGEST, number)[0] for number in range(4096))
    assert len(owners) == len(IDS)
    assert max(owners.values()) < 1.4 * 4096 / len(IDS)
    firsts = {rank_nodes(IDS, Digest.of(bytes([number])), 0)[0] for number in range(64)}
    assert len(firsts) > 8


def test_removing_a_node_moves_only_the_ranges_that_it_owns() -> None:
    left = [node for node in IDS if node != IDS[5]]
    for number in range(200):
        before = [node for node in rank_nodes(IDS, DIGEST, number) if node != IDS[5]]
        assert rank_nodes(left, DIGEST, number) == before
