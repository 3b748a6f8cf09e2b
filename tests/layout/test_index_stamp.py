"""Name records are compared with an index only if aimage did not write it last."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

from clowder_aimage.errors import AImageError
from clowder_aimage.layout import ImageLayout, index_file
from clowder_aimage.layout import index as index_module
from clowder_aimage.layout import index_replacement as replacement
from clowder_aimage.layout.metadata import MetadataFiles
from clowder_aimage.oci import Digest, Manifest, Reference, mediatype
from tests.content.artifact import put_artifact

parse = Reference.parse
# Calls that change the file system
CALLS = ("open", "write", "rename", "replace", "link", "unlink", "mkdir", "utime", "fsync")


@pytest.fixture
def model(store: ImageLayout) -> Manifest:
    made = put_artifact(store, "a:v1", b"one")
    for number in range(30):
        store.tag(made.descriptor, parse(f"m{number}:v1"))
    return made


def read_names(store: ImageLayout) -> dict[str, Digest]:
    return {name: descriptor.digest for name, descriptor in store.list_tags()}


def write_in_place(store: ImageLayout, value: Any) -> None:
    """Overwrite the index as tools do that neither lock nor rename."""
    (store.root / "index.json").write_text(json.dumps(value))


def read_value(store: ImageLayout) -> Any:
    return json.loads((store.root / "index.json").read_bytes())


@contextmanager
def count_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    read, names = MetadataFiles.read, list[str]()

    def count(self: MetadataFiles, name: str) -> Any:
        names.append(name)
        return read(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(MetadataFiles, "read", count)
        yield names


def test_records_of_other_names_are_not_read(
    store: ImageLayout, model: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    verbs: list[Callable[[], object]] = [
        lambda: store.tag(model.descriptor, parse("new:v1")),
        lambda: store.resolve(parse("m3:v1")),
        lambda: read_names(store),
        lambda: store.untag(parse("m3:v1")),
    ]
    for verb in verbs:
        with count_reads(monkeypatch) as names:
            verb()
        assert len(set(names)) <= 1
    write_in_place(store, read_value(store))
    counts = []
    for name in ("second:v1", "third:v1"):
        with count_reads(monkeypatch) as names:
            store.tag(model.descriptor, parse(name))
        counts.append(len(set(names)))
    assert counts[0] >= 30
    assert counts[1] <= 1


def test_other_entries_are_not_parsed(
    store: ImageLayout, model: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> NoReturn:
        pytest.fail("the whole index is parsed")

    for place in (index_module, index_file):
        monkeypatch.setattr(place, "parse_index", fail)
    store.tag(model.descriptor, parse("new:v1"))
    assert store.resolve(parse("new:v1")).digest == model.digest
    assert store.resolve(parse(f"x@{model.digest}")).digest == model.digest
    store.untag(parse("m3:v1"))
    monkeypatch.undo()
    names = {"a:v1", "new:v1"} | {f"m{number}:v1" for number in range(30) if number != 3}
    assert set(read_names(store)) == names
    assert [entry["annotations"][mediatype.REF_NAME] for entry in read_value(store)["manifests"]][
        -1
    ] == "new:v1"


def test_write_of_the_same_size_in_the_same_tick_is_noticed(
    store: ImageLayout, model: Manifest
) -> None:
    """No later write has the time of ours, which is in nanoseconds."""
    other = put_artifact(store, "b:v1", b"two")
    assert other.descriptor.size == model.descriptor.size
    for number in range(20):
        name = f"m{number}:v1"
        store.tag(model.descriptor, parse(name))
        value = read_value(store)
        for entry in value["manifests"]:
            if entry["annotations"][mediatype.REF_NAME] == name:
                entry["digest"] = str(other.digest)
        size = (store.root / "index.json").stat().st_size
        text = json.dumps(value)
        (store.root / "index.json").write_text(text + " " * (size - len(text)))
        assert (store.root / "index.json").stat().st_size == size
        assert store.resolve(parse(name)).digest == other.digest


def test_record_that_changed_after_the_index_is_compared(
    store: ImageLayout, model: Manifest
) -> None:
    """Of a process that was killed between both: the index counts, also once the name is lost."""
    other = put_artifact(store, "b:v1", b"two")
    records = MetadataFiles(store.root, "names")
    entry = (records.get("m3:v1") or {})["entry"] | {"digest": str(other.digest)}
    records.put("m3:v1", {"entry": entry}, durable=True)
    assert store.resolve(parse("m3:v1")).digest == model.digest
    store.tag(model.descriptor, parse("new:v1"))
    write_in_place(store, {"schemaVersion": 2, "manifests": []})
    assert store.resolve(parse("m3:v1")).digest == model.digest


def test_name_whose_manifest_returns_is_restored(store: ImageLayout, model: Manifest) -> None:
    """While one may be restored later, no stamp says that the index has all names."""
    path = store.find_path(put_artifact(store, "b:v1", b"two").descriptor)
    raw = path.read_bytes()
    path.unlink()
    write_in_place(store, {"schemaVersion": 2, "manifests": []})
    store.tag(model.descriptor, parse("new:v1"))
    assert "b:v1" not in read_names(store)
    path.write_bytes(raw)
    assert "b:v1" in read_names(store)


@pytest.mark.parametrize("name", ["model", "model:latest", "host.example/x/model"])
def test_all_spellings_of_a_name_are_found(store: ImageLayout, model: Manifest, name: str) -> None:
    value = read_value(store)
    theirs = model.descriptor.to_json() | {"annotations": {mediatype.REF_NAME: name}}
    write_in_place(store, value | {"manifests": [*value["manifests"], theirs]})
    store.tag(model.descriptor, parse("new:v1"))  # now ours
    other = put_artifact(store, "b:v1", b"two")
    assert store.resolve(parse(name)).digest == model.digest
    store.tag(other.descriptor, parse(name))
    assert store.resolve(parse(name)).digest == other.digest
    store.untag(parse(name))
    assert not [each for each in read_names(store) if "model" in each]


def test_index_is_not_written_larger_than_it_may_be_read(
    store: ImageLayout, model: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_names(store)
    monkeypatch.setattr(replacement, "MAX_INDEX_SIZE", len(encode_file(store)) + 10)
    with pytest.raises(AImageError, match="the limit is"):
        store.tag(model.descriptor, parse("new:v1"))
    assert read_names(store) == before


def encode_file(store: ImageLayout) -> bytes:
    return (store.root / "index.json").read_bytes()


# -- kills


class _KilledError(BaseException):
    """No further call changes the file system."""


@contextmanager
def kill_at(position: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Raise an error at a call that changes the file system, and at all later ones."""
    done: list[str] = []

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def check(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & (os.O_CREAT | os.O_TRUNC):
                return call(*arguments, **options)
            done.append(name)
            if len(done) > position:
                raise _KilledError
            return call(*arguments, **options)

        return check

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield done


def drop_names(store: ImageLayout, _: dict[str, Digest]) -> None:
    write_in_place(store, {"schemaVersion": 2, "manifests": []})


def rewrite(store: ImageLayout, _: dict[str, Digest]) -> None:
    write_in_place(store, read_value(store))


def remove_index(store: ImageLayout, _: dict[str, Digest]) -> None:
    (store.root / "index.json").unlink()


def do_nothing(_: ImageLayout, __: dict[str, Digest]) -> None:
    pass


def tag_another(store: ImageLayout, names: dict[str, Digest]) -> None:
    store.tag(store.resolve(parse("a:v1")), parse("another:v1"))
    names["another:v1"] = names["a:v1"]


@pytest.mark.parametrize("verb", ["tag", "move", "untag"])
@pytest.mark.parametrize("first", [do_nothing, tag_another], ids=["at once", "after a tag"])
def test_no_kill_undoes_a_name_or_a_removal(
    store: ImageLayout,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    first: Callable[[ImageLayout, dict[str, Digest]], None],
) -> None:
    """At each call of a verb; then another tool drops names or replaces the index."""
    one = put_artifact(store, "a:v1", b"one")
    two = put_artifact(store, "b:v1", b"two")
    others = [drop_names, rewrite, remove_index]
    names, position, is_killed = read_names(store), 0, True
    while is_killed:
        name = "x:v1"
        if verb != "tag":
            store.tag(one.descriptor, parse(name))
        elif name in read_names(store):
            store.untag(parse(name))
        before: set[Digest | None] = {None} if verb == "tag" else {one.digest}
        after = None if verb == "untag" else two.digest
        with kill_at(position, monkeypatch) as done:
            try:
                if verb == "untag":
                    store.untag(parse(name))
                else:
                    store.tag(two.descriptor, parse(name))
            except _KilledError:
                before = {*before, after}
            else:
                before = {after}
        is_killed = len(done) > position
        visible = read_names(store)
        assert visible.get(name) in before
        names.pop(name, None)
        assert visible == names | ({name: visible[name]} if name in visible else {})
        first(store, names)
        visible = read_names(store)
        others[position % 3](store, names)
        # Of the call that was killed, either state is right
        left = read_names(store)
        assert left.pop(name, None) in before
        assert left == names
        store.tag(one.descriptor, parse("a:v1"))
        visible = read_names(store)
        assert visible.pop(name, None) in before
        assert visible == names
        drop_names(store, names)
        assert names.items() <= read_names(store).items()
        position += 1
    assert position > 15


def test_a_name_is_kept_where_locks_have_no_effect(
    store: ImageLayout, model: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process tags after the last look at the index, before it is replaced."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    replace = replacement.replace_file

    def replace_late(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(replacement, "replace_file", replace)
        store.tag(model.descriptor, parse("theirs:v1"))
        return replace(*arguments, **options)

    monkeypatch.setattr(replacement, "replace_file", replace_late)
    store.tag(model.descriptor, parse("ours:v1"))
    assert {"ours:v1", "theirs:v1"} <= read_names(store).keys()
    # A name of another process must not be lost by what is written next
    store.tag(model.descriptor, parse("later:v1"))
    assert {"ours:v1", "theirs:v1", "later:v1"} <= read_names(store).keys()
