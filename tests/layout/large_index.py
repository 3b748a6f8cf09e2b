"""A store whose index counts as large, as this program and others see it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.entry_reader import EntryReader
from clowder_aimage.layout.index_file import read_index
from clowder_aimage.oci import Digest, Manifest, Reference, mediatype

parse = Reference.parse
# Names of the store
COUNT = 8


def read_names(store: ImageLayout) -> dict[str, Digest]:
    """Return the names as a new process sees them; all ways to read them agree."""
    names = {name: found.digest for name, found in ImageLayout(store.root).list_tags()}
    for name, digest in names.items():
        assert store.resolve(parse(name)).digest == digest
    changes = EntryReader(store.root, lambda: None).read()
    assert changes is not None
    assert {get_name(entry): entry["digest"] for entry in changes.added} == {
        name: str(digest) for name, digest in names.items()
    }
    return names


def get_name(entry: Any) -> str:
    return str(entry["annotations"][mediatype.REF_NAME])


def read_written(store: ImageLayout) -> dict[str, str]:
    """Return the names that other tools see."""
    value = json.loads((store.root / "index.json").read_bytes())
    return {get_name(entry): entry["digest"] for entry in value["manifests"]}


def rewrite(store: ImageLayout, change: Callable[[dict[str, Any]], object]) -> None:
    """Write the index as another tool does, which drops fields that it does not know."""
    value = json.loads((store.root / "index.json").read_bytes())
    entries = {get_name(entry): entry for entry in value["manifests"]}
    change(entries)
    for entry in entries.values():
        entry.pop("artifactType", None)
    beside = store.root / "index.foreign"
    beside.write_text(json.dumps({"schemaVersion": 2, "manifests": [*entries.values()]}))
    beside.replace(store.root / "index.json")


def list_files(store: ImageLayout) -> list[Path]:
    return sorted((store.root / ".aimage" / "pending").glob("*"))


class Follower:
    """A process that applies each change to the entries that it has."""

    def __init__(self, root: Path) -> None:
        self.reader = EntryReader(root, lambda: None)
        self.entries: list[str] = []
        self.wholes = 0

    def read(self) -> set[tuple[str, str]]:
        changes = self.reader.read()
        if changes is not None and changes.removed is None:
            self.entries, self.wholes = [], self.wholes + 1
        if changes is not None:
            for entry in changes.removed or ():
                self.entries.remove(json.dumps(entry))
            self.entries += map(json.dumps, changes.added)
        found = [json.loads(entry) for entry in self.entries]
        return {(get_name(entry), entry["digest"]) for entry in found}


def read_pairs(store: ImageLayout) -> set[tuple[str, str]]:
    return {(get_name(entry), entry["digest"]) for entry in read_index(store.root)["manifests"]}


def build_theirs(name: str, model: Manifest) -> dict[str, Any]:
    """Return an entry as other tools make it."""
    return model.descriptor.to_json() | {"annotations": {mediatype.REF_NAME: name}}
