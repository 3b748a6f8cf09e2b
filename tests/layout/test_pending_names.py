"""A large index is written seldom: its list of changes loses no name, and invents none."""

from __future__ import annotations

import json
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clowder_aimage.errors import NoSpaceError, NotFoundError, StoreBusyError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout import index as index_module
from clowder_aimage.layout import pending_names as module
from clowder_aimage.layout.entry_reader import EntryReader
from clowder_aimage.layout.gc import Collector
from clowder_aimage.layout.index import edit_index, read_index
from clowder_aimage.layout.index_merge import merge_left
from clowder_aimage.layout.index_text import encode_index, exchange_lines
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.layout.lock import PATIENCE, hold_lock
from clowder_aimage.layout.pending_names import EntryDifference, NameChange
from clowder_aimage.oci import Digest, Manifest, Reference, mediatype
from tests.content.artifact import put_artifact
from tests.layout.test_index_stamp import _KilledError, kill_at

parse = Reference.parse
# Names of the store
COUNT = 8


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take an index of more than four names for a large one, which is not due for an hour."""
    monkeypatch.setattr(index_module, "SMALL", 4)
    monkeypatch.setattr(index_module, "_MIN_INTERVAL", 3600.0)


@pytest.fixture
def models(store: ImageLayout) -> tuple[Manifest, Manifest]:
    """Two models; names of the first are in an index that is large."""
    one, two = put_artifact(store, "a:v1", b"one"), put_artifact(store, "b:v1", b"two")
    for number in range(COUNT - 2):
        store.tag(one.descriptor, parse(f"m{number}:v1"))
    store.write_index()
    assert len(read_written(store)) == COUNT
    return one, two


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


# -- when the index is written


def test_a_change_of_a_large_index_is_in_the_list_alone(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    _, two = models
    raw = (store.root / "index.json").read_bytes()
    store.tag(two.descriptor, parse("new:v1"))
    store.tag(two.descriptor, parse("m1:v1"))
    store.untag(parse("m2:v1"))
    assert (store.root / "index.json").read_bytes() == raw
    names = read_names(store)
    assert names["new:v1"] == names["m1:v1"] == two.digest
    assert "m2:v1" not in names and len(names) == COUNT
    with pytest.raises(NotFoundError):
        store.resolve(parse("m2:v1"))
    with pytest.raises(NotFoundError):
        store.untag(parse("m2:v1"))
    assert store.write_index() == 3
    assert read_written(store) == {name: str(digest) for name, digest in names.items()}
    assert read_names(store) == names
    assert store.write_index() == 0


def test_a_small_index_is_written_with_each_change(store: ImageLayout) -> None:
    for number in range(1, 5):
        put_artifact(store, f"m{number}:v1", b"one")
        assert len(read_written(store)) == number
        assert list_files(store) == []


def test_an_index_that_becomes_small_is_written_at_once(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    for number in range(COUNT - 2):
        store.untag(parse(f"m{number}:v1"))
    assert len(read_written(store)) == 2
    assert list_files(store) == []
    assert read_names(store).keys() == {"a:v1", "b:v1"}


def test_an_index_is_written_with_the_first_change_that_is_due(
    store: ImageLayout, models: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.tag(models[0].descriptor, parse("first:v1"))
    assert "first:v1" not in read_written(store)
    clock = time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: clock() + 3601 * 10**9)
        store.tag(models[0].descriptor, parse("second:v1"))
    assert {"first:v1", "second:v1"} <= read_written(store).keys()
    # A clock that was wrong must not delay it for years
    store.tag(models[0].descriptor, parse("third:v1"))
    assert "third:v1" in read_written(store)


def test_a_server_writes_an_index_that_is_due(
    store: ImageLayout, models: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.defers_index = True
    monkeypatch.setattr(index_module, "_MIN_INTERVAL", 0.0)
    monkeypatch.setattr(index_module, "_MAX_SHARE", 0)
    store.tag(models[0].descriptor, parse("new:v1"))
    assert "new:v1" not in read_written(store)
    store.write_pending(is_due=True)
    assert "new:v1" in read_written(store)


def test_a_list_that_is_full_is_written(
    store: ImageLayout, models: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SIZE", 2000)
    for number in range(20):
        store.tag(models[0].descriptor, parse(f"new{number}:v1"))
        assert max(path.stat().st_size for path in list_files(store)) < 4000
    assert len(read_written(store)) > COUNT + 10
    assert len(read_names(store)) == COUNT + 20


def test_a_change_that_would_exceed_the_limit_of_the_index_is_refused(
    store: ImageLayout, models: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (store.root / "index.json").stat().st_size
    monkeypatch.setattr(index_module, "MAX_INDEX_SIZE", size + 100)
    with pytest.raises(Exception, match="the limit is"):
        store.tag(models[0].descriptor, parse("new:v1"))
    assert len(read_names(store)) == COUNT


def test_without_effective_locks_the_index_is_written(
    store: ImageLayout, models: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.tag(models[0].descriptor, parse("first:v1"))
    monkeypatch.setattr(index_module, "_is_locked", lambda _: False)
    store.tag(models[0].descriptor, parse("second:v1"))
    assert {"first:v1", "second:v1"} <= read_written(store).keys()
    store.tag(models[0].descriptor, parse("third:v1"))
    assert "third:v1" in read_written(store)
    assert list_files(store) == []


def test_a_full_disk_does_not_undo_what_is_in_the_list(
    store: ImageLayout, models: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: Any, **__: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_module, "_MIN_INTERVAL", 0.0)
    monkeypatch.setattr(index_module, "_MAX_SHARE", 0)
    with monkeypatch.context() as patch:
        patch.setattr(index_module, "write_shared", fill)
        store.tag(models[1].descriptor, parse("new:v1"))
        with pytest.raises(NoSpaceError):
            store.write_index()
    assert read_names(store)["new:v1"] == models[1].digest
    assert "new:v1" not in read_written(store)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_all", fill)
        with pytest.raises(NoSpaceError):
            store.tag(models[1].descriptor, parse("other:v1"))
    assert "other:v1" not in read_names(store)
    store.tag(models[1].descriptor, parse("last:v1"))
    assert {"new:v1", "last:v1"} <= read_written(store).keys()


def test_two_entries_of_a_name_keep_their_order(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    one, two = models
    with edit_index(store.root) as index:
        index["manifests"].append(
            index["manifests"][1] | {"annotations": {mediatype.REF_NAME: "a:v1"}}
        )
    assert store.resolve(parse("a:v1")).digest == one.digest
    store.tag(two.descriptor, parse("a:v1"))
    assert store.resolve(parse("a:v1")).digest == two.digest
    store.untag(parse("a:v1"))
    assert "a:v1" not in read_names(store)


# -- torn lines


@pytest.mark.parametrize("torn", [b"0", b"00000000 {}", b"\0" * 100, b"\n\n12 {"])
def test_a_torn_line_is_dropped(
    store: ImageLayout, models: tuple[Manifest, Manifest], torn: bytes
) -> None:
    store.tag(models[1].descriptor, parse("first:v1"))
    reader = EntryReader(store.root, lambda: None)
    reader.read()
    path = max(list_files(store), key=lambda path: path.stat().st_mtime_ns)
    with path.open("ab") as file:
        file.write(torn)
    assert reader.read() is None
    assert "first:v1" in read_names(store)
    store.tag(models[1].descriptor, parse("second:v1"))
    changes = reader.read()
    assert changes is not None and list(map(get_name, changes.added)) == ["second:v1"]
    assert {"first:v1", "second:v1"} <= read_names(store).keys()
    store.write_index()
    assert {"first:v1", "second:v1"} <= read_written(store).keys()


def test_lines_of_other_forms_are_ignored(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    path = max(list_files(store), key=lambda path: path.stat().st_mtime_ns)
    values: list[Any] = [[], 7, {"changes": 7}, {"changes": [7, {"name": 7}, {}]}, {"seconds": []}]
    with path.open("ab") as file:
        for value in values:
            text = json.dumps(value).encode()
            file.write(b"%08x %s\n" % (zlib.crc32(text), text))
    assert len(read_names(store)) == COUNT
    store.tag(models[1].descriptor, parse("new:v1"))
    assert len(read_names(store)) == COUNT + 1


# -- other programs write the index meanwhile


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


@pytest.mark.parametrize(("seconds", "is_theirs"), [(0, False), (60, True)])
def test_a_name_that_is_moved_back_counts_unless_that_may_be_an_old_index(
    store: ImageLayout, models: tuple[Manifest, Manifest], seconds: int, is_theirs: bool
) -> None:
    one, two = models
    store.tag(two.descriptor, parse("m1:v1"))
    store.write_index()
    written = (store.root / "index.json").stat().st_mtime
    rewrite(store, lambda entries: entries["m1:v1"].update(digest=str(one.digest)))
    os.utime(store.root / "index.json", (written + seconds,) * 2)
    for _ in range(2):
        assert read_names(store)["m1:v1"] == (one if is_theirs else two).digest
        store.write_index()


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

    monkeypatch.setattr(index_module, "exchange_lines", exchange_late)
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
    assert found == [build(*item) for item in expected]


# -- kills


@pytest.mark.parametrize("verb", ["tag", "move", "untag", "index"])
@pytest.mark.parametrize("is_rewritten", [False, True], ids=["alone", "with another tool"])
def test_no_kill_loses_or_invents_a_name(
    store: ImageLayout,
    models: tuple[Manifest, Manifest],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    is_rewritten: bool,
) -> None:
    """At each call of a verb that changes the file system."""
    one, two = models
    position, is_killed = 0, True
    while is_killed:
        store.tag(one.descriptor, parse("x:v1"))
        if verb == "tag":
            store.untag(parse("x:v1"))
        if verb == "index":
            store.tag(two.descriptor, parse("y:v1"))
            store.untag(parse("m2:v1"))
        else:
            store.write_index()
        before = read_names(store)
        after = dict(before)
        with kill_at(position, monkeypatch) as done:
            try:
                if verb == "untag":
                    after.pop("x:v1")
                    store.untag(parse("x:v1"))
                elif verb == "index":
                    store.write_index()
                else:
                    after["x:v1"] = two.digest
                    store.tag(two.descriptor, parse("x:v1"))
            except _KilledError:
                pass
            else:
                before = after
        is_killed = len(done) > position
        visible = read_names(store)
        assert visible in (before, after), position
        if is_rewritten:
            rewrite(store, lambda entries: entries.pop("theirs:v1", None))
            assert read_names(store) in (before, after), position
        visible = read_names(store)
        store.tag(one.descriptor, parse("another:v1"))
        assert read_names(store) == visible | {"another:v1": one.digest}
        store.write_index()
        assert read_names(store) == visible | {"another:v1": one.digest}
        assert read_written(store).keys() == read_names(store).keys()
        store.tag(one.descriptor, parse("m2:v1"))
        for name in read_names(store).keys() & {"another:v1", "x:v1", "y:v1"}:
            store.untag(parse(name))
        store.write_index()
        position += 1
    assert position > 8


# -- readers


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


def test_a_reader_follows_the_lists_of_several_indexes(
    store: ImageLayout, models: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEPT", 8)
    one, two = models
    follower = Follower(store.root)
    assert follower.read() == read_pairs(store)
    for number in range(6):
        store.tag(two.descriptor, parse(f"new{number}:v1"))
        store.tag(one.descriptor, parse(f"new{number}:v1"))
        if number % 3 == 0:
            store.untag(parse(f"m{number}:v1"))
        store.write_index()
        if number in (1, 5):
            assert follower.read() == read_pairs(store)
            assert follower.read() == read_pairs(store)
    assert follower.wholes == 1
    # More indexes than lists are kept
    for number in range(12):
        store.tag(two.descriptor, parse(f"last{number}:v1"))
        store.write_index()
    assert len(list_files(store)) <= 9
    assert follower.read() == read_pairs(store)
    assert follower.wholes == 2


def test_a_reader_reads_an_index_of_another_tool_and_what_the_list_adds_later(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    """A process that has read the index before may still append a change."""
    follower = Follower(store.root)
    follower.read()
    store.tag(models[1].descriptor, parse("new:v1"))
    with edit_index(store.root, ["late:v1"]) as index:
        rewrite(store, lambda entries: None)
        os.utime(store.root / "index.json", (1, 1))
        assert follower.read() == read_pairs(store)
        entry = json.loads((store.root / "index.json").read_bytes())["manifests"][0]
        index["manifests"].append(entry | {"annotations": {mediatype.REF_NAME: "m1:v1"}})
    assert follower.read() == read_pairs(store)


def test_a_read_only_store_shows_its_list(
    store: ImageLayout, models: tuple[Manifest, Manifest], tmp_path: Path
) -> None:
    store.tag(models[1].descriptor, parse("new:v1"))
    store.untag(parse("m2:v1"))
    both = LayeredStore([tmp_path / "first", store.root])
    names = {name for name, _ in both.list_tags()}
    assert "new:v1" in names and "m2:v1" not in names
    assert both.resolve(parse("new:v1")).digest == models[1].digest
    assert "new:v1" not in read_written(store)


def test_a_collection_keeps_the_content_of_names_in_the_list(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    new = put_artifact(store, "new:v1", b"three")
    store.untag(parse("b:v1"))
    assert "b:v1" in read_written(store)
    assert Collector(store, grace=0, dry_run=True).run().blobs > 0
    assert "b:v1" in read_written(store)
    assert Collector(store, grace=0).run().blobs > 0
    assert store.exists(new.descriptor)
    assert not store.exists(models[1].descriptor)
    # No index refers to content that is gone
    assert "b:v1" not in read_written(store)


# -- a model of the whole


@pytest.fixture(params=range(6))
def rng(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    yield random.Random(request.param)


def test_random_changes_of_two_processes_and_another_tool(
    store: ImageLayout, models: tuple[Manifest, Manifest], rng: random.Random
) -> None:
    first, second = store, ImageLayout(store.root)
    expected = read_names(store)
    followers = [Follower(store.root) for _ in range(2)]
    for step in range(60):
        process, name = rng.choice([first, second]), f"r{rng.randrange(6)}:v1"
        made = rng.choice(models)
        verb = rng.choice(["tag", "tag", "tag", "untag", "untag", "index", "foreign"])
        if verb == "tag":
            process.tag(made.descriptor, parse(name))
            expected[name] = made.digest
        elif verb == "untag" and name in expected:
            process.untag(parse(name))
            del expected[name]
        elif verb == "index":
            process.write_index()
        elif verb == "foreign":
            theirs = f"theirs{step}:v1"

            def add(entries: dict[str, Any], theirs: str = theirs) -> None:
                entry = next(iter(entries.values()))
                entries[theirs] = entry | {"annotations": {mediatype.REF_NAME: theirs}}

            digest = next(iter(read_written(store).values()))
            rewrite(store, add)
            expected[theirs] = Digest.parse(digest)
        assert read_names(store) == expected, step
        if rng.random() < 0.5:
            pairs = {(name, str(digest)) for name, digest in expected.items()}
            assert rng.choice(followers).read() == pairs, step
    store.write_index()
    assert read_written(store) == {name: str(digest) for name, digest in expected.items()}


def test_texts_are_exchanged_as_values_are(rng: random.Random) -> None:
    for _ in range(20):
        entries = [{"n": rng.randrange(5)} for _ in range(rng.randrange(7))]
        removed = rng.sample(entries, rng.randrange(len(entries) + 1))
        added = [{"n": 10 + number} for number in range(rng.randrange(3))]
        changes = EntryDifference()
        changes.apply(removed, added)
        raw = encode_index({"manifests": entries, "x": 1})
        text = b"".join(exchange_lines(raw, changes.removed, changes.list_added_texts()))
        value = json.loads(text)
        left = list(entries)
        for entry in removed:
            left.remove(entry)
        assert sorted(value["manifests"], key=str) == sorted([*left, *added], key=str)
        assert text == encode_index(value)


# -- other tools and processes between the steps


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

    monkeypatch.setattr(index_module, "exchange_lines", interrupted)
    store.write_index()
    names = read_names(store)
    assert names["m1:v1"] == names["m3:v1"] == two.digest
    assert "m2:v1" not in names


def test_a_tag_that_fails_restores_no_earlier_state(
    store: ImageLayout, models: tuple[Manifest, Manifest]
) -> None:
    _, two = models
    store.untag(parse("m2:v1"))
    waiting = PATIENCE.set(0.1)
    try:
        with hold_lock(store.root, "lock"), pytest.raises(StoreBusyError):
            ImageLayout(store.root).tag(two.descriptor, parse("m2:v1"))
    finally:
        PATIENCE.reset(waiting)
    assert "m2:v1" not in read_names(store)


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


def test_an_index_without_exact_times_has_no_list(
    store: ImageLayout, models: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    utime = os.utime

    def round_down(path: Any, *, ns: tuple[int, int] | None = None, **options: Any) -> None:
        if ns is not None:
            options["ns"] = tuple(time_ns // 10**9 * 10**9 for time_ns in ns)
        utime(path, **options)

    monkeypatch.setattr(os, "utime", round_down)
    one, two = models
    for number in range(4):
        store.tag((one, two)[number % 2].descriptor, parse("m1:v1"))
    store.write_index()
    assert read_written(store)["m1:v1"] == str(two.digest)
    assert ImageLayout(store.root).resolve(parse("m1:v1")).digest == two.digest
