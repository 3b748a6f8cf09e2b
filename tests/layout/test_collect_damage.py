"""Collection in a store with damaged content, unfinished downloads, and dead processes."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.errors import VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.gc import GRACE
from clowder_aimage.layout.stored_aimage import lease_manifest
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference
from tests.content.artifact import blob, index, put, put_artifact
from tests.layout.collecting import (
    DAY,
    all_of,
    blobs,
    collected,
    damage,
    encoded,
    names,
    state,
)

# -- damaged content


@pytest.mark.parametrize("wishes", [{}, {"max_size": 0}], ids=repr)
def test_a_damaged_manifest_stops_the_collection(
    store: ImageLayout, aged: dict[str, Manifest], wishes: dict[str, int]
) -> None:
    """Its references are unknown: no blob and no name is removed."""
    stray = put(store, b"stray")
    damage(store, aged["b:v1"].descriptor)
    before = state(store)
    with pytest.raises(VerificationError, match=r"in b:v1 is damaged: nothing was"):
        collected(store, **wishes)
    assert state(store) == before
    assert names(store) == set(aged)
    assert stray.digest.encoded in blobs(store)


def test_a_damaged_manifest_in_an_index_stops_the_collection(store: ImageLayout) -> None:
    one = put_artifact(store, "one", b"one")
    document = index([one.descriptor])
    store.push(document.descriptor, build_bytes_body(document.raw))
    store.tag(document.descriptor, Reference.parse("all"))
    store.untag(Reference.parse("one"))
    put(store, b"stray")
    damage(store, one.descriptor)
    before = blobs(store)
    with pytest.raises(VerificationError, match="nothing was removed"):
        collected(store)
    assert blobs(store) == before


def test_damaged_unneeded_manifest_is_removed(
    store: ImageLayout, aged: dict[str, Manifest]
) -> None:
    damage(store, aged["b:v1"].descriptor)
    store.untag(Reference.parse("b:v1"))
    collected(store)
    assert blobs(store) == all_of(aged["a:v1"]) | all_of(aged["c:v1"])


@pytest.mark.parametrize("wishes", [{}, {"max_size": 0}], ids=repr)
def test_a_name_without_its_manifest_stops_the_collection(
    store: ImageLayout, aged: dict[str, Manifest], wishes: dict[str, int]
) -> None:
    """Its layers may exist, but are unknown."""
    store.find_path(aged["b:v1"].descriptor).unlink()
    put(store, b"stray")
    before = state(store)
    with pytest.raises(VerificationError, match=r"the manifest of b:v1 is missing"):
        collected(store, **wishes)
    assert state(store) == before
    assert names(store) == set(aged)
    store.untag(Reference.parse("b:v1"))
    collected(store)
    assert blobs(store) == all_of(aged["a:v1"]) | all_of(aged["c:v1"])


# -- unfinished downloads, and files of killed processes


def partial(directory: Any, letter: str, *, journal: bool = True) -> Any:
    path = directory / (letter * 64)
    path.write_bytes(b"x" * 5000)
    if journal:
        Path(f"{path}.journal").write_text("\n0-5000\n")
    return path


def test_unfinished_downloads_are_removed_after_the_grace_period(
    store: ImageLayout, ingests: Any
) -> None:
    old, young, busy = (partial(ingests, letter) for letter in "abc")
    now = time.time()
    for path in (old, busy):
        os.utime(path, (now - 8 * DAY,) * 2)
    os.utime(young, (now - 6 * DAY,) * 2)
    taken = old.stat().st_blocks * 512
    with busy.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = collected(store)
        assert (done.partials, done.partial_size) == (1, taken)
        left = {path.name for path in ingests.iterdir()}
        assert left == {p + suffix for p in (young.name, busy.name) for suffix in ("", ".journal")}
    assert collected(store).partials == 1  # no process is using it


def test_anonymous_ingests_are_removed_unless_locked(store: ImageLayout, ingests: Any) -> None:
    abandoned = ingests / f"upload.{'0' * 16}"
    abandoned.write_bytes(b"x")
    alive = store.ingest("upload")
    alive.write_at(0, b"abc")
    assert collected(store).partials == 1
    assert not abandoned.exists()
    content = blob(b"abc")
    alive.commit(content)
    assert store.exists(content)


def test_a_journal_without_its_download_is_removed(store: ImageLayout, ingests: Any) -> None:
    (ingests / f"{'a' * 64}.journal").write_text("\n0-5\n")
    assert collected(store).partials == 0
    assert list(ingests.iterdir()) == []


def test_an_ingest_continues_after_a_collection(store: ImageLayout, ingests: Any) -> None:
    content = blob(b"0123456789")
    ingest = store.ingest(content.digest.encoded, content)
    ingest.write_at(0, b"01234")
    collected(store, later=30 * DAY)
    ingest.write_at(5, b"56789")
    ingest.commit(content)
    assert store.find_path(content).read_bytes() == b"0123456789"


def test_files_of_killed_processes_are_removed(store: ImageLayout) -> None:
    made = put_artifact(store, "a", b"one")
    private = store.root / ".aimage"
    left = [
        private / f"index.json.{'0' * 16}",
        private / f"oci-layout.{'1' * 16}",
        private / "names" / f"{'a' * 40}.{'2' * 16}",
        private / "pins" / f"{'a' * 40}.{'3' * 16}",
        private / "listing" / f"{made.digest.encoded}.{'4' * 16}",
        private / f"damaged.{'b' * 64}",
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"?")
    for kind in ("used", "listing"):
        (private / kind / ("c" * 64)).write_bytes(b"")  # of a removed manifest
        (private / kind / made.digest.encoded).write_bytes(b"")
    collected(store, grace=GRACE, later=2 * GRACE)
    assert [path.name for path in left if path.exists()] == []
    for kind in ("used", "listing"):
        assert [path.name for path in (private / kind).iterdir()] == [made.digest.encoded]
    assert names(store) == {"a:latest"}
    assert store.pins.list_names() == set()


def test_recent_damaged_blob_set_aside_is_kept(store: ImageLayout) -> None:
    """A damaged blob keeps its old time when 'verify --repair' moves it out of the way."""
    stray = put(store, b"stray")
    path = store.find_path(stray)
    os.utime(path, (0, 0))
    aside = store.root / ".aimage" / f"damaged.{path.name}"
    path.rename(aside)
    collected(store)
    assert aside.exists()
    collected(store, later=3600)
    assert not aside.exists()


def test_a_leased_manifest_keeps_its_content_after_its_tag_moves(store: ImageLayout) -> None:
    old = put_artifact(store, "h.io/a:v1", b"old", b"older")
    with store.lease(old.descriptor.digest):
        new = put_artifact(store, "h.io/a:v1", b"new")
        collected(store)
        assert blobs(store) == all_of(old) | all_of(new)
    collected(store)
    assert blobs(store) == all_of(new)


def test_a_lease_on_a_blob_or_damaged_document_keeps_only_that(store: ImageLayout) -> None:
    old = put_artifact(store, "h.io/a:v1", b"{ not json", b"other")
    layer = next(each for each in old.children if each.size == 10)
    with store.lease(layer.digest, Digest.of(b"not here")):
        store.untag(Reference.parse("h.io/a:v1"))
        collected(store)
        assert blobs(store) == encoded(layer)


def test_hold_leases_the_manifest_of_a_moving_name(store: ImageLayout) -> None:
    """The name moves and a collection runs between the first read and the lease."""
    reference = Reference.parse("h.io/a:v1")
    old = put_artifact(store, str(reference), b"old")
    made: list[Any] = []

    class Slow(ImageLayout):
        def resolve(self, asked: Reference, /) -> Descriptor:
            found = super().resolve(asked)
            if not made:
                made.append(put_artifact(store, str(reference), b"new"))
                collected(store)
            return found

    slow = Slow(store.root)
    with slow.lease() as lease:
        found = lease_manifest(slow, reference, lease)
        assert found.digest == made[0].descriptor.digest != old.descriptor.digest
        store.untag(reference)
        collected(store)
        assert blobs(store) == all_of(made[0])


def test_leases_of_dead_processes_are_removed(store: ImageLayout) -> None:
    stray = put(store, b"stray")
    dead = store.root / ".aimage" / "lease" / "dead"
    dead.parent.mkdir()
    dead.write_text(f"{stray.digest}\n")
    assert collected(store).blobs == 1
    assert not dead.exists()
