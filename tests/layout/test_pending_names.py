"""A large index is written seldom: its list of changes loses no name, and invents none."""

from __future__ import annotations

import errno
import json
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clowder_aimage.errors import NoSpaceError, NotFoundError, StoreBusyError, StoreError
from clowder_aimage.layout import ImageLayout, index_file, index_replacement
from clowder_aimage.layout import index as index_module
from clowder_aimage.layout import pending_names as module
from clowder_aimage.layout.entry_reader import EntryReader
from clowder_aimage.layout.gc import Collector
from clowder_aimage.layout.index import edit_index
from clowder_aimage.layout.index_text import encode_index, exchange_lines
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.layout.lock import PATIENCE, hold_lock
from clowder_aimage.layout.pending_names import EntryDifference
from clowder_aimage.oci import Digest, Manifest, mediatype
from tests.content.artifact import put_artifact
from tests.layout.large_index import (
    COUNT,
    Follower,
    get_name,
    list_files,
    parse,
    read_names,
    read_pairs,
    read_written,
    rewrite,
)
from tests.layout.test_index_stamp import _KilledError, kill_at

pytestmark = pytest.mark.usefixtures("large")


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
    for place in (index_module, index_replacement):
        monkeypatch.setattr(place, "MAX_INDEX_SIZE", size + 100)
    with pytest.raises(Exception, match="the limit is"):
        store.tag(models[0].descriptor, parse("new:v1"))
    assert len(read_names(store)) == COUNT


def test_without_effective_locks_the_index_is_written(
    store: ImageLayout, models: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.tag(models[0].descriptor, parse("first:v1"))
    monkeypatch.setattr(index_file, "is_file_locked", lambda *_: False)
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
        patch.setattr(index_replacement, "write_shared", fill)
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


class Disk:
    """A disk that fails to synchronise, or also to shorten, files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *calls: tuple[object, str]) -> None:
        self.hooks: list[Callable[[], object]] = []
        for place, name in calls:
            monkeypatch.setattr(place, name, self.fail)

    def fail(self, *_: Any, **__: Any) -> NoReturn:
        while self.hooks:
            self.hooks.pop()()
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("verb", ["tag", "move", "untag"])
def test_a_change_that_the_disk_did_not_take_is_taken_back(
    store: ImageLayout,
    models: tuple[Manifest, Manifest],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
) -> None:
    one, two = models
    store.tag(two.descriptor, parse("before:v1"))
    before, follower = read_names(store), Follower(store.root)
    pairs = follower.read()
    name = parse({"tag": "new:v1", "move": "m1:v1", "untag": "m1:v1"}[verb])
    with monkeypatch.context() as patch:
        disk = Disk(patch, (module, "sync_file"))
        # Another process sees the line before it is taken back
        disk.hooks.append(follower.read)
        with pytest.raises(StoreError, match="Input/output"):
            store.untag(name) if verb == "untag" else store.tag(two.descriptor, name)
    assert read_names(store) == before
    assert follower.read() == pairs
    store.tag(one.descriptor, parse("later:v1"))
    assert read_names(store) == before | {"later:v1": one.digest}
    assert follower.read() == read_pairs(store)
    store.write_index()
    assert read_written(store).keys() == read_names(store).keys()


@pytest.mark.parametrize("call", ["write_all", "sync_file"])
def test_an_interrupted_change_is_taken_back(
    call: str,
    store: ImageLayout,
    models: tuple[Manifest, Manifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = models
    store.tag(two.descriptor, parse("before:v1"))
    before, real = read_names(store), getattr(module, call)

    def interrupt(*arguments: Any, **options: Any) -> NoReturn:
        real(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, call, interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.tag(two.descriptor, parse("new:v1"))
    assert read_names(store) == before
    store.tag(one.descriptor, parse("later:v1"))
    assert read_names(store) == before | {"later:v1": one.digest}


def test_a_line_that_cannot_be_taken_back_is_not_read(
    store: ImageLayout, models: tuple[Manifest, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = models
    store.tag(two.descriptor, parse("before:v1"))
    before = read_names(store)
    with monkeypatch.context() as patch:
        Disk(patch, (module, "sync_file"), (os, "ftruncate"))
        with pytest.raises(StoreError, match="Input/output"):
            store.tag(two.descriptor, parse("m1:v1"))
        assert read_names(store) == before
    store.tag(one.descriptor, parse("later:v1"))
    assert read_names(store) == before | {"later:v1": one.digest}
    # Nor by other processes, since that change has written the index
    monkeypatch.setattr(module, "_untrusted", {})
    assert read_names(store) == before | {"later:v1": one.digest}


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
