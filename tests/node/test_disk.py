"""The watermarks: what goes when the disk is fuller than it may be."""

from __future__ import annotations

import json
import os

import pytest

from clowder_aimage.content.store import bytes_body
from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.digest_scan import blobs
from clowder_aimage.layout.layout import index_name
from clowder_aimage.node.eviction import DiskReading, Watermarks, relieve, stored, usage
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype

OLD, MIDDLE, NEW = (Reference.parse(f"registry.example.com/{name}") for name in "abc")


def artifact(store, name):
    """A manifest with one layer of its own."""
    described = []
    for data in (os.urandom(100), os.urandom(200_000)):
        described.append(Descriptor("application/octet-stream", Digest.of(data), len(data)))
        store.push(described[-1], bytes_body(data))
    config, layer = (each.to_json() for each in described)
    document = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "config": config,
        "layers": [layer],
    }
    raw = json.dumps(document).encode()
    store.push(Descriptor(mediatype.OCI_MANIFEST, Digest.of(raw), len(raw)), bytes_body(raw), name)


@pytest.fixture
def store(tmp_path):
    """Three models that share nothing, used one after the other, long ago."""
    store = ImageLayout(tmp_path / "store")
    for hour, name in enumerate((OLD, MIDDLE, NEW)):
        artifact(store, name)
        path = store.root / ".aimage" / "used" / store.resolve(name).digest.encoded
        os.utime(path, (1e9 + 3600 * hour, 1e9 + 3600 * hour))
    return store


@pytest.fixture(autouse=True)
def old_blobs(monkeypatch):
    """Blobs that are old enough to go."""
    monkeypatch.setattr("clowder_aimage.node.eviction.GRACE", 0.0)


def names(store):
    return {name for name, _ in store.tags()}


def test_the_least_recently_used_goes_first_and_no_more_than_must(store):
    done = relieve(store, 100_000, keep=())
    assert [one.name for one in done.forgotten] == [index_name(OLD)]
    assert done.size >= 200_000
    assert names(store) == {index_name(MIDDLE), index_name(NEW)}


def test_a_desired_name_stays_though_it_was_used_least_recently(store):
    done = relieve(store, 100_000, keep=[index_name(OLD)])
    assert [one.name for one in done.forgotten] == [index_name(MIDDLE)]


def test_a_name_that_looks_like_a_pattern_is_none(store):
    done = relieve(store, 100_000, keep=["registry.example.com/*", "*", "[a-z]*"])
    assert [one.name for one in done.forgotten] == [index_name(OLD)]


def test_pinned_and_leased_names_stay_on_a_full_disk(store):
    store.pins.put(index_name(OLD), {}, durable=True)
    with store.lease(store.resolve(MIDDLE).digest):
        done = relieve(store, 10**12, keep=())
    assert [one.name for one in done.forgotten] == [index_name(NEW)]
    assert names(store) == {index_name(OLD), index_name(MIDDLE)}


def test_garbage_goes_before_any_name(store):
    store.untag(NEW)
    done = relieve(store, 100_000, keep=())
    assert not done.forgotten and done.size >= 200_000
    assert names(store) == {index_name(OLD), index_name(MIDDLE)}
    with pytest.raises(NotFoundError):
        store.resolve(NEW)


def test_a_name_that_was_just_used_stays_for_a_while(store):
    store.use(store.resolve(OLD))
    done = relieve(store, 10**12, keep=[index_name(NEW)])
    assert [one.name for one in done.forgotten] == [index_name(MIDDLE)]
    done = relieve(store, 10**12, keep=[index_name(NEW)], age=0.0)
    assert [one.name for one in done.forgotten] == [index_name(OLD)]


@pytest.mark.parametrize(
    ("used", "excess"),
    [(84, 0), (85, 0), (86, 6), (100, 20)],
)
def test_nothing_goes_below_the_upper_mark_and_all_above_the_lower_one_past_it(
    tmp_path, used, excess
):
    marks = Watermarks(
        0.85, 0.80, measure=lambda _: DiskReading(110, used, 100 - used)
    )  # ten are root's
    assert marks.excess(tmp_path) == excess


def test_the_disk_of_a_store_that_is_not_there_yet_is_that_of_its_place(tmp_path):
    found = usage(tmp_path / "not" / "yet")
    assert 0 < found.part < 1 and found.total >= found.used + found.free > 0


def test_stored_counts_blobs_and_interrupted_downloads(store):
    kept, _ = stored(store.root)
    assert kept == sum(each.st_size for _, each in blobs(store.root)) > 600_000
    size = 20 * 1024 * 1024  # worth keeping book of
    content = Descriptor("application/octet-stream", Digest.of(b"y"), size)
    ingest = store.ingest(content.digest.encoded, content)
    ingest.write_at(0, b"x" * size)
    ingest.suspend()
    assert stored(store.root)[1] >= size
