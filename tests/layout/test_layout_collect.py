"""Collection removes unneeded content and nothing else."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.digest_scan import iter_blobs
from clowder_aimage.layout.gc import Collector
from clowder_aimage.oci import Digest, Manifest, Reference, mediatype
from tests.content.artifact import CONFIG, blob, index, manifest, put, put_artifact
from tests.layout.collecting import (
    DAY,
    add_entry,
    all_of,
    blobs,
    collected,
    encoded,
    foreign,
    names,
    put_raw,
)


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
