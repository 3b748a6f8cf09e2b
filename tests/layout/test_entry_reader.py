"""A process that reads an index often reads what changed, whoever wrote it and in whatever way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content.mount import Mount
from clowder_aimage.errors import FormatError
from clowder_aimage.layout import entry_reader as module
from clowder_aimage.layout import index_file
from clowder_aimage.layout.entry_reader import EntryReader
from clowder_aimage.layout.index import edit_index
from clowder_aimage.oci import mediatype


def build_entry(name: str, size: int = 3) -> dict[str, Any]:
    digest = f"sha256:{size:064}"
    annotations = {mediatype.REF_NAME: name}
    return {"mediaType": "x", "digest": digest, "size": size, "annotations": annotations}


class Follower:
    """A process that applies each change to the entries that it has."""

    def __init__(self, root: Path) -> None:
        self.root, self.reader = root, EntryReader(root, lambda: None)
        self.entries: list[str] = []
        self.is_whole = False

    def read(self) -> set[str]:
        changes = self.reader.read()
        if changes is not None:
            self.is_whole = changes.removed is None
            if changes.removed is None:
                self.entries = []
            for entry in changes.removed or ():
                self.entries.remove(json.dumps(entry))
            self.entries += map(json.dumps, changes.added)
        return {json.loads(entry)["annotations"][mediatype.REF_NAME] for entry in self.entries}


@pytest.fixture(params=["ext4", "cifs"])
def follower(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: Any) -> Follower:
    monkeypatch.setattr(index_file, "find_mount", lambda _: Mount(request.param))
    with edit_index(tmp_path) as index:
        index["manifests"] += [build_entry(f"m{number}:v1") for number in range(50)]
    found = Follower(tmp_path)
    assert len(found.read()) == 50
    return found


def add(root: Path, name: str) -> None:
    with edit_index(root, [name]) as index:
        index["manifests"].append(build_entry(name))


def test_changes_of_aimage_are_read_alone(follower: Follower) -> None:
    for number in range(3):
        add(follower.root, f"new{number}:v1")
        assert len(follower.read()) == 51 + number
        assert not follower.is_whole
    with edit_index(follower.root, ["m7:v1"]) as index:
        del index["manifests"][:]
    assert len(follower.read()) == 52
    assert not follower.is_whole


def test_a_write_in_place_between_two_of_aimage_is_not_missed(follower: Follower) -> None:
    """The file that is open has other names than those that were read from it."""
    path = follower.root / "index.json"
    value = json.loads(path.read_bytes())
    value["manifests"] = [*value["manifests"][1:], build_entry("theirs:v1")]
    path.write_text(json.dumps(value))
    add(follower.root, "ours:v1")
    names = follower.read()
    expected = {get_name(entry) for entry in json.loads(path.read_bytes())["manifests"]}
    assert {"theirs:v1", "ours:v1"} <= names
    assert names == expected


def get_name(entry: Any) -> str:
    return str(entry["annotations"][mediatype.REF_NAME])


def test_a_write_in_place_that_keeps_size_and_form_is_not_missed(follower: Follower) -> None:
    path = follower.root / "index.json"
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"m3:v1", b"m3:v2"))
    assert {"m3:v2"} <= follower.read()
    add(follower.root, "ours:v1")
    assert {"ours:v1", "m3:v2"} <= follower.read()


def test_an_error_while_changes_are_read_leads_to_the_whole(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(follower.root, "first:v1")
    with monkeypatch.context() as patch:
        patch.setattr(module, "find_changes", fail)
        assert "first:v1" in follower.read()
        assert follower.is_whole
    add(follower.root, "second:v1")
    with monkeypatch.context() as patch:
        patch.setattr(module, "find_changes", break_off)
        with pytest.raises(KeyboardInterrupt):
            follower.read()
    assert {"first:v1", "second:v1"} <= follower.read()
    assert len(follower.entries) == 52


def fail(*_: object) -> None:
    raise FormatError("torn")


def break_off(*_: object) -> None:
    raise KeyboardInterrupt


def test_one_file_stays_open(follower: Follower) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(5):
        add(follower.root, f"new{number}:v1")
        follower.read()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
