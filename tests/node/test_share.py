"""What a node answers its neighbours, over HTTP."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlencode

import pytest

from clowder_aimage.content import bytes_body
from clowder_aimage.node import peer_routes
from clowder_aimage.node.rendezvous import BlobRange
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry import ClientOptions
from tests.node.nodes import TOKEN, Node, acquaint, all_at_once, noise, push_model
from tests.proxy import Proxy

RANGE = 16 * 1024 * 1024
BLOB = noise(2 * RANGE + 1000, "shared")
CONTENT = Descriptor("application/octet-stream", Digest.of(BLOB), len(BLOB))
ASKER = "9" * 32


@pytest.fixture
def node(tmp_path):
    found = Node(tmp_path / "node").start()
    yield found
    found.stop()


@pytest.fixture
def proxy(registry):
    with Proxy(registry.host).running() as found:
        yield found


@pytest.fixture
def pushed(tmp_path, repository, proxy):
    """BLOB in a repository, by way of the proxy."""
    found = push_model(tmp_path, repository, BLOB)
    return Reference(proxy.host, found.repository, found.tag)


class Said:
    """An answer."""

    def __init__(self, response):
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def value(self):
        return json.loads(self.body)


def ask(node, path, *, method="GET", token=TOKEN, **headers):
    connection = http.client.HTTPConnection(node.address, timeout=30)
    try:
        if token:
            headers["Authorization"] = f"Bearer {token}"
        connection.request(method, path, headers=headers)
        return Said(connection.getresponse())
    finally:
        connection.close()


def query(number=0, reference=None, **more):
    """The path and query of a range of BLOB."""
    asked = {
        "registry": reference.registry if reference else "registry.example.com",
        "repository": reference.repository if reference else "a/b",
        "size": len(BLOB),
        "range": number,
    } | more
    return f"/v1/neighbour/blobs/{CONTENT.digest}?{urlencode(asked)}"


def check(said, number=0):
    """It is that range of BLOB, and says so."""
    data = BLOB[number * RANGE :][:RANGE]
    assert said.status == 200 and said.body == data
    digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
    assert said.headers["Content-Digest"] == f"sha-256=:{digest}:"
    assert said.headers["Content-Length"] == str(len(data))


def test_a_node_says_who_it_is(node):
    assert ask(node, "/v1/neighbour").value == {"id": node.sharing.node}


@pytest.mark.parametrize("path", ["/v1/neighbour", query()])
@pytest.mark.parametrize("token", [None, "another token", ""])
def test_who_does_not_know_the_token_gets_nothing(node, path, token):
    node.layout.push(CONTENT, bytes_body(BLOB))
    assert ask(node, path, token=token).status == 401


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_verified_blob_is_given_range_by_range(node, number):
    node.layout.push(CONTENT, bytes_body(BLOB))
    check(ask(node, query(number)), number)
    node.wait_until(lambda: node.bytes == {"sent": len(BLOB[number * RANGE :][:RANGE])})


def test_a_head_is_answered_without_a_body_and_without_the_registry(node, pushed, proxy):
    assert ask(node, query(0, pushed), method="HEAD").status == 404
    node.layout.push(CONTENT, bytes_body(BLOB))
    said = ask(node, query(0, pushed), method="HEAD")
    assert (said.status, said.body) == (200, b"")
    assert not proxy.seen and not node.bytes


@pytest.mark.parametrize(
    "path",
    [
        query().replace(str(CONTENT.digest), "sha256:..%2F..%2F..%2Fetc%2Fpasswd"),
        query().replace(str(CONTENT.digest), "sha256:" + "A" * 64),
        query().replace(str(CONTENT.digest), "md5:" + "a" * 32),
        query(3),
        query(-1),
        query("0x0"),
        query("1" * 30),
        query("٣"),
        query(size=0),
        query(size=-5),
        query(size=1 << 60),
        query(size=""),
        query(registry=""),
        query(registry="http://169.254.169.254"),
        query(registry="host/with/path.example.com"),
        query(registry="user:pw@registry.example.com"),
        query(repository="../../etc"),
        query(repository="A/B"),
        query(repository="a/b:tag"),
        query(repository="a/b@sha256:" + "0" * 64),
        query(held="xyz"),
        query(held="0" * 63),
    ],
)
def test_what_cannot_be_meant_is_refused(node, path):
    said = ask(node, path)
    assert said.status == 400 and said.value["code"] == "invalid"
    assert not (node.layout.root / "blobs").exists()


def test_what_is_not_here_comes_from_the_registry_once(node, pushed, proxy):
    said = all_at_once([partial(ask, node, query(1, pushed)) for _ in range(5)])
    for each in said:
        check(each, 1)
    assert proxy.sent() == RANGE
    check(ask(node, query(1, pushed)), 1)
    assert proxy.sent() == RANGE
    assert node.bytes["registry"] == RANGE


def test_a_repository_that_is_none_of_ours_is_not_asked_for(node, pushed, proxy):
    node.takes_part = False
    said = ask(node, query(0, pushed))
    assert (said.status, said.value) == (404, {"code": "no_part"})
    assert not proxy.seen


def test_who_asks_for_what_is_here_does_not_cause_a_fetch(node, pushed, proxy):
    for more in ({"here": "1"}, {"held": "0" * 64}):
        said = ask(node, query(0, pushed, **more))
        assert (said.status, said.value) == (404, {"code": "not_here"})
    assert not proxy.seen


@pytest.mark.parametrize("how", ["here", "look"])
def test_who_has_no_part_in_a_repository_says_so_whatever_is_asked(node, pushed, how):
    node.takes_part = False
    said = ask(node, query(0, pushed, **{how: "1"}))
    assert (said.status, said.value) == (404, {"code": "no_part"})


def test_who_asks_for_what_is_on_its_way_waits_for_it(node, pushed, proxy):
    proxy.hold = 1000
    with ThreadPoolExecutor(2) as pool:
        cause = pool.submit(ask, node, query(0, pushed))
        proxy.wait_until(lambda: proxy.held > 0)
        waits = pool.submit(ask, node, query(0, pushed, here="1"))
        proxy.release()
        check(cause.result(60))
        check(waits.result(60))
    assert proxy.sent() == RANGE


def test_a_home_that_has_not_what_another_has_names_that_one(tmp_path, pushed, proxy):
    one, other, third = (Node(tmp_path / name).start() for name in "abc")
    try:
        acquaint([one, other, third])
        other.layout.push(CONTENT, bytes_body(BLOB))
        said = ask(one, query(0, pushed), **{"Aimage-Asker": third.sharing.node})
        assert said.status == 404
        assert said.value == {"code": "elsewhere", "holders": [other.sharing.node]}
        check(ask(one, query(0, pushed), **{"Aimage-Asker": other.sharing.node}))  # it asks anew
    finally:
        for node in (one, other, third):
            node.stop()


def test_who_has_a_range_by_the_word_of_another_names_that_one(tmp_path, pushed, proxy):
    """Only who has it from the registry, or all of the blob, answers for it."""
    ids = ["1" * 32, "2" * 32]
    one, other = (Node(tmp_path / each[0], node=each).start() for each in ids)
    try:
        acquaint([one, other])
        first = BlobRange(CONTENT.digest, len(BLOB), 0)
        one.sharing._ranges.know(first, hashlib.sha256(BLOB[:RANGE]).digest(), giver=ids[1])
        for how in ({}, {"here": "1"}, {"look": "1"}):
            said = ask(one, query(0, pushed, **how), **{"Aimage-Asker": ASKER})
            assert (said.status, said.value["holders"]) == (404, [ids[1]])
        check(ask(one, query(0, pushed), **{"Aimage-Asker": ids[1]}))
    finally:
        for node in (one, other):
            node.stop()


def test_what_has_another_digest_than_the_home_said_is_not_given(node):
    node.layout.push(CONTENT, bytes_body(BLOB))
    assert ask(node, query(0, held="0" * 64)).status == 404
    check(ask(node, query(0, held=hashlib.sha256(BLOB[:RANGE]).hexdigest())))


def test_a_blob_that_the_registry_lacks_is_unknown(node, pushed):
    digest = Digest.of(b"nobody has it")
    path = query(0, pushed, size=13).replace(str(CONTENT.digest), str(digest))
    said = ask(node, path)
    assert (said.status, said.value) == (404, {"code": "unknown"})


def test_a_registry_that_is_gone_is_told(node):
    gone = Reference.parse("127.0.0.1:9/a/b:1")
    said = ask(node, query(0, gone))
    assert (said.status, said.value) == (502, {"code": "upstream"})


def test_a_busy_node_names_those_that_have_it(tmp_path):
    one, other, third = (Node(tmp_path / name, uploads=1).start() for name in "abc")
    try:
        acquaint([one, other, third])
        one.layout.push(CONTENT, bytes_body(BLOB))
        check(ask(one, query(), **{"Aimage-Asker": other.sharing.node}))
        check(ask(one, query(), **{"Aimage-Asker": ASKER}))  # whom nobody knows
        slow = hold(one)
        said = ask(one, query(), **{"Aimage-Asker": third.sharing.node})
        assert said.status == 503
        assert said.value["code"] == "busy"
        assert said.value["holders"] == [other.sharing.node]
        assert said.value["digest"] == f"sha256:{hashlib.sha256(BLOB[:RANGE]).hexdigest()}"
        slow.close()
    finally:
        for node in (one, other, third):
            node.stop()


def test_a_busy_node_that_is_no_home_names_those_that_have_it_from_it(tmp_path):
    one, other, third = (Node(tmp_path / name, uploads=1).start() for name in "abc")
    word = hashlib.sha256(BLOB[:RANGE]).hexdigest()
    try:
        acquaint([one, other, third])
        one.layout.push(CONTENT, bytes_body(BLOB))
        check(ask(one, query(held=word), **{"Aimage-Asker": other.sharing.node}))
        slow = hold(one)
        said = ask(one, query(held=word), **{"Aimage-Asker": third.sharing.node})
        assert (said.status, said.value["holders"]) == (503, [other.sharing.node])
        assert said.value["digest"] == f"sha256:{word}"
        slow.close()
    finally:
        for node in (one, other, third):
            node.stop()


def hold(node):
    """Take the head of an answer and nothing more of it: a turn that does not end."""
    connection = http.client.HTTPConnection(node.address, timeout=30)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    connection.request("GET", query(1), headers=headers)
    connection.response = connection.getresponse()
    return connection


def test_those_who_take_nothing_of_what_they_asked_for_lose_their_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_routes, "_STALL", 0.3)
    node = Node(tmp_path / "a", uploads=2).start()
    try:
        node.layout.push(CONTENT, bytes_body(BLOB))
        slow = [hold(node), hold(node)]
        for _ in range(100):
            if (said := ask(node, query())).status == 200:
                break
        check(said)
        for each in slow:
            each.close()
    finally:
        node.stop()


def test_work_for_those_who_hung_up_counts_until_it_ends(node, pushed):
    """The server cancels what nobody waits for; the thread that looks after it goes on."""
    inside, ended = node.sharing._share, threading.Event()
    for _ in range(peer_routes.WAITING):
        with pytest.raises(TimeoutError):
            node._do(asyncio.wait_for(inside._aside(ended.wait), 0.001))
    said = ask(node, query(0, pushed))
    assert (said.status, said.value["code"]) == (503, "busy")
    ended.set()
    while inside._threads:
        ask(node, "/v1/neighbour")
    check(ask(node, query(0, pushed)))


def test_who_comes_while_all_turns_are_taken_waits_for_one(tmp_path):
    node = Node(tmp_path / "node", uploads=1).start()
    try:
        node.layout.push(CONTENT, bytes_body(BLOB))
        slow = hold(node)
        timer = threading.Timer(0.3, lambda: slow.response.read())
        timer.start()
        check(ask(node, query()))
        timer.join()
        slow.close()
    finally:
        node.stop()


def test_who_waits_in_vain_is_told_to_come_again(tmp_path):
    node = Node(tmp_path / "node", uploads=1).start()
    try:
        node.layout.push(CONTENT, bytes_body(BLOB))
        slow = hold(node)
        said = ask(node, query())
        assert (said.status, said.value) == (503, {"code": "busy", "come": 0})
        slow.response.read()
        slow.close()
        check(ask(node, query()))
    finally:
        node.stop()


def test_a_neighbour_that_hangs_up_costs_no_turn(tmp_path):
    node = Node(tmp_path / "node", uploads=1).start()
    try:
        node.layout.push(CONTENT, bytes_body(BLOB))
        for _ in range(3):
            slow = hold(node)
            slow.sock.close()
            slow.response.close()
        check(ask(node, query()))
    finally:
        node.stop()


def test_a_damaged_blob_is_sent_as_what_it_is(node):
    node.layout.push(CONTENT, bytes_body(BLOB))
    path = node.layout.path(CONTENT)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(b"damage")
    said = ask(node, query())
    digest = base64.b64encode(hashlib.sha256(said.body).digest()).decode()
    assert said.headers["Content-Digest"] == f"sha-256=:{digest}:"


def test_what_a_running_pull_has_from_the_registry_is_given_while_it_runs(tmp_path, pushed, proxy):
    connection = ClientOptions(docker_config=tmp_path, told_jobs=1)  # one range after the other
    node = Node(tmp_path / "node", connection=connection).start()
    try:
        node.addresses.append("127.0.0.1:9")  # there may be neighbours
        proxy.hold = RANGE + 1
        with ThreadPoolExecutor(1) as pool:
            pulling = pool.submit(node.pull, pushed)
            proxy.wait_until(lambda: proxy.held > 0)
            first = ask(node, query(0, pushed, here="1"))
            found = [ask(node, query(number, pushed, look="1")) for number in range(3)]
            proxy.release()
            pulling.result(60)
        check(first, 0)
        assert [said.status for said in found] == [200, 200, 404]  # the second is on its way
        assert [said.value["code"] for said in found] == ["here", "here", "not_here"]
        assert proxy.sent() <= 1.05 * len(BLOB)
    finally:
        node.stop()
