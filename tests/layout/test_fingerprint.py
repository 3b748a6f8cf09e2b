"""The fingerprint of a store changes when a name or a blob is added or removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout, fingerprint
from clowder_aimage.layout.fingerprint import compute_fingerprint
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.layout.metadata import MetadataFiles
from clowder_aimage.oci import Descriptor, Reference
from tests.content.artifact import put, put_artifact
from tests.store import pass_tick

NAME = "example.org/team/model:v1"


@pytest.fixture
def store_with_model(tmp_path: Path) -> ImageLayout:
    store = ImageLayout(tmp_path / "store")
    put_artifact(store, NAME, b"one", b"two")
    return store


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Age all earlier changes."""
    monkeypatch.setattr(fingerprint, "_SETTLED", -(10**11))


def blob(store: ImageLayout) -> Path:
    return next(path for path in store.root.glob("blobs/sha256/*") if path.read_bytes() == b"two")


def blob_of(store: ImageLayout, content: Descriptor) -> Path:
    return store.root / "blobs" / "sha256" / content.digest.encoded


def adds_a_blob(store: Any) -> None:
    put(store, b"three")


def removes_a_blob(store: ImageLayout) -> None:
    blob(store).unlink()


def replaces_a_blob(store: Any) -> None:
    (store.root / "new").write_bytes(b"owt")
    (store.root / "new").replace(blob(store))


def loses_all_blobs(store: Any) -> None:
    shutil.rmtree(store.root / "blobs")


def adds_a_name(store: Any) -> None:
    store.tag(store.resolve(Reference.parse(NAME)), Reference.parse("other"))


def notes_a_name(store: Any) -> None:
    """Return the first half of a tag operation, as left by a killed process."""
    MetadataFiles(store.root, "names").put("x", {"entry": {}}, durable=False)


def writes_the_index_anew(store: Any) -> None:
    """Rewrite the same bytes with the same time, as a restored backup does."""
    path = store.root / "index.json"
    status = path.stat()
    (store.root / "new").write_bytes(path.read_bytes())
    os.utime(store.root / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    (store.root / "new").replace(path)


def changes_a_permission(store: Any) -> None:
    (store.root / "blobs" / "sha256").chmod(0o500)


CHANGES = [
    adds_a_blob,
    removes_a_blob,
    replaces_a_blob,
    loses_all_blobs,
    adds_a_name,
    notes_a_name,
    writes_the_index_anew,
    changes_a_permission,
]


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_changes_with_names_and_blobs(
    store_with_model: ImageLayout, later: None, change: Callable[[Any], None]
) -> None:
    before = compute_fingerprint(store_with_model.roots)
    assert before is not None and compute_fingerprint(store_with_model.roots) == before
    pass_tick(store_with_model.root.parent)
    change(store_with_model)
    assert compute_fingerprint(store_with_model.roots) != before


def test_fingerprint_is_unchanged_by_reads(store_with_model: ImageLayout, later: None) -> None:
    before = compute_fingerprint(store_with_model.roots)
    found = store_with_model.resolve(Reference.parse(NAME))
    store_with_model.read(found)
    store_with_model.use(found)
    store_with_model.lease(found.digest).close()
    store_with_model.ingest("begun").abort()
    assert compute_fingerprint(store_with_model.roots) == before


def test_fingerprint_is_none_while_commits_are_pending(
    store_with_model: ImageLayout, later: None
) -> None:
    with store_with_model.begin_batch():
        assert store_with_model.compute_fingerprint() == compute_fingerprint(store_with_model.roots)
        waiting = put(store_with_model, b"three")
        assert store_with_model.exists(waiting) and not blob_of(store_with_model, waiting).exists()
        assert store_with_model.compute_fingerprint() is None
    assert blob_of(store_with_model, waiting).exists()
    assert (
        store_with_model.compute_fingerprint()
        == compute_fingerprint(store_with_model.roots)
        is not None
    )


def test_fingerprint_is_none_right_after_a_change(store_with_model: ImageLayout) -> None:
    assert compute_fingerprint(store_with_model.roots) is None


def test_fingerprint_of_a_missing_store(tmp_path: Path, later: None) -> None:
    assert (
        compute_fingerprint([tmp_path / "none"])
        == compute_fingerprint([tmp_path / "none"])
        is not None
    )
    before = compute_fingerprint([tmp_path / "none"])
    put_artifact(ImageLayout(tmp_path / "none"), NAME, b"one")
    assert compute_fingerprint([tmp_path / "none"]) != before


def test_fingerprint_covers_all_stores(
    store_with_model: ImageLayout, tmp_path: Path, later: None
) -> None:
    both = LayeredStore([tmp_path / "first", store_with_model.root])
    before = compute_fingerprint(both.roots)
    pass_tick(tmp_path)
    removes_a_blob(store_with_model)
    assert compute_fingerprint(both.roots) != before
