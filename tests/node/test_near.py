"""A source with neighbours around it gives the bytes that the source has, and blames the right
one where it does not."""

from __future__ import annotations

import hashlib
import random

import pytest

from clowder_aimage.content import MemoryStore, bytes_body
from clowder_aimage.errors import NetworkError, NotFoundError
from clowder_aimage.node.evidence import Evidence
from clowder_aimage.node.peer_state import Peer
from clowder_aimage.node.rendezvous import RANGE, BlobRange
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry.peer_response import PeerAddress
from tests.content.artifact import blob
from tests.node.nodes import Node, fleet, noise

BLOB = noise(2 * RANGE + 12345, "near")
CONTENT = blob(BLOB)
REFERENCE = Reference.parse("registry.example.com/a/b:1")
HONEST, LIAR = (Peer(PeerAddress(host, 80)) for host in ("honest", "liar"))


@pytest.fixture
def store():
    found = MemoryStore()
    found.push(CONTENT, bytes_body(BLOB))
    return found


@pytest.fixture
def node(tmp_path):
    """A node whose only neighbour is never there."""
    found = Node(tmp_path / "node").start()
    found.addresses.append("127.0.0.1:9")
    yield found
    found.stop()


def test_any_span_read_in_any_pieces_is_right(node, store):
    source = node.sharing.near(REFERENCE)(store)
    draw = random.Random(7)
    spans = [(0, None), (RANGE, RANGE), (RANGE - 1, 2), (len(BLOB) - 1, 1), (len(BLOB), 5), (5, 0)]
    spans += [(draw.randrange(len(BLOB)), draw.randrange(len(BLOB))) for _ in range(4)]
    for offset, length in spans:
        data = bytearray()
        with source.open(CONTENT, offset, length) as reader:
            while chunk := reader.read(draw.randrange(1, 9 << 20)):
                data += chunk
        end = len(BLOB) if length is None else offset + length
        assert data == BLOB[offset:end]


def test_of_a_range_that_is_read_in_two_halves_the_registry_sends_one(node, store):
    opened = []

    class Counted:
        def open(self, content, offset=0, length=None):
            opened.append((offset, length))
            return store.open(content, offset, length)

    source = node.sharing.near(REFERENCE)(Counted())
    half = RANGE // 2
    with source.open(CONTENT, 0, half) as reader:
        assert reader.read(RANGE) == BLOB[:half]
    with source.open(CONTENT, half, half) as reader:
        assert reader.read(RANGE) == BLOB[half:RANGE]
    assert opened == [(0, RANGE)]


def test_what_the_registry_says_is_what_is_heard(node):
    source = node.sharing.near(REFERENCE)(MemoryStore())
    with pytest.raises(NotFoundError), source.open(CONTENT) as reader:
        reader.read(1)
    with pytest.raises(NotFoundError):
        source.resolve(REFERENCE)
    assert not source.exists(CONTENT)


def test_readers_that_are_given_up_leave_room_for_others(node, store):
    source = node.sharing.near(REFERENCE)(store)
    for _ in range(40):
        with source.open(CONTENT) as reader:
            reader.read(10)


def test_a_node_that_ends_lets_go_of_who_waits_for_a_busy_home(tmp_path, store):
    from aiohttp import web

    with fleet(tmp_path, 2) as (one, other):

        async def busy(request):
            if "/blobs/" not in request.path:
                return None
            one._loop.call_soon_threadsafe(one.sharing._ranges.close)
            return web.json_response({"code": "busy"}, status=503)

        other.before = busy
        source = one.sharing.near(REFERENCE)(store)
        with pytest.raises(NetworkError, match="about to end"), source.open(CONTENT) as reader:
            while reader.read(1 << 20):
                pass


# -- who is to blame


def parts():
    return [BlobRange.at(CONTENT, at) for at in range(0, len(BLOB), RANGE)]


def sha(part, data=BLOB):
    return hashlib.sha256(data[part.start : part.end]).digest()


@pytest.fixture
def banned():
    return []


@pytest.fixture
def evidence(banned):
    return Evidence(lambda one, reason: banned.append((one, reason)))


def given(evidence):
    """The first range by a liar, the second by an honest one."""
    first, second, _ = parts()
    evidence.note(first, LIAR, bytes(32))
    evidence.note(second, HONEST, sha(second))


def test_who_gave_something_else_than_what_is_verified_is_banned(evidence, banned):
    given(evidence)
    assert evidence.doubt(CONTENT.digest) and evidence.is_doubted(CONTENT.digest)
    for part in parts():
        evidence.compare(part, sha(part))
    evidence.settle(lambda _: False)
    assert not banned
    evidence.settle(lambda content: content.digest == CONTENT.digest)
    assert banned == [(LIAR, "wrong bytes")]
    evidence.settle(lambda _: True)
    assert len(banned) == 1


def test_nobody_is_banned_where_the_registry_was_wrong_as_well(evidence, banned):
    given(evidence)
    assert evidence.doubt(CONTENT.digest)
    for part in parts():
        evidence.compare(part, bytes(32))
    assert not evidence.doubt(CONTENT.digest), "there is nobody else to ask"
    evidence.settle(lambda _: True)
    assert not banned


def test_what_came_from_the_registry_alone_is_no_reason_to_ask_again(evidence):
    assert not evidence.doubt(CONTENT.digest)
    small = BlobRange(Digest.of(b"x"), 1, 0)
    evidence.note(small, LIAR, sha(small, b"x"))  # it was verified by then
    assert not evidence.doubt(small.digest)


def test_evidence_does_not_grow_without_end(evidence):
    for number in range(200):
        content = Descriptor("", Digest.of(bytes([number])), RANGE + 1)
        evidence.note(BlobRange.at(content, 0), LIAR, bytes(32))
        evidence.doubt(content.digest)
    assert len(evidence._given) == len(evidence._doubted) == 64
