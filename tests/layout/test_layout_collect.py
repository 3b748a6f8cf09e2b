"""Collection removes unneeded content and nothing else."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.errors import VerificationError
from clowder_aimage.layout import ImageLayout, gc, lock
from clowder_aimage.layout.digest_scan import iter_blobs
from clowder_aimage.layout.gc import GRACE, STALE, Collector
from clowder_aimage.layout.stored_aimage import lease_manifest
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from tests.content.artifact import CONFIG, blob, index, manifest, put, put_artifact

DAY = 86400.0


def collected(
    store: ImageLayout,
    *,
    grace: float = 0.0,
    dry_run: Any = False,
    stale: float = STALE,
    later: float = 0.0,
    **wishes: Any,
) -> gc.Collection:
    """Collect as if ``later`` seconds had passed."""
    collector = Collector(
        store, grace=grace, dry_run=dry_run, stale=stale, clock=lambda: time.time() + later
    )
    return collector.run(**wishes)


def blobs(store: ImageLayout) -> set[Any]:
    """Return the names of all files among the blobs."""
    return {path.name for path in (store.root / "blobs").rglob("*") if not path.is_dir()}


def names(store: ImageLayout) -> set[Any]:
    return {name for name, _ in store.list_tags()}


def encoded(*contents: Descriptor) -> set[Any]:
    return {content.digest.encoded for content in contents}


def all_of(made: Manifest) -> Any:
    """Return the digests of an artifact's parts."""
    return encoded(made.descriptor, *made.children)


def add_entry(store: ImageLayout, descriptor: Descriptor, name: str = "", **fields: Any) -> None:
    """List a manifest in index.json only, as another tool does."""
    path = store.root / "index.json"
    value: dict[str, Any] = {"schemaVersion": 2, "manifests": []}
    if path.exists():
        value = json.loads(path.read_bytes())
    entry = descriptor.to_json() | fields
    if name:
        entry["annotations"] = entry.get("annotations", {}) | {mediatype.REF_NAME: name}
    value["manifests"].append(entry)
    store.root.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def put_raw(store: ImageLayout, value: Any, media_type: str = mediatype.OCI_MANIFEST) -> Descriptor:
    """Push a document as written by another tool."""
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return put(store, raw, media_type)


def foreign(
    store: ImageLayout, layers: list[Any], config: Descriptor | None = None, **fields: Any
) -> Descriptor:
    """Return a manifest with unknown fields."""
    config = config or put(store, b"{}", CONFIG)
    document = {"config": config.to_json(), "layers": [layer.to_json() for layer in layers]}
    return put_raw(store, {"schemaVersion": 2, **document, **fields})


def before_sweeping(monkeypatch: pytest.MonkeyPatch, hook: Any) -> None:
    """Run a function between marking and sweeping."""
    held = lock.hold_lock

    def wrapped(root: Path, name: str, **options: Any) -> AbstractContextManager[None]:
        hook()
        return held(root, name, **options)

    monkeypatch.setattr(gc, "hold_lock", wrapped)


# -- removed and kept content


def test_collection_removes_unneeded_and_keeps_named_blobs(store: ImageLayout) -> None:
    kept = put_artifact(store, "kept:v1", b"shared", b"one")
    gone = put_artifact(store, "gone:v1", b"shared", b"two")
    stray = put(store, b"stray")
    store.untag(Reference.parse("gone:v1"))
    freed = all_of(gone) - all_of(kept) | encoded(stray)
    sizes = sum((store.root / "blobs/sha256" / name).stat().st_size for name in freed)
    done = collected(store)
    assert blobs(store) == all_of(kept)
    assert (done.blobs, done.size) == (len(freed), sizes)
    assert done.left_size == sum(p.stat().st_size for p in (store.root / "blobs").rglob("*/*"))
    assert collected(store).blobs == 0


