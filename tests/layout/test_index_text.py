"""index.json as text: entries are found, replaced and compared by their lines."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import FormatError
from clowder_aimage.layout import index_text
from clowder_aimage.layout.index_text import (
    EntryLine,
    FileText,
    encode_index,
    find_changes,
    find_lines,
    iter_entries,
    replace_lines,
)

NAMES = [f"m{number}:v1" for number in range(12)]


def random_entry(rng: random.Random) -> Any:
    named = {"digest": f"sha256:{rng.randrange(10**6)}", "annotations": {"n": rng.choice(NAMES)}}
    return rng.choice([named, named, named, None, "a\n,b", [1, [2]], {"a": []}])


def random_change(rng: random.Random, entries: list[Any]) -> list[Any]:
    changed = list(entries)
    for _ in range(rng.randrange(4)):
        position = rng.randrange(len(changed) + 1)
        end = position + rng.randrange(2)
        changed[position:end] = [random_entry(rng)] if rng.randrange(2) else []
    return changed


def encode(entries: list[Any]) -> bytes:
    return encode_index({"schemaVersion": 2, "manifests": entries, "x": [1]})


def read(raw: bytes) -> list[Any]:
    entries: list[Any] = json.loads(raw)["manifests"]
    return entries


def replace(raw: bytes, lines: list[EntryLine], entries: list[Any]) -> bytes:
    return b"".join(replace_lines(raw, lines, entries))


def is_named(entry: Any, name: str) -> bool:
    return isinstance(entry, dict) and entry.get("annotations") == {"n": name}


@pytest.fixture(params=range(20))
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.param)


def test_changes_between_texts_are_found(rng: random.Random) -> None:
    for _ in range(30):
        old = [random_entry(rng) for _ in range(rng.randrange(9))]
        new = random_change(rng, old)
        assert read(encode(old)) == list(iter_entries(encode(old))) == old
        removed, added = find_changes(encode(old), encode(new))
        count = [Counter(map(json.dumps, entries)) for entries in (old, removed, added, new)]
        assert count[0] - count[1] + count[2] == count[3]
        assert not count[1] - count[0]


def test_changes_between_files_are_those_between_their_texts(
    rng: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_text, "_CHUNK", rng.randrange(8, 50))
    for _ in range(10):
        old = [random_entry(rng) for _ in range(rng.randrange(9))]
        texts = [encode(old), encode(random_change(rng, old))]
        with (tmp_path / "old").open("w+b") as first, (tmp_path / "new").open("w+b") as second:
            files = []
            for file, text in zip((first, second), texts, strict=True):
                file.write(text)
                file.flush()
                files.append(FileText(os.dup(file.fileno())))
            assert find_changes(*files) == find_changes(*texts)
            for needle in (b"\n", b"\n]", b"sha256", b"missing"):
                assert files[0].find(needle) == texts[0].find(needle)
                assert files[0].rfind(needle) == texts[0].rfind(needle)
                assert files[0].find(needle, 5, 60) == texts[0].find(needle, 5, 60)
                assert files[0].rfind(needle, 5, 60) == texts[0].rfind(needle, 5, 60)


@pytest.mark.parametrize("text", [b"", b"{}", b"\n", b'{"manifests": []}', b"\n]\n"[:1]])
def test_a_text_without_a_body_is_refused(text: bytes) -> None:
    with pytest.raises(FormatError):
        find_changes(text, encode([]))


def test_entries_are_replaced_in_the_text(rng: random.Random) -> None:
    for _ in range(30):
        _check_replacement(rng)


def _check_replacement(rng: random.Random) -> None:
    old, name = [random_entry(rng) for _ in range(rng.randrange(9))], rng.choice(NAMES)
    raw = encode(old)
    lines = find_lines(raw, {name})
    named = [line.entry for line in lines]
    assert named == [entry for entry in old if is_named(entry, name)]
    assert replace(raw, lines, named) == raw
    assert read(replace(raw, lines, [*named, {"z": 1}])) == [*old, {"z": 1}]
    left = [entry for entry in old if not is_named(entry, name)]
    assert read(replace(raw, lines, [])) == left
    if named:
        first = next(i for i, entry in enumerate(old) if is_named(entry, name))
        moved = [*old[:first], {"y": 2}, *old[first + 1 :]]
        assert read(replace(raw, lines, [{"y": 2}, *named[1:]])) == moved


def test_a_small_change_of_a_long_index_is_read_alone() -> None:
    entries = [{"digest": f"sha256:{number:064}"} for number in range(1_000)]
    for position in (0, 1, 500, 998, 999):
        changed = list(entries)
        changed[position] = {"digest": "sha256:x"}
        removed, added = find_changes(encode(entries), encode(changed))
        assert changed[position] in added
        assert entries[position] in removed
        assert len(removed) <= 2
        shorter = entries[:position] + entries[position + 1 :]
        assert len(find_changes(encode(entries), encode(shorter))[0]) <= 3
    longer = [*entries, {"digest": "sha256:x"}]
    assert len(find_changes(encode(entries), encode(longer))[1]) <= 2
