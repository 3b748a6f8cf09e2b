"""The layout on disk: the files of the specification, and content of other tools."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import bytes_body
from clowder_aimage.errors import NotFoundError, StoreError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.index import edit_index, read_index
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from tests.content.artifact import BLOB, blob, broken_body, manifest, put, put_artifact

DATA = b"0123456789"


@pytest.fixture
def layout(tmp_path: Path) -> ImageLayout:
    return ImageLayout(tmp_path / "store")


def files(root: Path) -> set[Any]:
    """Return the files below ``root`` without our private ones."""
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and ".aimage" not in path.parts
    }


def left_over(root: Path) -> set[str]:
    """Return our private files, except locks and records of names and manifests."""
    known = {"names", "used", "listing"}
    files = [p for p in (root / ".aimage").rglob("*") if p.is_file()]
    return {p.name for p in files if p.parent.name not in known} - {"lock", "gc.lock"}


def index_of(layout: ImageLayout) -> Any:
    return json.loads((layout.root / "index.json").read_bytes())


def write_index(root: Path, value: Any) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / "index.json").write_text(json.dumps(value))


def test_reading_creates_no_files(layout: ImageLayout) -> None:
    assert list(layout.tags()) == []
    assert not layout.exists(blob(DATA))
    for attempt in (
        lambda: layout.resolve(Reference.parse("a")),
        lambda: layout.path(blob(DATA)),
        lambda: layout.open(blob(DATA)),
        lambda: layout.untag(Reference.parse("a")),
    ):
        with pytest.raises(NotFoundError):
            attempt()
    assert not layout.root.exists()


def test_a_push_writes_the_files_of_the_image_layout(layout: ImageLayout) -> None:
    made = put_artifact(layout, "registry.example.com/a:v1", b"one", b"two")
    blobs = {f"blobs/sha256/{d.digest.encoded}" for d in (made.descriptor, *made.children)}
    assert files(layout.root) == {"oci-layout", "index.json", *blobs}
    assert (layout.root / "oci-layout").read_bytes() == b'{"imageLayoutVersion":"1.0.0"}'
    assert index_of(layout) == {
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
    assert left_over(layout.root) == set()


def test_an_entry_has_the_artifact_type(layout: ImageLayout) -> None:
    put_artifact(layout, "a", artifactType="application/vnd.example")
    (entry,) = index_of(layout)["manifests"]
    assert entry["artifactType"] == "application/vnd.example"


def test_blobs_are_read_only_in_a_directory_per_algorithm(layout: ImageLayout) -> None:
    content = Descriptor(BLOB, Digest.of(DATA, "sha512"), len(DATA))
    layout.push(content, bytes_body(DATA))
    for found in (content, put(layout, DATA)):
        path = layout.root / "blobs" / found.digest.algorithm / found.digest.encoded
        assert layout.path(found) == path
        assert stat.S_IMODE(path.stat().st_mode) == 0o444
        assert path.read_bytes() == DATA


def test_a_truncated_blob_is_missing_and_is_replaced(layout: ImageLayout) -> None:
    content = put(layout, DATA)
    path = layout.path(content)
    path.chmod(0o644)
    path.write_bytes(DATA[:4])
    assert not layout.exists(content)
    layout.push(content, bytes_body(DATA))
    assert path.read_bytes() == DATA


def test_failed_push_leaves_nothing(layout: ImageLayout) -> None:
    made = put_artifact(layout, "a:v1", b"one")
    before = files(layout.root)
    for body in (
        bytes_body(b"012345678x"),
        bytes_body(b"0123"),
        bytes_body(DATA * 99),
        broken_body(DATA[:3], OSError("gone")),
    ):
        with pytest.raises((VerificationError, OSError)):
            layout.push(blob(DATA), body)
        assert files(layout.root) == before
        assert left_over(layout.root) == set()
    assert layout.resolve(Reference.parse("a:v1")).digest == made.digest


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"0123", "is incomplete: 4 of 10 bytes"),
        (b"012345678x", "got sha256:"),
        (b"0123456789x", "has 11 bytes, expected 10"),
    ],
)
def test_verification_error_has_the_difference(layout: ImageLayout, body: bytes, said: str) -> None:
    with pytest.raises(VerificationError, match=said):
        layout.push(blob(DATA), bytes_body(body))


# -- index.json shared with other tools


FOREIGN = {
    "mediaType": "application/vnd.example.unheard-of.v9+json",
    "digest": str(Digest.of(b"foreign")),
    "size": 7,
    "platform": {"architecture": "s390x", "os": "linux"},
    "x-field": [1.5, None],
}
UNREADABLE = [{"digest": "sha256:../../x"}, "what", None, 7, {"mediaType": BLOB}]


def test_foreign_entries_and_fields_are_kept(layout: ImageLayout) -> None:
    write_index(
        layout.root,
        {
            "x-top": {"b": 1, "a": [2]},
            "manifests": [FOREIGN, *UNREADABLE],
            "schemaVersion": 2,
            "annotations": {"k": "v"},
        },
    )
    one = put_artifact(layout, "a:v1", b"one")
    two = put_artifact(layout, "b:v1", b"two")
    layout.tag(two.descriptor, Reference.parse("a:v1"))
    layout.untag(Reference.parse("b:v1"))
    value = index_of(layout)
    assert list(value) == ["x-top", "manifests", "schemaVersion", "annotations"]
    assert value["x-top"] == {"b": 1, "a": [2]}
    assert value["manifests"][: 1 + len(UNREADABLE)] == [FOREIGN, *UNREADABLE]
    (ours,) = value["manifests"][1 + len(UNREADABLE) :]
    assert ours["digest"] == str(two.digest)
    assert str(one.digest) not in json.dumps(value)
    assert [name for name, _ in layout.tags()] == ["a:v1"]


def test_retagging_keeps_foreign_fields_of_the_entry(layout: ImageLayout) -> None:
    made = put_artifact(layout, "a:v1", b"one")
    value = index_of(layout)
    value["manifests"][0]["platform"] = {"os": "linux"}
    value["manifests"][0]["annotations"]["x"] = "y"
    write_index(layout.root, value)
    layout.tag(made.descriptor, Reference.parse("a:v1"))
    assert index_of(layout) == value
    other = put_artifact(layout, "a:v1", b"two")  # another manifest: the former fields do not apply
    (entry,) = index_of(layout)["manifests"]
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
    layout: ImageLayout, annotations: dict[str, str], name: str
) -> None:
    entry = {**FOREIGN, "annotations": annotations}
    write_index(layout.root, {"schemaVersion": 2, "manifests": [entry]})
    assert [found for found, _ in layout.tags()] == [name]
    assert str(layout.resolve(Reference.parse(name)).digest) == FOREIGN["digest"]


def test_a_foreign_name_without_a_tag_is_latest_and_is_replaced(layout: ImageLayout) -> None:
    entry = {**FOREIGN, "annotations": {mediatype.REF_NAME: "a"}}
    write_index(layout.root, {"schemaVersion": 2, "manifests": [entry]})
    assert layout.resolve(Reference.parse("a:latest")).size == 7
    made = put_artifact(layout, "a", b"one")
    assert [(n, d.digest) for n, d in layout.tags()] == [("a:latest", made.digest)]


def test_resolve_by_digest_accepts_any_entry(layout: ImageLayout) -> None:
    made = put_artifact(layout, "a:v1", b"one")
    for text in (f"a@{made.digest}", f"b@{made.digest}", f"a:v9@{made.digest}"):
        assert layout.resolve(Reference.parse(text)).digest == made.digest


def test_a_name_with_a_digest_can_be_resolved_and_removed(layout: ImageLayout) -> None:
    config = put(layout, b"{}")
    made = manifest(config, [])
    reference = Reference.parse(f"r.io/a@{made.digest}")
    layout.push(made.descriptor, bytes_body(made.raw), reference)
    assert [name for name, _ in layout.tags()] == [str(reference)]
    layout.untag(reference)
    assert list(layout.tags()) == []
    with pytest.raises(NotFoundError):
        layout.resolve(reference)


def test_untagging_keeps_the_blobs_and_other_names(layout: ImageLayout) -> None:
    made = put_artifact(layout, "a:v1", b"one")
    layout.tag(made.descriptor, Reference.parse("b:v1"))
    before = files(layout.root)
    layout.untag(Reference.parse("a:v1"))
    assert [name for name, _ in layout.tags()] == ["b:v1"]
    assert files(layout.root) == before
    with pytest.raises(NotFoundError, match="a:v1 not found"):
        layout.untag(Reference.parse("a:v1"))


def test_an_index_with_null_manifests_is_read(layout: ImageLayout) -> None:
    write_index(layout.root, {"schemaVersion": 2, "manifests": None})
    assert list(layout.tags()) == []
    put_artifact(layout, "a")
    assert [name for name, _ in layout.tags()] == ["a:latest"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b'{"manifests":{}}'],
    ids=lambda raw: repr(raw[:12]),
)
def test_a_broken_index_is_reported_and_not_overwritten(layout: ImageLayout, raw: bytes) -> None:
    made = put_artifact(layout, "a", b"one")
    (layout.root / "index.json").write_bytes(raw)
    with pytest.raises(StoreError, match=r"index\.json is not an OCI index"):
        list(layout.tags())
    with pytest.raises(StoreError, match=r"index\.json is not an OCI index"):
        layout.tag(made.descriptor, Reference.parse("b"))
    assert (layout.root / "index.json").read_bytes() == raw


def test_an_edit_that_fails_changes_nothing(layout: ImageLayout) -> None:
    put_artifact(layout, "a")
    before = (layout.root / "index.json").read_bytes()
    with pytest.raises(ZeroDivisionError), edit_index(layout.root) as index:
        index["manifests"].clear()
        _ = 1 / 0
    assert (layout.root / "index.json").read_bytes() == before
    assert left_over(layout.root) == set()


def test_an_edit_without_a_change_does_not_write(layout: ImageLayout) -> None:
    put_artifact(layout, "a")
    before = (layout.root / "index.json").stat().st_ino
    with edit_index(layout.root):
        pass
    assert (layout.root / "index.json").stat().st_ino == before
    assert read_index(layout.root)["schemaVersion"] == 2


# -- unexpected files in the store


def test_a_store_that_is_a_file_fails(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_text("mine")
    for root in (path, path / "below"):
        layout = ImageLayout(root)
        for attempt in (
            lambda layout=layout: list(layout.tags()),
            lambda layout=layout: layout.exists(blob(DATA)),
            lambda layout=layout: layout.push(blob(DATA), bytes_body(DATA)),
        ):
            with pytest.raises(StoreError, match="is not a directory") as caught:
                attempt()
            assert caught.value.exit_code == 1
            assert caught.value.remedy == "store_directory"
    assert path.read_text() == "mine"


def test_a_symlinked_lock_is_refused(layout: ImageLayout, tmp_path: Path) -> None:
    """CVE-2025-68146: a file that replaces the lock must not be opened, locked or truncated."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    made = put_artifact(layout, "a")
    lock = layout.root / ".aimage" / "lock"
    for target in (victim, tmp_path / "absent"):
        lock.unlink()
        lock.symlink_to(target)
        with pytest.raises(StoreError):
            layout.tag(made.descriptor, Reference.parse("b"))
    assert victim.read_text() == "mine"
    assert not (tmp_path / "absent").exists()


def test_a_directory_in_place_of_a_blob_fails(layout: ImageLayout) -> None:
    content = blob(DATA)
    (layout.root / "blobs" / "sha256" / content.digest.encoded).mkdir(parents=True)
    with pytest.raises(NotFoundError):
        layout.open(content)
    with pytest.raises(StoreError):
        layout.push(content, bytes_body(DATA))
    assert left_over(layout.root) == set()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_store_fails(layout: ImageLayout) -> None:
    put_artifact(layout, "a")
    layout.root.joinpath("blobs", "sha256").chmod(0o555)
    with pytest.raises(StoreError, match="Permission denied"):
        put(layout, b"new")


def test_a_read_only_store_is_readable(
    layout: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = put_artifact(layout, "a", b"one")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("mkdir", "replace", "unlink", "fsync", "pwrite"):
        monkeypatch.setattr(os, name, refuse)
    assert layout.resolve(Reference.parse("a")).digest == made.digest
    with layout.open(made.layers[0]) as file:
        assert file.read() == b"one"
    with pytest.raises(StoreError, match="Read-only file system"):
        put(layout, b"new")