def test_sha512_blobs_are_collected(store: ImageLayout) -> None:
    data = b"by another algorithm"
    content = blob(data)
    stray = type(content)(content.media_type, Digest.of(data, "sha512"), len(data))
    store.push(stray, build_bytes_body(data))
    kept = type(content)(content.media_type, Digest.of(b"kept", "sha512"), 4)
    store.push(kept, build_bytes_body(b"kept"))
    made = foreign(store, [kept])
    store.tag(made, Reference.parse("a"))
    assert collected(store).blobs == 1
    assert kept.digest.encoded in blobs(store)
    assert stray.digest.encoded not in blobs(store)


def test_content_of_an_unnamed_entry_is_kept(store: ImageLayout) -> None:
    made = put_artifact(store, "a", b"one")
    store.untag(Reference.parse("a"))
    add_entry(store, made.descriptor)
    assert collected(store).blobs == 0
    assert blobs(store) == all_of(made)


@pytest.mark.parametrize(
    "odd",
    [
        {"annotations": {"x": 7}},
        {"size": -1},
        {"mediaType": 7},
    ],
    ids=repr,
)
def test_an_unreadable_entry_keeps_its_digest(store: ImageLayout, odd: dict[str, Any]) -> None:
    made = put_artifact(store, "a", b"one")
    store.untag(Reference.parse("a"))
    add_entry(store, made.descriptor, **odd)
    collected(store)
    assert blobs(store) == all_of(made)


def test_nested_indexes_keep_their_content(store: ImageLayout) -> None:
    one, two = (put_artifact(store, name, name.encode()) for name in ("one", "two"))
    inner = index([one.descriptor])
    outer = index([inner.descriptor, two.descriptor])
    for document in (inner, outer):
        store.push(document.descriptor, build_bytes_body(document.raw))
    store.tag(outer.descriptor, Reference.parse("all"))
    for name in ("one", "two"):
        store.untag(Reference.parse(name))
    assert collected(store).blobs == 0
    assert blobs(store) == all_of(one) | all_of(two) | encoded(inner.descriptor, outer.descriptor)
    store.untag(Reference.parse("all"))
    collected(store)
    assert blobs(store) == set()


def test_indexes_named_at_two_depths_keep_their_content(store: ImageLayout) -> None:
    """Content deep below one name may be near another: it is kept in either order."""
    made = put_artifact(store, "a", b"one")
    descriptor, chain = made.descriptor, []
    for _ in range(8):
        document = index([descriptor])
        store.push(document.descriptor, build_bytes_body(document.raw))
        descriptor = document.descriptor
        chain.append(descriptor)
    add_entry(store, chain[-1], "long:v1")
    add_entry(store, chain[3], "short:v1")
    store.untag(Reference.parse("a"))
    collected(store)
    assert blobs(store) == all_of(made) | encoded(*chain)


def test_an_index_with_missing_variants_is_kept(store: ImageLayout) -> None:
    one = put_artifact(store, "one", b"one")
    absent = manifest(blob(b"{}", CONFIG), [])
    document = index([absent.descriptor, one.descriptor])
    store.push(document.descriptor, build_bytes_body(document.raw))
    store.tag(document.descriptor, Reference.parse("all"))
    store.untag(Reference.parse("one"))
    collected(store)
    assert blobs(store) == all_of(one) | encoded(document.descriptor)


def test_digests_in_unknown_fields_are_kept(store: ImageLayout) -> None:
    """Future manifests, subjects, artifact blobs, annotations: references are overestimated."""
    extras = [put(store, f"extra {n}".encode()) for n in range(4)]
    made = foreign(
        store,
        [put(store, b"layer")],
        blobs=[extras[0].to_json()],
        subject=extras[1].to_json(),
        annotations={"x": f"see {extras[2].digest}"},
        x={"y": [{"z": str(extras[3].digest)}]},
    )
    add_entry(store, made, "foreign:v1")
    stray = put(store, b"stray")
    assert collected(store).blobs == 1
    assert encoded(*extras) <= blobs(store)
    assert stray.digest.encoded not in blobs(store)


