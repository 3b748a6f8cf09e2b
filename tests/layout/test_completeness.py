"""Completeness of AImages in a store, and its cache."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.errors import StoreError
from clowder_aimage.layout import ImageLayout, fingerprint
from clowder_aimage.layout.completeness import (
    MAX_AGE,
    Completeness,
    CompletenessCache,
    check_blobs,
    check_completeness,
)
from clowder_aimage.layout.snapshot import StoreSnapshot, find_descriptor
from clowder_aimage.oci import Descriptor, Reference
from tests.content.artifact import index, put, put_artifact
from tests.store import pass_tick

if TYPE_CHECKING:
    from clowder_aimage.oci import Manifest


@pytest.fixture
def settled_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageLayout:
    """Return a store without recent changes."""
    monkeypatch.setattr(fingerprint, "_SETTLED", -(10**11))
    return ImageLayout(tmp_path / "store")


@pytest.fixture
def made(settled_store: ImageLayout) -> Manifest:
    return put_artifact(settled_store, "one", b"one", b"two")


def test_completeness_counts_each_missing_blob_once(
    settled_store: ImageLayout, made: Manifest
) -> None:
    found = check_completeness(settled_store, made.descriptor)
    assert found.is_complete and found.total == sum(blob.size for blob in made.children)
    settled_store.find_path(made.layers[0]).unlink()
    found = check_completeness(settled_store, made.descriptor)
    assert not found.is_complete and found.missing == (made.layers[0],)
    assert found.missing_size == made.layers[0].size


def test_completeness_of_an_index_includes_its_manifests(
    settled_store: ImageLayout, made: Manifest
) -> None:
    document = index([made.descriptor])
    settled_store.push(document.descriptor, build_bytes_body(document.raw))
    assert check_completeness(settled_store, document.descriptor).is_complete
    settled_store.find_path(made.descriptor).unlink()
    assert check_completeness(settled_store, document.descriptor).missing == (made.descriptor,)
    settled_store.find_path(document.descriptor).unlink()
    found = check_completeness(settled_store, document.descriptor)
    assert found.missing == (document.descriptor,)


class CountingCheck:
    def __init__(self, store: ImageLayout, root: Descriptor) -> None:
        self.store, self.root, self.calls = store, root, 0
        self.error: Exception | None = None
        self.result: Completeness | None = None

    def __call__(self, _: StoreSnapshot | None = None) -> Completeness:
        self.calls += 1
        if self.error:
            raise self.error
        return self.result or check_completeness(self.store, self.root)


@pytest.fixture
def check(settled_store: ImageLayout, made: Manifest) -> CountingCheck:
    return CountingCheck(settled_store, made.descriptor)


def test_cache_remembers_complete_aimages_until_the_store_changes(
    settled_store: ImageLayout, check: CountingCheck
) -> None:
    cache = CompletenessCache(settled_store)
    assert cache.find("one", check).is_complete and cache.find("one", check).is_complete
    assert check.calls == 1
    pass_tick(settled_store.root.parent)
    put(settled_store, b"other")
    cache.find("one", check)
    assert check.calls == 2


def test_checks_share_what_they_found_in_an_unchanged_store(
    settled_store: ImageLayout, made: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looked, exists = [0.0], list[Descriptor](), settled_store.exists
    needs = made.descriptor, made.children
    cache = CompletenessCache(settled_store, clock=lambda: now[0])

    def record(content: Descriptor) -> bool:
        looked.append(content)
        return exists(content)

    monkeypatch.setattr(settled_store, "exists", record)

    def find(key: str) -> Completeness:
        return cache.find(key, lambda snapshot: check_blobs(settled_store, *needs, snapshot.exists))

    assert find("one").is_complete and find("two").is_complete
    assert len(looked) == len(made.children)
    now[0] = 31.0
    assert find("three").is_complete
    assert len(looked) == 2 * len(made.children)
    pass_tick(settled_store.root.parent)
    settled_store.find_path(made.layers[0]).unlink()
    assert find("four").missing == (made.layers[0],)


def test_names_of_a_snapshot_are_those_of_the_store(
    settled_store: ImageLayout, made: Manifest
) -> None:
    settled_store.tag(made.descriptor, Reference.parse("a"))
    settled_store.tag(made.descriptor, Reference.parse("b:v1"))
    other = f"sha256:{'0' * 64}"
    names = ("a", "a:latest", "b:v1", "b", "c", f"a@{made.digest}", f"b:v1@{made.digest}")
    for text in (*names, f"a:latest@{made.digest}", f"b:v1@{other}"):
        reference = Reference.parse(text)
        expected = find_descriptor(settled_store, reference)
        assert StoreSnapshot(settled_store, is_settled=True).find(reference) == expected
        assert StoreSnapshot(settled_store).find(reference) == expected


def test_a_fingerprint_is_read_once_in_an_interval_for_cached_results(
    settled_store: ImageLayout, check: CountingCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, reads, compute = [0.0], list[float](), settled_store.compute_fingerprint
    cache = CompletenessCache(settled_store, clock=lambda: now[0], interval=0.25)

    def record() -> Hashable:
        reads.append(now[0])
        return compute()

    monkeypatch.setattr(settled_store, "compute_fingerprint", record)
    for now[0] in (0.0, 0.1, 0.2, 0.3, 0.4):
        assert cache.find("one", check).is_complete
    assert reads == [0.0, 0.0, 0.3] and check.calls == 1
    assert cache.find("one", check, "v2").is_complete
    assert reads == [0.0, 0.0, 0.3, 0.4, 0.4] and check.calls == 2


def test_cache_rechecks_incomplete_and_failed_aimages(
    settled_store: ImageLayout, made: Manifest, check: CountingCheck
) -> None:
    cache = CompletenessCache(settled_store)
    check.error = StoreError("too many open files")
    with pytest.raises(StoreError):
        cache.find("one", check)
    check.error = None
    assert cache.find("one", check).is_complete and check.calls == 2
    for missing in (Completeness(made.descriptor, 1, (made.layers[0],)), Completeness()):
        check.result = missing
        assert cache.find("two", check) is missing
    check.result = None
    assert cache.find("two", check).is_complete and check.calls == 5


def test_cache_checks_again_after_its_age_or_for_another_version(
    settled_store: ImageLayout, check: CountingCheck
) -> None:
    now = [0.0]
    cache = CompletenessCache(settled_store, clock=lambda: now[0], chance=lambda: 0.5)
    cache.find("one", check, "v1")
    now[0] = 0.75 * MAX_AGE - 1
    cache.find("one", check, "v1")
    assert check.calls == 1
    now[0] += 2
    cache.find("one", check, "v1")
    assert check.calls == 2
    cache.find("one", check, "v2")
    assert check.calls == 3


def test_cache_drops_an_answer_outdated_by_a_change(
    settled_store: ImageLayout, made: Manifest, check: CountingCheck
) -> None:
    cache = CompletenessCache(settled_store)

    def overtaken(_: StoreSnapshot) -> Completeness:
        found = check()
        settled_store.find_path(made.layers[0]).unlink()
        return found

    assert cache.find("one", overtaken).is_complete
    assert not cache.find("one", check).is_complete
