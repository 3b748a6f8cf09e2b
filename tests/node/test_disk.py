"""Watermarks of the disk, and eviction of models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.digest_scan import iter_blobs
from clowder_aimage.layout.layout import index_name
from clowder_aimage.node.eviction import (
    DiskReading,
    Watermarks,
    measure_blobs,
    measure_disk,
    measure_partials,
    relieve,
)
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype

OLD, MIDDLE, NEW = (Reference.parse(f"registry.example.com/{name}") for name in "abc")


def artifact(store: ImageLayout, name: Reference) -> None:
    """Store and tag a manifest with one random layer."""
    described = []
    for data in (os.urandom(100), os.urandom(200_000)):
        described.append(Descriptor("application/octet-stream", Digest.of(data), len(data)))
        store.push(described[-1], build_bytes_body(data))
    config, layer = (each.to_json() for each in described)
    document = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "config": config,
        "layers": [layer],
    }
    raw = json.dumps(document).encode()
    store.push(
        Descriptor(mediatype.OCI_MANIFEST, Digest.of(raw), len(raw)), build_bytes_body(raw), name
    )


@pytest.fixture
def three_models(tmp_path: Path) -> ImageLayout:
    """Return a store of three models without shared blobs, last used at different times."""
    store = ImageLayout(tmp_path / "store")
    for hour, name in enumerate((OLD, MIDDLE, NEW)):
        artifact(store, name)
        path = store.root / ".aimage" / "used" / store.resolve(name).digest.encoded
        os.utime(path, (1e9 + 3600 * hour, 1e9 + 3600 * hour))
    return store


@pytest.fixture(autouse=True)
def old_blobs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the grace period, so that new blobs can be collected."""
    if "young_blobs" not in request.fixturenames:
        monkeypatch.setattr("clowder_aimage.node.eviction.GRACE", 0.0)


@pytest.fixture
def young_blobs() -> None:
    """Keep the grace period: the blobs of the test are younger."""


def names(store: ImageLayout) -> set[Any]:
    return {name for name, _ in store.list_tags()}


def test_relieve_evicts_the_least_recently_used_and_no_more(three_models: ImageLayout) -> None:
    done = relieve(three_models, 100_000, keep=())
    assert [one.name for one in done.forgotten] == [index_name(OLD)]
    assert done.size >= 200_000
    assert names(three_models) == {index_name(MIDDLE), index_name(NEW)}


def test_relieve_keeps_desired_names(three_models: ImageLayout) -> None:
    done = relieve(three_models, 100_000, keep=[index_name(OLD)])
    assert [one.name for one in done.forgotten] == [index_name(MIDDLE)]


def test_relieve_does_not_interpret_names_as_patterns(three_models: ImageLayout) -> None:
    done = relieve(three_models, 100_000, keep=["registry.example.com/*", "*", "[a-z]*"])
    assert [one.name for one in done.forgotten] == [index_name(OLD)]


def test_relieve_keeps_pinned_and_leased_names(three_models: ImageLayout) -> None:
    three_models.pins.put(index_name(OLD), {}, durable=True)
    with three_models.lease(three_models.resolve(MIDDLE).digest):
        done = relieve(three_models, 10**12, keep=())
    assert [one.name for one in done.forgotten] == [index_name(NEW)]
    assert names(three_models) == {index_name(OLD), index_name(MIDDLE)}


def test_relieve_collects_garbage_before_evicting(three_models: ImageLayout) -> None:
    three_models.untag(NEW)
    done = relieve(three_models, 100_000, keep=())
    assert not done.forgotten and done.size >= 200_000
    assert names(three_models) == {index_name(OLD), index_name(MIDDLE)}
    with pytest.raises(NotFoundError):
        three_models.resolve(NEW)


def test_relieve_keeps_recently_used_names(three_models: ImageLayout) -> None:
    three_models.use(three_models.resolve(OLD))
    done = relieve(three_models, 10**12, keep=[index_name(NEW)])
    assert [one.name for one in done.forgotten] == [index_name(MIDDLE)]
    done = relieve(three_models, 10**12, keep=[index_name(NEW)], age=0.0)
    assert [one.name for one in done.forgotten] == [index_name(OLD)]


@pytest.mark.usefixtures("young_blobs")
@pytest.mark.parametrize("is_all", [True, False])
def test_relieve_keeps_the_names_of_young_blobs(three_models: ImageLayout, is_all: bool) -> None:
    done = relieve(three_models, 300_000, keep=(), is_all=is_all)
    assert (done.forgotten, done.blobs, done.size) == ([], 0, 0)
    assert names(three_models) == {index_name(name) for name in (OLD, MIDDLE, NEW)}
    # The two that would be removed are named, the third is not needed.
    assert 400_000 <= done.young_size < 600_000


@pytest.mark.usefixtures("young_blobs")
def test_relieve_waits_for_young_garbage_before_evicting(three_models: ImageLayout) -> None:
    three_models.untag(NEW)
    done = relieve(three_models, 100_000, keep=(), is_all=True)
    assert not done.forgotten
    assert done.young_size >= 200_000


def test_relieve_keeps_a_name_that_would_free_nothing(three_models: ImageLayout) -> None:
    """The least recently used name has the blobs of a pinned one."""
    again = Reference.parse("registry.example.com/again")
    three_models.tag(three_models.resolve(OLD), again)
    three_models.pins.put(index_name(again), {}, durable=True)
    path = three_models.root / ".aimage" / "used" / three_models.resolve(OLD).digest.encoded
    os.utime(path, (1e9, 1e9))
    done = relieve(three_models, 100_000, keep=())
    assert [one.name for one in done.forgotten] == [index_name(MIDDLE)]
    assert index_name(OLD) in names(three_models)


def test_relieve_removes_all_names_of_the_blobs_that_it_frees(three_models: ImageLayout) -> None:
    again = Reference.parse("registry.example.com/again")
    three_models.tag(three_models.resolve(OLD), again)
    path = three_models.root / ".aimage" / "used" / three_models.resolve(OLD).digest.encoded
    os.utime(path, (1e9, 1e9))
    done = relieve(three_models, 100_000, keep=())
    assert {one.name for one in done.forgotten} == {index_name(OLD), index_name(again)}


@pytest.mark.parametrize(
    ("used", "excess"),
    [(84, 0), (85, 0), (86, 6), (100, 20)],
)
def test_excess_is_measured_from_the_lower_mark_above_the_upper_one(
    tmp_path: Path, used: int, excess: int
) -> None:
    marks = Watermarks(
        0.85, 0.80, measure=lambda _: DiskReading(110, used, 100 - used)
    )  # ten are reserved for root
    assert marks.compute_excess(tmp_path) == excess


def test_usage_of_a_missing_store_is_that_of_its_parent(tmp_path: Path) -> None:
    found = measure_disk(tmp_path / "not" / "yet")
    assert found is not None
    assert 0 < found.used_fraction < 1 and found.total >= found.used + found.free > 0


def test_stored_counts_blobs_and_interrupted_downloads(three_models: ImageLayout) -> None:
    kept = measure_blobs(three_models.root)
    assert kept == sum(each.st_size for _, each in iter_blobs(three_models.root)) > 600_000
    size = 20 * 1024 * 1024  # large enough for an ingest record
    content = Descriptor("application/octet-stream", Digest.of(b"y"), size)
    ingest = three_models.ingest(content.digest.encoded, content)
    ingest.write_at(0, b"x" * size)
    ingest.suspend()
    assert measure_partials(three_models.root) >= size
