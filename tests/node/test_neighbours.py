"""Neighbours: their addresses, who lives, who is banned and for how long."""

from __future__ import annotations

import contextlib

import pytest

from clowder_aimage.errors import UsageError
from clowder_aimage.node import address as addresses
from clowder_aimage.node.address import Address
from clowder_aimage.node.peer_state import Peers
from clowder_aimage.registry.peer_response import (
    BYTES,
    CREDENTIALS,
    LATE,
    LiarError,
    PeerAddress,
    SilentError,
)
from tests.node.nodes import Node, fleet

ME, OTHER, THIRD = "0" * 32, "1" * 32, "2" * 32


class Told:
    """A client that is told what each place says: an id, or an error to raise."""

    def __init__(self, **says):
        self.says = says
        self.asked, self.forgotten = [], []

    def forget(self, place):
        self.forgotten.append(place)

    def life(self, place, target):
        assert target == "/v1/neighbour"
        self.asked.append(str(place))
        said = self.says[place.host]
        if isinstance(said, Exception):
            raise said
        return said


class World:
    """Neighbours whose clock stands still until it is moved, looked at in the test's own thread."""

    def __init__(self, *known, **says):
        self.now = 1000.0
        self.news = []
        self.client = Told(**says)
        self.known = Peers(
            lambda: [f"{host}:80" for host in known],
            self.client,
            ME,
            on_state=lambda *news: self.news.append(news),
            clock=lambda: self.now,
        )

    def look(self, later=0.0):
        """A turn of the thread, so many seconds later."""
        self.now += later
        self.known._look_up()
        for one in self.known._due():
            self.known._ask(one)

    @property
    def states(self):
        return {each["url"].split("/")[2]: each["state"] for each in self.known.states()}

    def one(self, node):
        return self.known.usable("any")[node]


SILENT = SilentError("nobody there")


# -- addresses


@pytest.mark.parametrize(
    ("text", "place", "is_name"),
    [
        ("node-1:8050", "http://node-1:8050", False),
        ("http://10.0.0.7:80/", "http://10.0.0.7:80", False),
        ("https://node.example.com:443", "https://node.example.com:443", False),
        ("[fd00::1]:8050", "http://[fd00::1]:8050", False),
        ("dns:nodes.svc:8050", "http://nodes.svc:8050", True),
    ],
)
def test_an_address_is_read(text, place, is_name):
    found = Address.parse(text)
    assert (str(found.place), found.is_name) == (place, is_name)


@pytest.mark.parametrize(
    "text",
    [
        "", "node", "node:", "node:0", "node:99999", ":80", "http://user:pw@node:80", "ftp://node:80",
        "http://node:80/path", "dns:node", "node\n:80", "dns:http://node:80", "nöde:80",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_a_word_on_what_is_one(text):
    with pytest.raises(UsageError) as caught:
        Address.parse(text)
    assert "HOST:PORT" in (caught.value.hint or "")


def test_a_name_stands_for_all_its_addresses_but_link_local_ones(monkeypatch):
    hosts = [
        "10.0.0.1",
        "169.254.169.254",
        "::ffff:169.254.169.254",
        "fe80::1",
        "fd00::2",
        "224.0.0.1",
        "::",
        "10.0.0.1",
    ]

    def look_up(name, port, **_):
        assert name == "nodes"
        return [(0, 0, 0, "", (host, port)) for host in hosts]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)
    found = Address.parse("dns:nodes:8050").places()
    assert found == [PeerAddress("10.0.0.1", 8050), PeerAddress("fd00::2", 8050)]


# -- who lives


def test_who_answers_lives_and_we_are_not_our_own_neighbour():
    world = World("me", "other", "third", me=ME, other=OTHER, third=SILENT)
    world.look()
    assert world.states == {"other:80": "live", "third:80": "silent"}
    assert world.known.live() == {OTHER}
    assert ("http://other:80", "live", None) in world.news


def test_a_neighbour_that_ends_and_comes_back_is_noticed():
    world = World("other", other=OTHER)
    world.look()
    world.client.says["other"] = SILENT
    world.look(10)
    assert world.known.live() == set()
    world.client.says["other"] = THIRD  # it is another process now
    world.look(10)
    assert world.known.live() == {THIRD}
    assert [news[1] for news in world.news] == ["live", "silent", "live"]


def test_an_address_that_is_no_longer_configured_is_forgotten():
    world = World("other", other=OTHER)
    world.look()
    world.known._addresses = list
    world.look()
    assert world.known.live() == set() and world.known.states() == []
    assert world.client.forgotten == [PeerAddress("other", 80)]  # nor does a connection stay


def test_a_name_that_cannot_be_looked_up_keeps_its_last_addresses(monkeypatch):
    world = World(**{"10.0.0.1": OTHER})
    world.known._addresses = lambda: ["dns:nodes:80"]
    found = [[(0, 0, 0, "", ("10.0.0.1", 80))], OSError("no answer")]

    def look_up(*_, **__):
        if isinstance(found[0], Exception):
            raise found[0]
        return found.pop(0)

    monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)
    world.look()
    world.look(100)
    assert world.known.live() == {OTHER}


def test_one_that_fails_is_asked_for_a_word_at_once_and_left_alone_for_longer_each_time():
    world = World("other", other=OTHER)
    world.look()
    one = world.one(OTHER)
    asked, pauses = len(world.client.asked), []
    for _ in range(12):
        world.known.failed(one, "broke off")
        world.look()
        asked += 1
        assert len(world.client.asked) == asked
        began = world.now
        while not world.known.may_ask(one):
            world.now += 1.0
        pauses.append(world.now - began)
    assert pauses[:4] == [2, 4, 8, 16] and max(pauses) == 600
    world.known.worked(one)
    world.known.failed(one, "broke off")
    world.now += 2.5
    assert world.known.may_ask(one)


