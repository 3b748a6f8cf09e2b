"""Collection removes names by their age and size, and keeps young and used content."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.layout import ImageLayout, gc
from clowder_aimage.layout.gc import GRACE
from clowder_aimage.oci import Digest, Manifest, Reference, mediatype
from tests.content.artifact import index, put, put_artifact
from tests.layout.collecting import (
    DAY,
    add_entry,
    all_of,
    before_sweeping,
    blobs,
    collected,
    encoded,
    foreign,
    names,
    put_raw,
    total,
    used,
)


def test_content_of_a_removed_name_has_no_grace(store: ImageLayout) -> None:
    kept = put_artifact(store, "kept:v1", b"shared", b"one")
    put_artifact(store, "gone:v1", b"shared", b"two")
    stray = put(store, b"stray")
    store.untag(Reference.parse("gone:v1"))
    done = collected(store, grace=GRACE)
    assert blobs(store) == all_of(kept) | encoded(stray)
    assert (done.blobs, done.young) == (3, 1)
    assert not list((store.root / ".aimage" / "unnamed").iterdir())


def test_content_of_a_moved_name_has_no_grace(store: ImageLayout) -> None:
    put_artifact(store, "a", b"one")
    new = put_artifact(store, "a", b"two")
    assert collected(store, grace=GRACE).young == 0
    assert blobs(store) == all_of(new)


def test_blobs_stored_after_a_name_was_removed_have_the_grace(store: ImageLayout) -> None:
    """Another tool may be copying an artifact that shares them."""
    made = put_artifact(store, "a", b"one")
    store.untag(Reference.parse("a"))
    (record,) = (store.root / ".aimage" / "unnamed").iterdir()
    os.utime(record, (time.time() - 60,) * 2)  # as if the blobs had been stored after it
    assert collected(store, grace=GRACE).young == 3
    assert blobs(store) == all_of(made)


def test_leased_content_of_a_removed_name_is_kept(store: ImageLayout) -> None:
    """A pull or a create in progress leases the blobs before it looks for them."""
    made = put_artifact(store, "a", b"one", b"two")
    shared = made.layers[0]
    with store.lease(shared.digest):
        store.untag(Reference.parse("a"))
        collected(store, grace=GRACE)
        assert blobs(store) == encoded(shared)


def test_a_name_given_between_marking_and_sweeping_keeps_its_content(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = put_artifact(store, "a", b"one")
    store.untag(Reference.parse("a"))
    before_sweeping(monkeypatch, lambda: add_entry(store, made.descriptor, "again:v1"))
    collected(store, grace=GRACE)
    assert blobs(store) == all_of(made)


def test_without_locks_content_of_a_removed_name_has_the_grace(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_artifact(store, "a", b"one")
    store.untag(Reference.parse("a"))
    monkeypatch.setattr(gc, "supports_locks", lambda _: False)
    assert collected(store, grace=GRACE).young == 3


def test_times_in_the_future_count_as_old(store: ImageLayout) -> None:
    """Files keep such times from a clock that was wrong."""
    put(store, b"stray")
    named = put_artifact(store, "a")
    record = store.root / ".aimage" / "used" / named.digest.encoded
    os.utime(record, (time.time() + DAY,) * 2)
    assert store.use_time(named.descriptor) == 0.0
    store.use(named.descriptor)
    assert abs(store.use_time(named.descriptor) - time.time()) < 60
    assert collected(store, grace=GRACE, later=-60).young == 1
    assert collected(store, grace=GRACE, later=-DAY).blobs == 1
    (begun := store.root / ".aimage" / "ingest" / "b").touch()
    os.utime(begun, (time.time() + 30 * DAY,) * 2)
    assert collected(store, stale=DAY).partials == 1


def test_young_blobs_are_kept_for_the_grace_period(store: ImageLayout) -> None:
    stray = put(store, b"stray")
    done = collected(store, grace=GRACE)
    assert (done.blobs, done.young, done.young_size) == (0, 1, 5)
    assert blobs(store) == encoded(stray)
    os.utime(store.find_path(stray), (0, 0))  # a tool that restores times
    assert collected(store, grace=GRACE, later=GRACE - 60).young == 1
    assert collected(store, grace=GRACE, later=GRACE + 60).blobs == 1
    assert blobs(store) == set()


def test_dry_run_removes_nothing(store: ImageLayout) -> None:
    put_artifact(store, "old:v1", b"one")
    stray = put(store, b"stray")
    ingest = store.root / ".aimage" / "ingest" / ("ab" * 32)
    ingest.write_bytes(b"part")
    dead = store.root / ".aimage" / "lease" / "dead"
    dead.parent.mkdir()
    dead.write_text(f"{stray.digest}\n")
    temporary = store.root / ".aimage" / f"index.json.{'0' * 16}"
    temporary.write_bytes(b"")
    before = {path: path.lstat().st_mtime_ns for path in store.root.rglob("*")}
    done = collected(store, dry_run=True, later=10 * DAY, max_age=DAY)
    assert [one.name for one in done.forgotten] == ["old:v1"]
    assert (done.blobs, done.partials) == (4, 1)
    assert before == {path: path.lstat().st_mtime_ns for path in store.root.rglob("*")}
    real = collected(store, later=10 * DAY, max_age=DAY)
    assert (real.blobs, real.size, real.partials) == (done.blobs, done.size, done.partials)


def test_collection_of_a_missing_store(store: ImageLayout) -> None:
    done = collected(store, max_age=0.0, max_size=0)
    assert (done.blobs, done.left_size, done.forgotten) == (0, 0, [])
    assert not store.root.exists()


def test_names_unused_for_max_age_are_removed(
    store: ImageLayout, aged: dict[str, Manifest]
) -> None:
    done = collected(store, max_age=1.5 * DAY)
    assert {one.name for one in done.forgotten} == {"b:v1", "c:v1"}
    assert "not used for 2 days" in [one.reason for one in done.forgotten]
    assert names(store) == {"a:v1"}
    assert blobs(store) == all_of(aged["a:v1"])


def test_use_makes_a_name_recent(store: ImageLayout, aged: dict[str, Manifest]) -> None:
    store.use(aged["c:v1"].descriptor)
    collected(store, max_age=1.5 * DAY)
    assert names(store) == {"a:v1", "c:v1"}


def test_a_foreign_name_has_the_age_of_its_manifest(store: ImageLayout) -> None:
    made = foreign(store, [put(store, b"layer")])
    add_entry(store, made, "foreign:v1")
    assert collected(store, max_age=DAY).forgotten == []
    assert [one.name for one in collected(store, max_age=DAY, later=2 * DAY).forgotten]
    assert names(store) == set()


def test_least_recently_used_names_are_removed_until_the_rest_fits(
    store: ImageLayout, aged: dict[str, Manifest]
) -> None:
    whole = total(store)
    done = collected(store, max_size=whole - 1)
    assert [one.name for one in done.forgotten] == ["c:v1"]
    assert done.left_size == total(store) <= whole - 1
    assert blobs(store) == all_of(aged["a:v1"]) | all_of(aged["b:v1"])
    done = collected(store, max_size=0)
    assert [one.name for one in done.forgotten] == ["b:v1", "a:v1"]
    assert blobs(store) == set()


def test_shared_blobs_count_once(store: ImageLayout, aged: dict[str, Manifest]) -> None:
    """Counted three times, the 500 bytes would exceed the limit and remove a name."""
    assert collected(store, max_size=total(store)).forgotten == []
    assert collected(store, max_size=total(store) - 1).blobs == 3  # without the shared blob


def test_both_names_of_a_manifest_are_removed_to_fit(
    store: ImageLayout, aged: dict[str, Manifest]
) -> None:
    store.tag(aged["c:v1"].descriptor, Reference.parse("c:v2"))
    used(store, aged["c:v1"], time.time() - 3 * DAY)
    done = collected(store, max_size=total(store) - 1)
    assert {one.name for one in done.forgotten} == {"c:v1", "c:v2"}
    assert names(store) == {"a:v1", "b:v1"}


def test_keep_patterns_protect_names(store: ImageLayout, aged: dict[str, Manifest]) -> None:
    done = collected(store, max_age=0.0, keep=["b*", "*:v9"])
    assert {one.name for one in done.forgotten} == {"a:v1", "c:v1"}
    assert names(store) == {"b:v1"}


def test_pinned_names_are_kept(store: ImageLayout, aged: dict[str, Manifest]) -> None:
    store.pins.put("c:v1", {}, durable=True)
    done = collected(store, max_age=0.0)
    assert {one.name for one in done.forgotten} == {"a:v1", "b:v1"}
    assert collected(store, max_size=0).forgotten == []
    assert blobs(store) == all_of(aged["c:v1"])


def test_a_short_name_of_another_tool_can_be_pinned(store: ImageLayout) -> None:
    made = foreign(store, [put(store, b"layer")])
    add_entry(store, made, "short")
    store.pins.put("short:latest", {}, durable=True)  # equals 'aimage pin short'
    assert collected(store, max_age=DAY, later=2 * DAY).forgotten == []
    assert names(store) == {"short"}


def test_leased_names_are_not_removed(store: ImageLayout, aged: dict[str, Manifest]) -> None:
    with store.lease(aged["c:v1"].digest):
        done = collected(store, max_age=0.0)
        assert {one.name for one in done.forgotten} == {"a:v1", "b:v1"}
    collected(store, max_age=0.0)
    assert names(store) == set()


def test_an_invalid_name_is_kept(store: ImageLayout) -> None:
    made = foreign(store, [put(store, b"layer")])
    add_entry(store, made, "Not A Reference!")
    assert collected(store, max_age=DAY, later=2 * DAY).forgotten == []
    assert names(store) == {"Not A Reference!"}


def test_a_name_moved_during_a_collection_is_kept(
    store: ImageLayout, aged: dict[str, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is pulled anew just before its removal."""
    remove_names = ImageLayout.remove_names

    def moved(self: ImageLayout, names: Mapping[str, Digest]) -> set[str]:
        assert "c:v1" in names
        self.tag(aged["a:v1"].descriptor, Reference.parse("c:v1"))
        return remove_names(self, names)

    monkeypatch.setattr(ImageLayout, "remove_names", moved)
    done = collected(store, max_age=2.5 * DAY)
    assert done.forgotten == []
    assert store.resolve(Reference.parse("c:v1")).digest == aged["a:v1"].digest
    assert all_of(aged["a:v1"]) | all_of(aged["b:v1"]) <= blobs(store)


