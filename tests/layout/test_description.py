"""Descriptions of manifests: files, the pack of many, and what collections leave of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout import summary as summary_module
from clowder_aimage.layout.description import (
    LISTING,
    DescriptionFiles,
    keep_description,
    read_description,
)
from clowder_aimage.layout.gc import GRACE, Collector
from clowder_aimage.layout.summary import SummaryReader
from clowder_aimage.oci import Digest, Reference
from tests.content.artifact import put_artifact

DIGESTS = [Digest.of(b"%d" % number) for number in range(40)]


def read_all(root: Path) -> list[Any]:
    with DescriptionFiles(root, LISTING) as files:
        return [files.read(digest) for digest in DIGESTS]


def write(root: Path, count: int, value: str = "x") -> None:
    with DescriptionFiles(root, LISTING) as files:
        for digest in DIGESTS[:count]:
            files.add(digest, {"value": value, "of": digest.short})


def list_files(root: Path) -> list[str]:
    directory = root / ".aimage" / LISTING
    return sorted(path.name for path in directory.glob("*"))


def expect(count: int, value: str = "x") -> list[Any]:
    made = [{"value": value, "of": digest.short} for digest in DIGESTS[:count]]
    return made + [None] * (len(DIGESTS) - count)


def test_few_are_files_and_many_one_file(store: ImageLayout) -> None:
    write(store.root, 3)
    assert list_files(store.root) == sorted(digest.encoded for digest in DIGESTS[:3])
    assert read_all(store.root) == expect(3)
    write(store.root, 40)
    assert list_files(store.root) == sorted(["pack", *(d.encoded for d in DIGESTS[:3])])
    assert read_all(store.root) == expect(40)


def test_many_that_are_read_as_files_become_one(store: ImageLayout) -> None:
    for digest in DIGESTS:
        assert keep_description(store.root, LISTING, digest, {"value": 1})
    assert "pack" not in list_files(store.root)
    assert read_all(store.root) == [{"value": 1}] * 40
    for digest in DIGESTS:
        (store.root / ".aimage" / LISTING / digest.encoded).unlink()
    assert read_all(store.root) == [{"value": 1}] * 40
    assert read_description(store.root, LISTING, DIGESTS[7]) == {"value": 1}


def test_added_ones_are_found_before_they_are_written(store: ImageLayout) -> None:
    with DescriptionFiles(store.root, LISTING) as files:
        files.add(DIGESTS[0], {"value": 1})
        assert files.read(DIGESTS[0]) == {"value": 1}
        assert list_files(store.root) == []
    assert list_files(store.root) == [DIGESTS[0].encoded]


def test_packs_of_two_processes_have_the_descriptions_of_both(store: ImageLayout) -> None:
    with DescriptionFiles(store.root, LISTING) as first:
        first.read(DIGESTS[0])
        with DescriptionFiles(store.root, LISTING) as second:
            for digest in DIGESTS:
                second.add(digest, {"value": 2})
        for digest in (other := [Digest.of(b"other %d" % n) for n in range(40)]):
            first.add(digest, {"value": 1})
    assert read_all(store.root) == [{"value": 2}] * 40
    assert read_description(store.root, LISTING, other[5]) == {"value": 1}


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw.replace(b'"version"', b'"Version"', 1),
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw.replace(b'"value"', b'"value'),
        lambda raw: b"\n" * 100 + raw,
        lambda _: b"",
    ],
    ids="version torn malformed blank empty".split(),
)
def test_a_pack_that_is_not_ours_has_nothing_wrong(store: ImageLayout, damage: Any) -> None:
    write(store.root, 40)
    path = store.root / ".aimage" / LISTING / "pack"
    path.write_bytes(damage(path.read_bytes()))
    found, complete = read_all(store.root), expect(40)
    assert all(value in (None, expected) for value, expected in zip(found, complete, strict=True))
    assert None in found
    write(store.root, 40)
    assert read_all(store.root) == complete


def test_a_link_is_neither_read_nor_written(store: ImageLayout, tmp_path: Path) -> None:
    write(store.root, 40)
    path = store.root / ".aimage" / LISTING / "pack"
    target = tmp_path / "target"
    path.rename(target)
    before = target.read_bytes()
    path.symlink_to(target)
    assert read_all(store.root) == [None] * 40
    write(store.root, 40, "y")
    assert not path.is_symlink()
    assert target.read_bytes() == before
    assert read_all(store.root) == expect(40, "y")


def test_a_value_in_the_pack_that_is_no_summary_is_replaced(store: ImageLayout) -> None:
    made = put_artifact(store, "a:v1", b"one")
    with DescriptionFiles(store.root, LISTING) as files:
        for digest in [*DIGESTS, made.digest]:
            files.add(digest, {"size": "many"})
    for _ in range(2):
        with SummaryReader(store, store.root) as summaries:
            assert summaries.read(made.descriptor)["kind"] == "?"
    with DescriptionFiles(store.root, LISTING) as files:
        assert files.read(made.digest) == summary_module._UNKNOWN


def test_a_collection_keeps_those_of_stored_manifests(store: ImageLayout) -> None:
    made = [put_artifact(store, f"m{n}:v1", b"%d" % n) for n in range(40)]
    with SummaryReader(store, store.root) as summaries:
        for manifest in made:
            summaries.read(manifest.descriptor)
    for number in range(20):
        store.untag(Reference.parse(f"m{number}:v1"))
    Collector(store, grace=0).run()
    lines = (store.root / ".aimage" / LISTING / "pack").read_bytes().splitlines()[1:]
    kept = {line.partition(b" ")[0].decode() for line in lines}
    assert kept == {manifest.digest.encoded for manifest in made[20:]}
    assert json.loads(lines[0].partition(b" ")[2]) == summary_module._UNKNOWN
    Collector(store, grace=GRACE).run()
    assert len((store.root / ".aimage" / LISTING / "pack").read_bytes().splitlines()) == 21