def test_docker_manifests_and_lists_keep_their_content(store: ImageLayout) -> None:
    config, layer = put(store, b"{}", mediatype.DOCKER_CONFIG), put(store, b"layer")
    made = put_raw(
        store,
        {
            "schemaVersion": 2,
            "mediaType": mediatype.DOCKER_MANIFEST,
            "config": config.to_json(),
            "layers": [layer.to_json()],
        },
        mediatype.DOCKER_MANIFEST,
    )
    listed = put_raw(
        store,
        {
            "schemaVersion": 2,
            "mediaType": mediatype.DOCKER_MANIFEST_LIST,
            "manifests": [made.to_json()],
        },
        mediatype.DOCKER_MANIFEST_LIST,
    )
    add_entry(store, listed, "docker:v1")
    assert collected(store).blobs == 0
    assert encoded(config, layer, made, listed) == blobs(store)


def test_digests_with_json_escapes_are_found(store: ImageLayout) -> None:
    config, layer = put(store, b"{}", CONFIG), put(store, b"layer")
    raw = json.dumps({"config": config.to_json(), "layers": [layer.to_json()]})
    inner = put_raw(store, raw.replace("sha256:", "\\u0073ha256:").encode())
    text = json.dumps({"manifests": [inner.to_json()]}).replace("manifests", "m\\u0061nifests")
    outer = put_raw(store, text.encode(), mediatype.OCI_INDEX)
    add_entry(store, outer, "odd:v1")
    assert collected(store).blobs == 0
    assert blobs(store) == encoded(config, layer, inner, outer)


@pytest.mark.parametrize("fields", [{}, {"annotations": {"x": "y"}}], ids=["plain", "annotated"])
def test_inflated_copies_listed_in_a_container_config_are_kept(
    store: ImageLayout, fields: dict[str, dict[str, str]]
) -> None:
    plain = put(store, b"what was compressed" * 9)
    layer = put(store, gzip.compress(b"what was compressed" * 9, mtime=0))
    rootfs = {"type": "layers", "diff_ids": [str(plain.digest)]}
    config = put_raw(store, {"os": "linux", "rootfs": rootfs}, mediatype.OCI_CONFIG)
    described = type(config)(config.media_type, config.digest, config.size, **fields)
    made = foreign(store, [layer], described)
    add_entry(store, made, "container:v1")
    assert collected(store).blobs == 0
    assert plain.digest.encoded in blobs(store)


def test_an_entry_of_a_blob_keeps_it(store: ImageLayout) -> None:
    """Another tool may list a large file, which is not a manifest."""
    content = put(store, b"\xff\xfe no manifest")
    add_entry(store, content, "file:v1")
    assert collected(store).blobs == 0
    assert blobs(store) == encoded(content)


# -- age


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


def used(store: ImageLayout, made: Manifest, when: float) -> None:
    """Set the time of a manifest's last use."""
    store.use(made.descriptor)
    os.utime(store.root / ".aimage" / "used" / made.digest.encoded, (when, when))


@pytest.fixture
def aged(store: ImageLayout) -> dict[str, Manifest]:
    """Return three names of 1000 bytes each and 500 shared, used one, two and three days ago."""
    made = {
        name: put_artifact(store, name, b"s" * 500, name[0].encode() * 1000)
        for name in ("a:v1", "b:v1", "c:v1")
    }
    now = time.time()
    for days, name in enumerate(made, 1):
        used(store, made[name], now - days * DAY)
    return made


def total(store: ImageLayout) -> Any:
    return sum(path.stat().st_size for path in (store.root / "blobs").rglob("*/*"))


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


# -- damaged content


