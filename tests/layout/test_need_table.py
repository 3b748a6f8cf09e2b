"""The table of what manifests need: what is kept, and that a damaged one is no table."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

import pytest

from clowder_aimage.layout.need_table import NeedTable
from clowder_aimage.oci import Digest

MANIFESTS = [str(Digest.of(b"manifest %d" % number)) for number in range(40)]
SHARED = str(Digest.of(b"shared", "sha512"))


def list_needs(number: int) -> list[str]:
    return [MANIFESTS[number], SHARED, str(Digest.of(b"own %d" % number))]


def fill(root: Path, numbers: range) -> None:
    table = NeedTable(root)
    for number in numbers:
        table.add(MANIFESTS[number], table.number(list_needs(number)))
    table.close()


def read(root: Path) -> list[list[str] | None]:
    table = NeedTable(root)
    found = map(table.find, MANIFESTS)
    return [None if blobs is None else [table.digests[blob] for blob in blobs] for blobs in found]


def find_file(root: Path) -> Path:
    return root / ".aimage" / "needs" / "table"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def test_many_are_kept_and_few_are_not(root: Path) -> None:
    fill(root, range(31))
    assert read(root) == [None] * 40
    fill(root, range(32))
    assert read(root) == [list_needs(number) for number in range(32)] + [None] * 8


def test_needs_that_are_not_used_are_dropped_with_the_next_write(root: Path) -> None:
    fill(root, range(40))
    table = NeedTable(root)
    assert table.find(MANIFESTS[39]) is not None
    table.close()
    assert read(root) == [None] * 39 + [list_needs(39)]
    assert len(NeedTable(root).digests) == 3


def test_few_new_ones_do_not_write_all(root: Path) -> None:
    fill(root, range(36))
    before = find_file(root).stat().st_ino
    table = NeedTable(root)
    for number in range(36):
        table.find(MANIFESTS[number])
    table.add(MANIFESTS[36], table.number(list_needs(36)))
    table.close()
    assert find_file(root).stat().st_ino == before


@pytest.mark.parametrize("part", ["head", "digests", "numbers", "end", "zeros"])
def test_a_damaged_table_is_none(root: Path, part: str) -> None:
    fill(root, range(40))
    raw = bytearray(find_file(root).read_bytes())
    start = raw.index(b"\n") + 1
    if part == "end":
        del raw[-4:]
    elif part == "zeros":
        raw[-200:] = bytes(200)
    else:
        raw[{"head": 3, "digests": start + 9, "numbers": len(raw) - 6}[part]] ^= 1
    find_file(root).write_bytes(raw)
    assert read(root) == [None] * 40
    fill(root, range(40))
    assert read(root) == [list_needs(number) for number in range(40)]


@pytest.mark.parametrize(
    "fields",
    [
        {"version": "0"},
        {"manifests": 1000},
        {"manifests": -3},
        {"manifests": None},
        {"text": 0},
        {"text": 10**9},
        {"text": "1"},
    ],
)
def test_a_table_of_another_form_is_none(root: Path, fields: dict[str, object]) -> None:
    fill(root, range(40))
    head, body = find_file(root).read_bytes().split(b"\n", 1)
    find_file(root).write_bytes(json.dumps(json.loads(head) | fields).encode() + b"\n" + body)
    assert read(root) == [None] * 40


@pytest.mark.parametrize("place", [0, 40, 80])
def test_numbers_without_a_blob_are_refused(root: Path, place: int) -> None:
    """Another program may have written them, with a checksum."""
    fill(root, range(40))
    line, body = find_file(root).read_bytes().split(b"\n", 1)
    head = json.loads(line)
    start = head["text"] + 4 * place
    body = body[:start] + (2**31).to_bytes(4, "little") + body[start + 4 :]
    head["checksum"] = crc32(body)
    find_file(root).write_bytes(json.dumps(head).encode() + b"\n" + body)
    assert read(root) == [None] * 40


def test_a_store_that_cannot_be_written_has_none(root: Path) -> None:
    (root / ".aimage").write_text("a file")
    fill(root, range(40))
    assert read(root) == [None] * 40
