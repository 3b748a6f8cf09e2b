"""Other programs write a large index, and neither side loses a name."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout, index_file
from clowder_aimage.layout.index_merge import merge_left
from clowder_aimage.layout.index_text import exchange_lines
from clowder_aimage.layout.pending_names import NameChange
from clowder_aimage.oci import Manifest, mediatype
from tests.content.artifact import put_artifact
from tests.layout.large_index import (
    build_theirs,
    get_name,
    parse,
    read_names,
    read_written,
    rewrite,
)

pytestmark = pytest.mark.usefixtures("large")


def test_another_tool_takes_nothing_from_the_list(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    one, two = models
    store.tag(two.descriptor, parse("new:v1"))
    store.tag(two.descriptor, parse("m1:v1"))
    store.untag(parse("m2:v1"))
    before = read_names(store)

    def add(entries: dict[str, Any]) -> None:
        entries["theirs:v1"] = entries["m0:v1"] | {"annotations": {mediatype.REF_NAME: "theirs:v1"}}

    rewrite(store, add)
    expected = before | {"theirs:v1": one.digest}
    assert read_names(store) == expected
    store.tag(one.descriptor, parse("last:v1"))
    expected["last:v1"] = one.digest
    assert read_names(store) == expected
    store.write_index()
    assert read_written(store) == {name: str(digest) for name, digest in expected.items()}


def test_an_entry_that_another_tool_changed_counts(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    _, two = models
    third = put_artifact(store, "c:v1", b"three")
    store.write_index()
    store.tag(two.descriptor, parse("m1:v1"))
    store.untag(parse("m2:v1"))

    def change(entries: dict[str, Any]) -> None:
        for name in ("m1:v1", "m2:v1"):
            entries[name]["digest"] = str(third.digest)

    rewrite(store, change)
    for _ in range(2):
        names = read_names(store)
        assert names["m1:v1"] == names["m2:v1"] == third.digest
        store.write_index()
    assert read_written(store)["m1:v1"] == str(third.digest)


@pytest.mark.parametrize("seconds", [0, 60])
@pytest.mark.parametrize("verb", ["move", "remove"])
@pytest.mark.parametrize("is_ours", [True, False], ids=["old entry", "new entry"])
def test_a_name_that_is_set_back_counts_unless_its_entry_is_the_old_one(
    store: ImageLayout, models: tuple[Manifest, Manifest], seconds: int, verb: str, is_ours: bool
) -> None:
    """A tool that read the index before one change may write it much later."""
    one, two = models
    old = json.loads((store.root / "index.json").read_bytes())["manifests"]
    (entry,) = (entry for entry in old if get_name(entry) == "m1:v1")
    if verb == "move":
        store.tag(two.descriptor, parse("m1:v1"))
    else:
        store.untag(parse("m1:v1"))
    store.write_index()
    written = (store.root / "index.json").stat().st_mtime
    entry = entry if is_ours else build_theirs("m1:v1", one)
    rewrite(store, lambda entries: entries.update({"m1:v1": entry}))
    os.utime(store.root / "index.json", (written + seconds,) * 2)
    expected = {"move": two.digest, "remove": None}[verb] if is_ours else one.digest
    for _ in range(2):
        assert read_names(store).get("m1:v1") == expected
        store.write_index()


@pytest.mark.parametrize(("seconds", "is_theirs"), [(0, False), (60, True)])
def test_a_removed_name_of_another_tool_returns_with_it_unless_that_read_an_old_index(
    store: ImageLayout, models: tuple[Manifest, Manifest], seconds: int, is_theirs: bool
) -> None:
    one, _ = models
    theirs = build_theirs("theirs:v1", one)
    rewrite(store, lambda entries: entries.update({"theirs:v1": theirs}))
    store.write_index()
    store.untag(parse("theirs:v1"))
    store.write_index()
    written = (store.root / "index.json").stat().st_mtime
    rewrite(store, lambda entries: entries.update({"theirs:v1": theirs}))
    os.utime(store.root / "index.json", (written + seconds,) * 2)
    for _ in range(2):
        assert ("theirs:v1" in read_names(store)) == is_theirs
        store.write_index()


def test_a_tool_that_left_our_entry_had_read_it(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    """A name of another tool that we moved, and that it moves back."""
    one, two = models
    theirs = build_theirs("theirs:v1", one)
    rewrite(store, lambda entries: entries.update({"theirs:v1": theirs}))
    store.tag(two.descriptor, parse("theirs:v1"))
    store.write_index()

    def move(entries: dict[str, Any], *, leaves: bool) -> None:
        left = json.loads(json.dumps(entries["theirs:v1"]))
        del left["annotations"][mediatype.REF_NAME]
        entries["theirs:v1"] = theirs
        if leaves:
            entries["left"] = left

    path = store.root / "index.json"
    raw = path.read_bytes()
    value = json.loads(raw)
    for leaves in (False, True):
        entries = {get_name(entry): entry for entry in json.loads(raw)["manifests"]}
        move(entries, leaves=leaves)
        path.write_text(json.dumps(value | {"manifests": [*entries.values()]}))
        os.utime(path, (time.time() + 60,) * 2)
        found = ImageLayout(store.root).resolve(parse("theirs:v1"))
        assert found.digest == (one if leaves else two).digest


def test_a_tool_that_read_an_index_before_several_changes_undoes_none(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    """Of three lists that were written since, whenever it writes its index."""
    one, two = models
    path = store.root / "index.json"
    old = json.loads(path.read_bytes())
    for number in range(3):
        store.tag(two.descriptor, parse(f"m{number}:v1"))
        store.tag(two.descriptor, parse(f"new{number}:v1"))
        store.untag(parse(f"m{number + 3}:v1"))
        store.write_index()
    before = read_names(store)
    old["manifests"].append(entry := json.loads(json.dumps(old["manifests"][0])))
    entry["annotations"] = {mediatype.REF_NAME: "theirs:v1"}
    path.write_text(json.dumps(old))
    os.utime(path, (time.time() + 60,) * 2)
    for _ in range(2):
        assert read_names(store) == before | {"theirs:v1": one.digest}
        store.write_index()


def test_a_tool_that_read_the_last_index_may_move_names_back(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    one, two = models
    store.tag(two.descriptor, parse("m1:v1"))
    store.tag(two.descriptor, parse("m2:v1"))
    store.tag(two.descriptor, parse("new:v1"))
    store.write_index()
    rewrite(store, lambda entries: entries["m1:v1"].update(digest=str(one.digest)))
    names = read_names(store)
    assert names["m1:v1"] == one.digest
    assert names["m2:v1"] == names["new:v1"] == two.digest


def test_an_index_that_disappears_is_restored(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    store.tag(models[1].descriptor, parse("new:v1"))
    before = read_names(store)
    (store.root / "index.json").unlink()
    assert read_names(store) == before
    assert store.write_index() == len(before)
    assert read_written(store).keys() == before.keys()


def test_a_write_of_another_tool_while_the_index_is_written_is_merged(
    store: ImageLayout, models: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = models
    store.tag(two.descriptor, parse("new:v1"))
    store.untag(parse("m2:v1"))
    expected = read_names(store)

    def exchange_late(*arguments: Any) -> Any:
        def add(entries: dict[str, Any]) -> None:
            entries["theirs:v1"] = entries["m0:v1"] | {
                "annotations": {mediatype.REF_NAME: "theirs:v1"}
            }

        if "theirs:v1" not in read_written(store):
            rewrite(store, add)
        return exchange_lines(*arguments)

    monkeypatch.setattr(index_file, "exchange_lines", exchange_late)
    store.write_index()
    monkeypatch.undo()
    assert read_names(store) == expected | {"theirs:v1": one.digest}


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ([("x", 1)], [("x", 2)]),
        ([("x", 2)], [("x", 2)]),
        ([("x", 3)], [("x", 3)]),
        ([("x", 1), ("x", 1)], [("x", 2)]),
        ([("gone", 1)], []),
        ([("gone", 3)], [("gone", 3)]),
        ([("gone:latest", 1)], []),
        ([("new", 3)], [("new", 3)]),
        ([("other", 1), ("x", 1)], [("other", 1), ("x", 2)]),
        ([], []),
    ],
)
def test_entries_of_another_tool_are_compared_with_both_sides(
    theirs: list[tuple[str, int]], expected: list[tuple[str, int]]
) -> None:
    def build(name: str, digest: int) -> dict[str, Any]:
        return {"digest": f"sha256:{digest}", "annotations": {mediatype.REF_NAME: name}}

    changes = [
        NameChange("x", build("x", 1), build("x", 7)),
        NameChange("x", build("x", 7), build("x", 2)),
        NameChange("gone", build("gone", 1), None),
        NameChange("new", None, build("new", 2)),
    ]
    found = merge_left([build(*item) for item in theirs], changes)
    assert list(found) == [build(*item) for item in expected]


def test_an_entry_whose_fields_another_tool_has_ordered_is_changed(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    _, two = models
    path = store.root / "index.json"
    value = json.loads(path.read_bytes())
    for entry in value["manifests"]:
        # As Go writes the fields of a descriptor
        entry["artifactType"] = entry.pop("artifactType", "application/vnd.test")
    beside = store.root / "index.foreign"
    beside.write_text(json.dumps(value))
    beside.replace(path)
    store.tag(two.descriptor, parse("x:v1"))
    store.tag(two.descriptor, parse("m1:v1"))
    store.untag(parse("m2:v1"))
    store.write_index()
    names = read_names(store)
    assert "m2:v1" not in names and names["m1:v1"] == two.digest
    assert read_written(store) == {name: str(digest) for name, digest in names.items()}


def test_an_old_index_that_appears_while_one_is_written_undoes_nothing(
    store: ImageLayout, models: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, two = models
    path = store.root / "index.json"
    stale = path.read_bytes()
    store.tag(two.descriptor, parse("m1:v1"))
    store.untag(parse("m2:v1"))
    store.write_index()
    store.tag(two.descriptor, parse("m3:v1"))

    def interrupted(*given: Any) -> Any:
        monkeypatch.undo()
        beside = store.root / "index.foreign"
        beside.write_bytes(stale)
        beside.replace(path)
        return exchange_lines(*given)

    monkeypatch.setattr(index_file, "exchange_lines", interrupted)
    store.write_index()
    names = read_names(store)
    assert names["m1:v1"] == names["m3:v1"] == two.digest
    assert "m2:v1" not in names


@pytest.mark.parametrize("count", [2, 20])
def test_names_that_were_removed_together_do_not_return_with_an_old_index(
    store: ImageLayout, models: tuple[Manifest, Manifest], count: int
) -> None:
    one, _ = models
    for number in range(20):
        store.tag(one.descriptor, parse(f"n{number}:v1"))
    store.write_index()
    stale = (store.root / "index.json").read_bytes()
    store.remove_names({f"n{number}:v1": one.digest for number in range(count)})
    beside = store.root / "index.foreign"
    beside.write_bytes(stale)
    beside.replace(store.root / "index.json")
    left = {name for name in read_names(store) if name.startswith("n")}
    assert left == {f"n{number}:v1" for number in range(count, 20)}


def test_a_name_that_skopeo_moves_is_moved(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    """It takes one of two annotations from our entry, and appends an entry of its own."""
    _, two = models
    path = store.root / "index.json"
    value = json.loads(path.read_bytes())
    (ours,) = (entry for entry in value["manifests"] if get_name(entry) == "m1:v1")
    del ours["annotations"][mediatype.REF_NAME]
    theirs = two.descriptor.to_json() | {"annotations": {mediatype.REF_NAME: "m1:v1"}}
    value["manifests"].append(theirs)
    beside = store.root / "index.foreign"
    beside.write_text(json.dumps(value))
    beside.replace(path)
    assert store.resolve(parse("m1:v1")).digest == two.digest
    assert dict(store.list_tags())["m1:v1"].digest == two.digest