def test_one_that_wastes_much_time_three_times_is_banned():
    world = World("other", other=OTHER)
    world.look()
    one = world.one(OTHER)
    for _ in range(3):
        assert world.states["other:80"] == "live"
        world.known.failed(one, "late", cost=6)
        world.look(700)
    assert world.states["other:80"] == "banned"
    assert world.news[-1] == ("http://other:80", "banned", LATE)
    world.client.says["other"] = THIRD  # it was started anew
    world.look(10)
    assert world.known.live() == {THIRD} and world.known.usable("any")


def test_one_mishap_of_many_connections_counts_once():
    world = World("other", other=OTHER)
    world.look()
    one = world.one(OTHER)
    for _ in range(8):
        world.known.failed(one, "late", cost=6)
    assert world.states["other:80"] == "live" and not world.known.may_ask(one)
    world.now += 65
    assert world.known.may_ask(one)


def test_one_that_was_started_anew_is_not_left_alone_for_what_was_before():
    world = World("other", other=OTHER)
    world.look()
    world.known.failed(world.one(OTHER), "broke off", cost=6)
    world.client.says["other"] = THIRD
    world.look(1)
    assert set(world.known.usable("any")) == {THIRD}


def test_wrong_bytes_cost_minutes_at_first_and_an_hour_when_they_come_again():
    world = World("other", other=OTHER)
    world.look()
    for seconds in (300, 3600, 3600):
        world.known.ban(world.one(OTHER), BYTES)
        world.look(seconds - 10)
        assert world.states == {"other:80": "banned"}
        world.look(20)
        assert world.states == {"other:80": "live"}


def test_a_ban_lasts_an_hour_and_is_told_once():
    world = World("other", other=OTHER)
    world.look()
    world.known.ban(world.one(OTHER), "wrong size")
    asked = len(world.client.asked)
    world.look(3590)
    assert world.states == {"other:80": "banned"} and not world.known.usable("any")
    assert len(world.client.asked) == asked  # not even for a word
    world.look(20)
    assert world.states == {"other:80": "live"}
    assert [news[1] for news in world.news] == ["live", "banned", "live"]


def test_one_with_another_token_is_back_when_it_is_started_anew():
    liar = LiarError(PeerAddress("other", 80), CREDENTIALS, "wants credentials")
    world = World("other", other=liar)
    world.look()
    world.look(10)
    assert [news[1:] for news in world.news] == [("banned", CREDENTIALS)]
    world.client.says["other"] = OTHER
    world.look(10)
    assert world.known.live() == {OTHER}


def test_a_repository_that_one_has_no_part_in_is_not_asked_of_it_for_a_while():
    world = World("other", other=OTHER)
    world.look()
    world.known.refuses(world.one(OTHER), "registry/a")
    assert not world.known.usable("registry/a") and world.known.usable("registry/b")
    world.now += 31
    assert world.known.usable("registry/a")


def test_one_that_asks_for_something_has_a_part_in_that_repository_again():
    world = World("other", "third", other=OTHER, third=THIRD)
    world.look()
    for node in (OTHER, THIRD):
        for repository in ("registry/a", "registry/b"):
            world.known.refuses(world.known.usable(repository)[node], repository)
    world.known.takes_part(OTHER, "registry/a")
    assert set(world.known.usable("registry/a")) == {OTHER}
    assert not world.known.usable("registry/b")


def test_the_more_neighbours_the_less_often_each_is_asked():
    hosts = [f"h{number}" for number in range(200)]
    world = World(*hosts, **{host: f"{n:032x}" for n, host in enumerate(hosts, 5)})
    for _ in range(60):
        world.look(1.0)
    assert len(world.client.asked) < 200 + 60 * 13


def test_live_nodes_find_each_other_and_see_one_die_and_come_back(tmp_path):
    with fleet(tmp_path, 3) as nodes:
        port = int(nodes[2].address.rpartition(":")[2])
        nodes[2].hang_up()
        gone = f"http://{nodes[2].address}"
        nodes[0].wait_until(
            lambda: (
                {"silent"}
                == {each["state"] for each in nodes[0].sharing.states() if each["url"] == gone}
            )
        )
        nodes[2].listen(port)
        nodes[0].knows(nodes[1].address, nodes[2].address)


def test_a_name_leads_to_a_live_node(tmp_path):
    one, other = Node(tmp_path / "one").start(), Node(tmp_path / "other").start()
    try:
        one.addresses.append(f"dns:localhost:{other.address.rpartition(':')[2]}")
        one.knows(other.address)
    finally:
        one.stop()
        other.stop()


def test_nodes_with_other_tokens_do_not_talk(tmp_path):
    with (
        contextlib.closing(Ending(Node(tmp_path / "one"))) as one,
        contextlib.closing(Ending(Node(tmp_path / "other", token="another token"))) as other,
    ):
        one.node.addresses.append(other.node.address)
        one.node.wait_until(lambda: one.node.bans)
        assert one.node.bans == [(f"http://{other.node.address}", "credentials")]


class Ending:
    """A started node that ``close`` ends."""

    def __init__(self, node):
        self.node = node.start()

    def close(self):
        self.node.stop()
