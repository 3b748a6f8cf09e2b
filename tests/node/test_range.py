"""The ranges that a node has: where they lie, what it answers for, and what it fetches once."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from clowder_aimage.content import bytes_body
from clowder_aimage.errors import AImageError, NetworkError, NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.peer_upstream import PeerUpstream
from clowder_aimage.node.range_file import RangeFile
from clowder_aimage.node.range_store import Ranges
from clowder_aimage.node.rendezvous import RANGE, BlobRange
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry import ClientOptions
from tests.node.nodes import all_at_once, noise, push_model
from tests.process import spawn
from tests.proxy import Proxy

BLOB = noise(2 * RANGE + 1000, "ranges")
CONTENT = Descriptor("application/octet-stream", Digest.of(BLOB), len(BLOB))
REFERENCE = Reference.parse("registry.example.com/a/b:1")
PARTS = [BlobRange.at(CONTENT, at) for at in range(0, len(BLOB), RANGE)]
ME, OTHER = "0" * 32, "1" * 32


def bytes_of(part):
    return BLOB[part.start : part.end]


def sha(part):
    return hashlib.sha256(bytes_of(part)).digest()


class Registry:
    """Ranges of BLOB, counted; ``gate`` must be open for a byte to come."""

    def __init__(self):
        self.opened = []
        self.distrusted = []
        self.fails = None
        self.gate = threading.Event()
        self.gate.set()

    @contextmanager
    def open(self, _, part):
        self.opened.append(part)
        assert self.gate.wait(20)
        if self.fails:
            raise self.fails
        yield io.BytesIO(bytes_of(part))

    def distrust(self, _, part):
        self.distrusted.append(part)


@pytest.fixture
def layout(tmp_path):
    return ImageLayout(tmp_path / "store")


@pytest.fixture
def kept(layout):
    found = RangeFile(layout, ME, spared=0)
    found.start()
    yield found
    found.close()


@pytest.fixture
def registry_of_blob():
    return Registry()


@pytest.fixture
def ranges(layout, kept, registry_of_blob):
    return Ranges(layout, kept, registry_of_blob)


def read(piece):
    """The bytes of a piece, which are what it says."""
    try:
        if piece.file is None:
            data = bytes(piece.data)
        else:
            data = os.pread(piece.file.fileno(), piece.length, piece.offset)
    finally:
        piece.close()
    assert hashlib.sha256(data).digest() == piece.digest
    return data


def ingest(layout, *parts):
    """Begin to take BLOB in, with these ranges of it."""
    found = layout.ingest(CONTENT.digest.encoded, CONTENT)
    for part in parts:
        found.write_at(part.start, bytes_of(part))
    return found


# -- where it is


def test_a_range_of_a_blob_in_the_store_is_given(layout, ranges):
    layout.push(CONTENT, bytes_body(BLOB))
    for part in PARTS:
        assert read(ranges.find(part)) == bytes_of(part)
        assert ranges.word(part) == sha(part)


def test_a_blob_of_another_size_is_not_it(layout, ranges):
    layout.push(CONTENT, bytes_body(BLOB))
    assert ranges.find(BlobRange(CONTENT.digest, len(BLOB) + 1, 0)) is None


def test_what_is_not_here_is_not_found(ranges):
    assert ranges.find(PARTS[0]) is None


def test_what_came_from_the_registry_is_given_while_the_pull_goes_on(layout, ranges):
    taking = ingest(layout, PARTS[1])
    try:
        ranges.know(PARTS[1], sha(PARTS[1]))
        assert read(ranges.find(PARTS[1])) == bytes_of(PARTS[1])
        assert ranges.find(PARTS[0]) is None
    finally:
        taking.abort()


def test_what_a_neighbour_said_is_given_only_to_those_who_heard_the_same(layout, ranges):
    taking = ingest(layout, PARTS[0])
    try:
        ranges.know(PARTS[0], sha(PARTS[0]), giver="0" * 32)
        assert ranges.find(PARTS[0]) is None
        assert ranges.word(PARTS[0]) is None
        assert ranges.find(PARTS[0], bytes(32)) is None
        assert read(ranges.find(PARTS[0], sha(PARTS[0]))) == bytes_of(PARTS[0])
    finally:
        taking.abort()


def test_what_is_known_but_not_written_yet_is_not_given(layout, ranges):
    taking = ingest(layout, PARTS[2])  # the file is long enough, with a hole in it
    try:
        ranges.know(PARTS[0], sha(PARTS[0]))
        assert ranges.find(PARTS[0]) is None
    finally:
        taking.abort()


def test_nothing_is_known_any_more_of_a_blob_that_was_wrong(layout, kept, ranges):
    taking = ingest(layout, PARTS[1])
    try:
        ranges.know(PARTS[1], sha(PARTS[1]))
        kept.add(PARTS[0], bytes_of(PARTS[0]), sha(PARTS[0]))
        ranges.forget(CONTENT.digest)
        assert ranges.find(PARTS[0]) is None and ranges.find(PARTS[1]) is None
        assert kept.size == 0
    finally:
        taking.abort()


def test_a_link_in_the_place_of_a_file_is_not_followed(layout, ranges, tmp_path):
    (tmp_path / "secret").write_bytes(BLOB)
    directory = layout.root / ".aimage/ingest"
    directory.mkdir(parents=True)
    (directory / CONTENT.digest.encoded).symlink_to(tmp_path / "secret")
    ranges.know(PARTS[0], sha(PARTS[0]))
    assert ranges.find(PARTS[0]) is None


# -- from the registry


def test_many_who_want_a_range_have_it_fetched_once(ranges, registry_of_blob):
    registry_of_blob.gate.clear()
    timer = threading.Timer(0.2, registry_of_blob.gate.set)
    timer.start()
    calls = [lambda: ranges.fetch(REFERENCE, PARTS[0], 20)] * 8
    calls += [lambda: ranges.load(PARTS[0], lambda part: registry_of_blob.open(None, part))] * 2
    found = all_at_once(calls)
    timer.join()
    assert registry_of_blob.opened == [PARTS[0]]
    assert all(read(piece) == bytes_of(PARTS[0]) for piece in found[:8])
    assert all(loaded.data == bytes_of(PARTS[0]) for loaded in found[8:])


def test_what_was_fetched_for_others_is_kept_for_the_next_one(ranges, registry_of_blob):
    read(ranges.fetch(REFERENCE, PARTS[0], 20))
    assert read(ranges.fetch(REFERENCE, PARTS[0], 20)) == bytes_of(PARTS[0])
    loaded = ranges.load(PARTS[0], lambda part: registry_of_blob.open(None, part))
    assert loaded.data == bytes_of(PARTS[0])
    assert registry_of_blob.opened == [PARTS[0]]


def test_who_waits_too_long_hears_how_far_it_is_and_may_come_again(ranges, registry_of_blob):
    registry_of_blob.gate.clear()
    assert ranges.fetch(REFERENCE, PARTS[0], 0.01) == 0
    registry_of_blob.gate.set()
    assert read(ranges.fetch(REFERENCE, PARTS[0], 20)) == bytes_of(PARTS[0])
    assert registry_of_blob.opened == [PARTS[0]]


def test_only_so_many_are_fetched_at_a_time(ranges, registry_of_blob):
    registry_of_blob.gate.clear()
    parts = [BlobRange(Digest.of(bytes([number])), 4, 0) for number in range(6)]
    assert [ranges.fetch(REFERENCE, part, 0.01) for part in parts] == [0] * 6
    assert len(registry_of_blob.opened) == 4
    registry_of_blob.gate.set()


def test_what_cannot_be_fetched_is_tried_anew_by_the_next_one(ranges, registry_of_blob):
    registry_of_blob.fails = NetworkError("down")
    with pytest.raises(AImageError, match="down"):
        ranges.fetch(REFERENCE, PARTS[0], 20)
    registry_of_blob.fails = None
    assert read(ranges.fetch(REFERENCE, PARTS[0], 20)) == bytes_of(PARTS[0])


def test_a_registry_that_sends_too_little_is_found_out(ranges, registry_of_blob):
    longer = BlobRange(CONTENT.digest, len(BLOB) + 5, 2)
    with pytest.raises(AImageError, match="ends after"):
        ranges.fetch(REFERENCE, longer, 20)
    assert ranges.find(longer) is None


def test_a_small_blob_that_is_wrong_is_neither_kept_nor_given(ranges, registry_of_blob, kept):
    part = BlobRange(Digest.of(b"right"), 5, 0)  # the registry has the first bytes of BLOB for it
    with pytest.raises(AImageError, match="hashes to"):
        ranges.fetch(REFERENCE, part, 20)
    assert kept.size == 0 and ranges.find(part) is None


def test_a_wrong_size_costs_the_registry_one_question(tmp_path, registry, repository):
    pushed = push_model(tmp_path, repository, BLOB)
    with Proxy(registry.host).running() as proxy:
        upstream = PeerUpstream(ClientOptions(docker_config=tmp_path), lambda *_: None)
        reference = Reference(proxy.host, pushed.repository, pushed.tag)
        layout = ImageLayout(tmp_path / "store")
        ranges = Ranges(layout, RangeFile(layout, ME), upstream)
        for size in (len(BLOB) + 1, 1 << 50):
            with pytest.raises(AImageError):
                ranges.fetch(reference, BlobRange(CONTENT.digest, size, 1), 20)
        assert {passed.method for passed in proxy.seen} == {"HEAD"}
        assert read(ranges.fetch(reference, PARTS[1], 20)) == bytes_of(PARTS[1])
        upstream.close()


def test_a_registry_that_ignores_ranges_is_not_asked_for_more_of_them(
    tmp_path, registry, repository
):
    pushed = push_model(tmp_path, repository, BLOB)
    with Proxy(registry.host, ranges="ignored").running() as proxy:
        upstream = PeerUpstream(ClientOptions(docker_config=tmp_path), lambda *_: None)
        reference = Reference(proxy.host, pushed.repository, pushed.tag)
        assert upstream.gives_ranges(proxy.host)
        with upstream.open(reference, PARTS[1]) as reader:
            assert reader.read(1000) == bytes_of(PARTS[1])[:1000]
        assert not upstream.gives_ranges(proxy.host)
        upstream.close()


def test_what_the_registry_does_not_have_is_not_found(tmp_path, registry, repository):
    push_model(tmp_path, repository, b"another")
    upstream = PeerUpstream(ClientOptions(docker_config=tmp_path), lambda *_: None)
    reference = Reference.parse(f"{repository}:1")
    with pytest.raises(NotFoundError), upstream.open(reference, PARTS[0]):
        pass
    upstream.close()


# -- what is kept on disk


def lies_there(kept, part):
    """What is kept of a range."""
    found = kept.open(part)
    if found is None:
        return None
    with found[0] as file:
        return file.read()


def fill(kept, count):
    parts = [BlobRange(Digest.of(bytes([number])), RANGE, 0) for number in range(count)]
    for part in parts:
        kept.add(part, bytes(1000), b"")
    return parts


def test_the_oldest_ranges_go_where_there_is_no_room(layout):
    kept = RangeFile(layout, ME, limit=3 * RANGE, spared=0)
    kept.start()
    parts = fill(kept, 5)
    assert [lies_there(kept, part) is not None for part in parts] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert kept.size == 3 * RANGE
    assert len(list(layout.root.glob(".aimage/range/*/*"))) == 3
    kept.close()
    assert not list(layout.root.glob(".aimage/range/*"))


def test_nothing_is_kept_where_the_disk_is_nearly_full(layout):
    kept = RangeFile(layout, ME, spared=1 << 60)
    kept.start()
    assert not kept.add(PARTS[0], bytes_of(PARTS[0]), sha(PARTS[0]))
    kept.close()


def test_nothing_is_kept_where_a_link_leads_elsewhere(layout, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (layout.root / ".aimage").mkdir(parents=True)
    (layout.root / ".aimage/range").symlink_to(tmp_path / "elsewhere")
    kept = RangeFile(layout, ME, spared=0)
    kept.start()
    assert not kept.add(PARTS[0], bytes_of(PARTS[0]), sha(PARTS[0]))
    kept.close()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_ranges_of_a_blob_that_has_come_are_let_go(layout, kept):
    kept.add(PARTS[0], bytes_of(PARTS[0]), sha(PARTS[0]))
    kept.tidy()
    assert kept.size
    layout.push(CONTENT, bytes_body(BLOB))
    kept.tidy()
    assert kept.size == 0 and not list(layout.root.glob(".aimage/range/*/*"))


def test_two_nodes_on_one_store_do_not_take_each_others(layout, kept):
    kept.add(PARTS[0], bytes_of(PARTS[0]), sha(PARTS[0]))
    other = RangeFile(layout, OTHER, spared=0)
    other.start()
    other.add(PARTS[1], bytes_of(PARTS[1]), sha(PARTS[1]))
    assert lies_there(kept, PARTS[0]) == bytes_of(PARTS[0])
    assert lies_there(other, PARTS[0]) is None
    other.close()
    assert lies_there(kept, PARTS[0]) == bytes_of(PARTS[0])


KILLED = """
import sys, time
from pathlib import Path
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Digest
from clowder_aimage.node.range_file import RangeFile
from clowder_aimage.node.rendezvous import Range
kept = RangeFile(ImageLayout(Path(sys.argv[1])), "f" * 32, spared=0)
kept.start()
kept.add(Range(Digest.of(b""), 1000, 0), bytes(1000), b"")
print("kept", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_node_kept_is_never_read_and_goes(layout):
    process = spawn(
        [sys.executable, "-c", KILLED, str(layout.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"kept\n"
        one = RangeFile(layout, ME, spared=0)
        one.start()
        assert list(layout.root.glob(".aimage/range/ffff*/*")), "it lives, and so do its files"
        one.close()
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        assert list(layout.root.glob(".aimage/range/ffff*/*"))
        one = RangeFile(layout, ME, spared=0)
        one.start()
        assert [path.name for path in layout.root.glob(".aimage/range/*")] == [ME]
        one.close()
    finally:
        process.kill()
        process.wait(20)
        process.stdin.close()
        process.stdout.close()


def test_a_kept_file_that_was_damaged_is_not_used(layout, kept, ranges):
    kept.add(PARTS[0], bytes_of(PARTS[0]), sha(PARTS[0]))
    (path,) = layout.root.glob(".aimage/range/*/*")
    path.write_bytes(b"x" * RANGE)
    assert ranges.take(PARTS[0]) is None