def test_content_named_between_marking_and_sweeping_is_kept(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = put_artifact(store, "late", b"late")
    store.untag(Reference.parse("late"))
    stray = put(store, b"stray")
    before_sweeping(monkeypatch, lambda: store.tag(late.descriptor, Reference.parse("late")))
    assert collected(store).blobs == 1
    assert blobs(store) == all_of(late)
    assert stray.digest.encoded not in blobs(store)


def test_blob_added_between_marking_and_sweeping_is_kept(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, b"stray")
    late = []
    before_sweeping(monkeypatch, lambda: late.append(put(store, b"late")))
    collected(store)
    assert blobs(store) == encoded(*late)


def test_a_variant_restored_between_marking_and_sweeping_is_kept(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index that lists it existed and was marked all the time."""
    made = put_artifact(store, "one", b"one")
    document = index([made.descriptor])
    store.push(document.descriptor, build_bytes_body(document.raw))
    store.tag(document.descriptor, Reference.parse("all"))
    store.untag(Reference.parse("one"))
    path = store.find_path(made.descriptor)
    aside = store.root / "aside"
    path.rename(aside)
    before_sweeping(monkeypatch, lambda: aside.rename(path))
    collected(store)
    assert blobs(store) == all_of(made) | encoded(document.descriptor)


def test_a_config_restored_between_marking_and_sweeping_is_read(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lists the decompressed blobs of compressed layers."""
    plain = put(store, b"what was compressed")
    rootfs = {"type": "layers", "diff_ids": [str(plain.digest)]}
    config = put_raw(store, {"os": "linux", "rootfs": rootfs}, mediatype.OCI_CONFIG)
    made = foreign(store, [put(store, b"compressed")], config)
    add_entry(store, made, "container:v1")
    path = store.find_path(config)
    aside = store.root / "aside"
    path.rename(aside)
    before_sweeping(monkeypatch, lambda: aside.rename(path))
    collected(store)
    assert plain.digest.encoded in blobs(store)
