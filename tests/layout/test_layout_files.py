"""The layout on disk: the files of the specification, and content of other tools."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.errors import NotFoundError, StoreError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.index import edit_index
from clowder_aimage.layout.index_file import read_index
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from tests.content.artifact import BLOB, blob, broken_body, manifest, put, put_artifact

DATA = b"0123456789"


def files(root: Path) -> set[Any]:
    """Return the files below ``root`` without our private ones."""
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and ".aimage" not in path.parts
    }


def left_over(root: Path) -> set[str]:
    """Return our private files, except locks, stamps and records of names and manifests."""
    known = {"names", "used", "listing"}
    files = [p for p in (root / ".aimage").rglob("*") if p.is_file()]
    return {p.name for p in files if p.parent.name not in known} - {"lock", "gc.lock", "index"}


def index_of(store: ImageLayout) -> Any:
    return json.loads((store.root / "index.json").read_bytes())


def write_index(root: Path, value: Any) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / "index.json").write_text(json.dumps(value))


def test_reading_creates_no_files(store: ImageLayout) -> None:
    assert list(store.list_tags()) == []
    assert not store.exists(blob(DATA))
    for attempt in (
        lambda: store.resolve(Reference.parse("a")),
        lambda: store.find_path(blob(DATA)),
        lambda: store.open(blob(DATA)),
        lambda: store.untag(Reference.parse("a")),
    ):
        with pytest.raises(NotFoundError):
            attempt()
    assert not store.root.exists()


def test_a_push_writes_the_files_of_the_image_layout(store: ImageLayout) -> None:
    made = put_artifact(store, "registry.example.com/a:v1", b"one", b"two")
    blobs = {f"blobs/sha256/{d.digest.encoded}" for d in (made.descriptor, *made.children)}
    assert files(store.root) == {"oci-layout", "index.json", *blobs}
    assert (store.root / "oci-layout").read_bytes() == b'{"imageLayoutVersion":"1.0.0"}'
    assert index_of(store) == {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [
            {
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": str(made.digest),
                "size": len(made.raw),
                "annotations": {
                    "io.containerd.image.name": "registry.example.com/a:v1",
                    "org.opencontainers.image.ref.name": "registry.example.com/a:v1",
                },
            }
        ],
    }
    assert left_over(store.root) == set()


def test_an_entry_has_the_artifact_type(store: ImageLayout) -> None:
    put_artifact(store, "a", artifactType="application/vnd.example")
    (entry,) = index_of(store)["manifests"]
    assert entry["artifactType"] == "application/vnd.example"


def test_blobs_are_read_only_in_a_directory_per_algorithm(store: ImageLayout) -> None:
    content = Descriptor(BLOB, Digest.of(DATA, "sha512"), len(DATA))
    store.push(content, build_bytes_body(DATA))
    for found in (content, put(store, DATA)):
        path = store.root / "blobs" / found.digest.algorithm / found.digest.encoded
        assert store.find_path(found) == path
        assert stat.S_IMODE(path.stat().st_mode) == 0o444
        assert path.read_bytes() == DATA


def test_a_truncated_blob_is_missing_and_is_replaced(store: ImageLayout) -> None:
    content = put(store, DATA)
    path = store.find_path(content)
    path.chmod(0o644)
    path.write_bytes(DATA[:4])
    assert not store.exists(content)
    store.push(content, build_bytes_body(DATA))
    assert path.read_bytes() == DATA


def test_failed_push_leaves_nothing(store: ImageLayout) -> None:
    made = put_artifact(store, "a:v1", b"one")
    before = files(store.root)
    for body in (
        build_bytes_body(b"012345678x"),
        build_bytes_body(b"0123"),
        build_bytes_body(DATA * 99),
        broken_body(DATA[:3], OSError("gone")),
    ):
        with pytest.raises((VerificationError, OSError)):
            store.push(blob(DATA), body)
        assert files(store.root) == before
        assert left_over(store.root) == set()
    assert store.resolve(Reference.parse("a:v1")).digest == made.digest


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"0123", "is incomplete: 4 of 10 bytes"),
        (b"012345678x", "got sha256:"),
        (b"0123456789x", "has 11 bytes, expected 10"),
    ],
)
def test_verification_error_has_the_difference(store: ImageLayout, body: bytes, said: str) -> None:
    with pytest.raises(VerificationError, match=said):
        store.push(blob(DATA), build_bytes_body(body))


# -- index.json shared with other tools


FOREIGN = {
    "mediaType": "application/vnd.example.unheard-of.v9+json",
    "digest": str(Digest.of(b"foreign")),
    "size": 7,
    "platform": {"architecture": "s390x", "os": "linux"},
    "x-field": [1.5, None],
}
UNREADABLE = [{"digest": "sha256:../../x"}, "what", None, 7, {"mediaType": BLOB}]


def test_foreign_entries_and_fields_are_kept(store: ImageLayout) -> None:
    write_index(
        store.root,
        {
            "x-top": {"b": 1, "a": [2]},
            "manifests": [FOREIGN, *UNREADABLE],
            "schemaVersion": 2,
            "annotations": {"k": "v"},
        },
    )
    one = put_artifact(store, "a:v1", b"one")
    two = put_artifact(store, "b:v1", b"two")
    store.tag(two.descriptor, Reference.parse("a:v1"))
    store.untag(Reference.parse("b:v1"))
    value = index_of(store)
    assert list(value) == ["x-top", "manifests", "schemaVersion", "annotations"]
    assert value["x-top"] == {"b": 1, "a": [2]}
    assert value["manifests"][: 1 + len(UNREADABLE)] == [FOREIGN, *UNREADABLE]
    (ours,) = value["manifests"][1 + len(UNREADABLE) :]
    assert ours["digest"] == str(two.digest)
    assert str(one.digest) not in json.dumps(value)
    assert [name for name, _ in store.list_tags()] == ["a:v1"]


def test_retagging_keeps_foreign_fields_of_the_entry(store: ImageLayout) -> None:
    made = put_artifact(store, "a:v1", b"one")
    value = index_of(store)
    value["manifests"][0]["platform"] = {"os": "linux"}
    value["manifests"][0]["annotations"]["x"] = "y"
    write_index(store.root, value)
    store.tag(made.descriptor, Reference.parse("a:v1"))
    assert index_of(store) == value
    other = put_artifact(store, "a:v1", b"two")  # another manifest: the former fields do not apply
    (entry,) = index_of(store)["manifests"]
    assert entry["digest"] == str(other.digest)
    assert "platform" not in entry
    assert "x" not in entry["annotations"]


@pytest.mark.parametrize(
    ("annotations", "name"),
    [
        ({"org.opencontainers.image.ref.name": "a:v1"}, "a:v1"),
        # as containerd exports: the ref name is only the tag
        ({mediatype.CONTAINERD_NAME: "r.io/a:v1", mediatype.REF_NAME: "v1"}, "r.io/a:v1"),
        ({mediatype.CONTAINERD_NAME_MISSPELT: "r.io/a:v1", mediatype.REF_NAME: "v1"}, "r.io/a:v1"),
        ({mediatype.REF_NAME: "a"}, "a"),
    ],
)
def test_foreign_names_are_resolved(
    store: ImageLayout, annotations: dict[str, str], name: str
) -> None:
    entry = {**FOREIGN, "annotations": annotations}
    write_index(store.root, {"schemaVersion": 2, "manifests": [entry]})
    assert [found for found, _ in store.list_tags()] == [name]
    assert str(store.resolve(Reference.parse(name)).digest) == FOREIGN["digest"]


def test_a_foreign_name_without_a_tag_is_latest_and_is_replaced(store: ImageLayout) -> None:
    entry = {**FOREIGN, "annotations": {mediatype.REF_NAME: "a"}}
    write_index(store.root, {"schemaVersion": 2, "manifests": [entry]})
    assert store.resolve(Reference.parse("a:latest")).size == 7
    made = put_artifact(store, "a", b"one")
    assert [(n, d.digest) for n, d in store.list_tags()] == [("a:latest", made.digest)]


def test_resolve_by_digest_accepts_any_entry(store: ImageLayout) -> None:
    made = put_artifact(store, "a:v1", b"one")
    for text in (f"a@{made.digest}", f"b@{made.digest}", f"a:v9@{made.digest}"):
        assert store.resolve(Reference.parse(text)).digest == made.digest


def test_a_name_with_a_digest_can_be_resolved_and_removed(store: ImageLayout) -> None:
    config = put(store, b"{}")
    made = manifest(config, [])
    reference = Reference.parse(f"r.io/a@{made.digest}")
    store.push(made.descriptor, build_bytes_body(made.raw), reference)
    assert [name for name, _ in store.list_tags()] == [str(reference)]
    store.untag(reference)
    assert list(store.list_tags()) == []
    with pytest.raises(NotFoundError):
        store.resolve(reference)


def test_untagging_keeps_the_blobs_and_other_names(store: ImageLayout) -> None:
    made = put_artifact(store, "a:v1", b"one")
    store.tag(made.descriptor, Reference.parse("b:v1"))
    before = files(store.root)
    store.untag(Reference.parse("a:v1"))
    assert [name for name, _ in store.list_tags()] == ["b:v1"]
    assert files(store.root) == before
    with pytest.raises(NotFoundError, match="a:v1 not found"):
        store.untag(Reference.parse("a:v1"))


def test_an_index_with_null_manifests_is_read(store: ImageLayout) -> None:
    write_index(store.root, {"schemaVersion": 2, "manifests": None})
    assert list(store.list_tags()) == []
    put_artifact(store, "a")
    assert [name for name, _ in store.list_tags()] == ["a:latest"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b'{"manifests":{}}'],
    ids=lambda raw: repr(raw[:12]),
)
def test_a_broken_index_is_reported_and_not_overwritten(store: ImageLayout, raw: bytes) -> None:
    made = put_artifact(store, "a", b"one")
    (store.root / "index.json").write_bytes(raw)
    with pytest.raises(StoreError, match=r"index\.json is not an OCI index"):
        list(store.list_tags())
    with pytest.raises(StoreError, match=r"index\.json is not an OCI index"):
        store.tag(made.descriptor, Reference.parse("b"))
    assert (store.root / "index.json").read_bytes() == raw


def test_an_edit_that_fails_changes_nothing(store: ImageLayout) -> None:
    put_artifact(store, "a")
    before = (store.root / "index.json").read_bytes()
    with pytest.raises(ZeroDivisionError), edit_index(store.root) as index:
        index["manifests"].clear()
        _ = 1 / 0
    assert (store.root / "index.json").read_bytes() == before
    assert left_over(store.root) == set()


def test_an_edit_without_a_change_does_not_write(store: ImageLayout) -> None:
    put_artifact(store, "a")
    before = (store.root / "index.json").stat().st_ino
    with edit_index(store.root):
        pass
    assert (store.root / "index.json").stat().st_ino == before
    assert read_index(store.root)["schemaVersion"] == 2


# -- unexpected files in the store


def test_a_store_that_is_a_file_fails(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_text("mine")
    for root in (path, path / "below"):
        store = ImageLayout(root)
        for attempt in (
            lambda store=store: list(store.list_tags()),
            lambda store=store: store.exists(blob(DATA)),
            lambda store=store: store.push(blob(DATA), build_bytes_body(DATA)),
        ):
            with pytest.raises(StoreError, match="is not a directory") as caught:
                attempt()
            assert caught.value.exit_code == 1
            assert caught.value.remedy == "store_directory"
    assert path.read_text() == "mine"


def test_a_symlinked_lock_is_refused(store: ImageLayout, tmp_path: Path) -> None:
    """CVE-2025-68146: a file that replaces the lock must not be opened, locked or truncated."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    made = put_artifact(store, "a")
    lock = store.root / ".aimage" / "lock"
    for target in (victim, tmp_path / "absent"):
        lock.unlink()
        lock.symlink_to(target)
        with pytest.raises(StoreError):
            store.tag(made.descriptor, Reference.parse("b"))
    assert victim.read_text() == "mine"
    assert not (tmp_path / "absent").exists()


def test_a_directory_in_place_of_a_blob_fails(store: ImageLayout) -> None:
    content = blob(DATA)
    (store.root / "blobs" / "sha256" / content.digest.encoded).mkdir(parents=True)
    with pytest.raises(NotFoundError):
        store.open(content)
    with pytest.raises(StoreError):
        store.push(content, build_bytes_body(DATA))
    assert left_over(store.root) == set()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_store_fails(store: ImageLayout) -> None:
    put_artifact(store, "a")
    store.root.joinpath("blobs", "sha256").chmod(0o555)
    with pytest.raises(StoreError, match="Permission denied"):
        put(store, b"new")


def test_a_read_only_store_is_readable(store: ImageLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    made = put_artifact(store, "a", b"one")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("mkdir", "replace", "unlink", "fsync", "pwrite"):
        monkeypatch.setattr(os, name, refuse)
    assert store.resolve(Reference.parse("a")).digest == made.digest
    with store.open(made.layers[0]) as file:
        assert file.read() == b"one"
    with pytest.raises(StoreError, match="Read-only file system"):
        put(store, b"new")