def damage(store: ImageLayout, content: Descriptor) -> None:
    path = store.find_path(content)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def state(store: ImageLayout) -> dict[Any, Any]:
    return {path: path.lstat().st_size for path in store.root.rglob("*") if path.name != "gc.lock"}


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


@pytest.fixture
def ingests(store: ImageLayout) -> Path:
    """Return the directory of unfinished downloads."""
    directory = store.root / ".aimage" / "ingest"
    directory.mkdir(parents=True)
    return directory


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


# -- other files


def test_files_without_blob_names_are_kept(store: ImageLayout, tmp_path: Path) -> None:
    put(store, b"stray")
    directory = store.root / "blobs" / "sha256"
    secret = tmp_path / "secret"
    secret.write_text("mine")
    (directory / ("ab" * 32)).symlink_to(secret)
    (directory / ("cd" * 32)).mkdir()
    (directory / ("cd" * 32) / "file").write_text("mine")
    (directory / ("AB" * 32)).write_text("shouted")
    (directory / ("ab" * 31)).write_text("short")
    (directory / "README").write_text("mine")
    (directory / os.fsdecode(b"\xff\xfe")).write_text("not text")
    (directory / "new\nline").write_text("two")
    (store.root / "blobs" / "blake3").mkdir()
    (store.root / "blobs" / "blake3" / ("ef" * 32)).write_text("of tomorrow")
    os.mkfifo(directory / ("ef" * 32))
    before = blobs(store)
    assert collected(store).blobs == 1
    assert before - blobs(store) == {blob(b"stray").digest.encoded}
    assert secret.read_text() == "mine"
    assert (directory / ("cd" * 32) / "file").exists()


def test_other_files_among_ingests_are_kept(
    store: ImageLayout, ingests: Any, tmp_path: Path
) -> None:
    stray = put(store, b"stray")
    secret = tmp_path / "secret"
    secret.write_text("mine")
    os.utime(secret, (0, 0))
    (ingests / ("ab" * 32)).symlink_to(secret)
    (ingests / ("cd" * 32)).mkdir()
    os.mkfifo(ingests / ("ef" * 32))
    done = collected(store, later=30 * DAY)
    assert (done.blobs, done.partials) == (1, 0)
    assert stray.digest.encoded not in blobs(store)
    assert secret.read_text() == "mine"
    assert len(list(ingests.iterdir())) == 3


def test_a_name_shared_with_an_entry_without_a_digest_is_removed(
    store: ImageLayout, aged: dict[str, Manifest]
) -> None:
    """Beside a readable entry that is removed."""
    path = store.root / "index.json"
    value = json.loads(path.read_bytes())
    value["manifests"].append({"annotations": {mediatype.REF_NAME: "c:v1"}})
    path.write_text(json.dumps(value))
    done = collected(store, max_age=2.5 * DAY)
    assert [one.name for one in done.forgotten] == ["c:v1"]


def test_an_eviction_with_grace_removes_names_with_the_bytes_that_it_frees(
    store: ImageLayout,
) -> None:
    """Of names in the order of their use: old, young, old. The second is worth waiting for."""
    made = [put_artifact(store, f"m{n}", bytes([n]) * 100_000) for n in range(3)]
    older = max(status.st_ctime for _, status in iter_blobs(store.root))
    for child in made[1].children:
        path = store.find_path(child)
        # The clock of the file system is coarse.
        while path.stat().st_ctime <= older:
            path.chmod(0o444)
    for hour, document in enumerate(made):
        used = store.root / ".aimage" / "used" / document.digest.encoded
        os.utime(used, (1e9 + hour, 1e9 + hour))
    collector = Collector(store, grace=10.0, keeps_unnamed=True, clock=lambda: older + 10.0)
    done = collector.run(max_size=150_000)
    assert [removal.name for removal in done.forgotten] == ["m0:latest"]
    assert names(store) == {"m1:latest", "m2:latest"}
    assert done.size >= 100_000
    assert 100_000 <= done.young_size < 200_000
