"""Names shared with tools that use no locks: neither side loses its entries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clowder_aimage.errors import NotFoundError, StoreError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout import index_replacement as replacement
from clowder_aimage.layout.index import edit_index
from clowder_aimage.layout.index_file import read_index_stamp
from clowder_aimage.oci import Digest, Manifest, Reference, mediatype
from tests.content.artifact import put_artifact
from tests.process import run, spawn

ROOT = Path(__file__).parent.parent.parent
WRITERS, NAMES = 4, 25


def ref(name: str) -> Reference:
    return Reference.parse(name)


def file_of(store: ImageLayout) -> Path:
    return store.root / "index.json"


def listed(store: ImageLayout) -> list[Any]:
    """Return the names in index.json as other tools see them."""
    value = json.loads(file_of(store).read_bytes())
    entries = [entry for entry in value["manifests"] if isinstance(entry, dict)]
    return [entry.get("annotations", {}).get(mediatype.REF_NAME) for entry in entries]


def names(store: ImageLayout) -> set[Any]:
    return {name for name, _ in store.list_tags()}


def entry(made: Manifest, name: str | int | None = None, **fields: Any) -> dict[str, Any]:
    """Return an entry as written by another tool."""
    value = made.descriptor.to_json() | fields
    return value | {"annotations": {mediatype.REF_NAME: name}} if name else value


def overwrite(store: ImageLayout, *entries: Any, **fields: Any) -> None:
    """Overwrite the index as another tool does, with content read long before."""
    value = {"schemaVersion": 2, "manifests": list(entries), **fields}
    beside = store.root / "index.foreign"
    beside.write_text(json.dumps(value))
    beside.replace(file_of(store))


# -- entries that other tools drop, add and change


def test_a_name_dropped_by_another_tool_is_restored(store: ImageLayout) -> None:
    made = {name: put_artifact(store, name, name.encode()) for name in ("a:v1", "b:v1")}
    theirs = put_artifact(store, "theirs:v1", b"theirs")
    store.untag(ref("theirs:v1"))
    overwrite(store, entry(theirs, "theirs:v1"))
    assert names(store) == {"a:v1", "b:v1", "theirs:v1"}
    assert store.resolve(ref("a:v1")).digest == made["a:v1"].digest
    assert listed(store) == ["theirs:v1"]  # a read writes nothing
    store.tag(made["a:v1"].descriptor, ref("c:v1"))
    assert sorted(listed(store)) == ["a:v1", "b:v1", "c:v1", "theirs:v1"]


def test_index_removed_by_another_tool_is_restored(store: ImageLayout) -> None:
    put_artifact(store, "a:v1", b"one")
    file_of(store).unlink()
    assert names(store) == {"a:v1"}
    put_artifact(store, "b:v1", b"two")
    assert sorted(listed(store)) == ["a:v1", "b:v1"]


def test_name_reassigned_by_another_tool_is_kept(store: ImageLayout) -> None:
    ours = put_artifact(store, "a:v1", b"one")
    theirs = put_artifact(store, "b:v1", b"two")
    overwrite(store, entry(theirs, "a:v1"))
    assert store.resolve(ref("a:v1")).digest == theirs.digest
    store.tag(ours.descriptor, ref("c:v1"))
    assert store.resolve(ref("a:v1")).digest == theirs.digest
    assert sorted(listed(store)) == ["a:v1", "b:v1", "c:v1"]


def test_former_target_of_a_reassigned_name_is_not_restored(store: ImageLayout) -> None:
    """Once one of our commands has read it; per name, and with the first entry of two."""
    ours = put_artifact(store, "a:v1", b"one")
    theirs, third = (put_artifact(store, name, name.encode()) for name in ("b:v1", "c:v1"))
    overwrite(store, entry(theirs, "a:v1", x=1), entry(third, "a:v1"), entry(theirs, "b:v1"))
    store.tag(ours.descriptor, ref("d:v1"))
    overwrite(store)
    found = dict(store.list_tags())
    assert found["a:v1"].digest == theirs.digest
    assert found["a:v1"].extra["x"] == 1
    assert found["c:v1"].digest == third.digest
    store.untag(ref("a:v1"))
    overwrite(store)
    assert "a:v1" not in names(store)


def test_a_removed_name_is_not_restored(store: ImageLayout) -> None:
    made = put_artifact(store, "a:v1", b"one")
    put_artifact(store, "b:v1", b"two")
    store.untag(ref("a:v1"))
    assert names(store) == {"b:v1"}
    overwrite(store)  # an old copy, from before both
    assert names(store) == {"b:v1"}
    store.tag(made.descriptor, ref("c:v1"))
    assert sorted(listed(store)) == ["b:v1", "c:v1"]


def test_a_name_in_our_records_only_can_be_removed(store: ImageLayout) -> None:
    put_artifact(store, "a:v1", b"one")
    overwrite(store)
    store.untag(ref("a:v1"))
    assert names(store) == set()
    with pytest.raises(NotFoundError):
        store.untag(ref("a:v1"))


def test_a_short_name_of_another_tool_is_removed_once(store: ImageLayout) -> None:
    """``a`` is ``a:latest``; our record must not restore it."""
    made = put_artifact(store, "a", b"one")
    overwrite(store, entry(made, "a"))
    store.untag(ref("a"))
    assert names(store) == set()
    overwrite(store)
    assert names(store) == set()


@pytest.mark.parametrize("left", [None, b"{}"], ids=["gone", "cut"])
def test_a_name_without_its_manifest_is_not_restored(
    store: ImageLayout, left: bytes | None
) -> None:
    made = put_artifact(store, "a:v1", b"one")
    put_artifact(store, "b:v1", b"two")
    path = store.find_path(made.descriptor)
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    overwrite(store)
    assert names(store) == {"b:v1"}


def test_malformed_name_records_are_ignored(store: ImageLayout) -> None:
    put_artifact(store, "a:v1", b"one")
    directory = store.root / ".aimage" / "names"
    for number, raw in enumerate(
        [b"", b"{", b"[]", b'{"key": 7}', b'{"key": "x"}', b'{"key": "x", "entry": {"digest": 7}}']
    ):
        (directory / f"{number:040}").write_bytes(raw)
    (directory / ("f" * 40)).mkdir()
    overwrite(store)
    assert names(store) == {"a:v1"}
    put_artifact(store, "b:v1", b"two")
    assert sorted(listed(store)) == ["a:v1", "b:v1"]


def test_restored_entry_has_the_fields_of_other_tools(store: ImageLayout) -> None:
    """After we have written the entry once."""
    made = put_artifact(store, "a:v1", b"one")
    overwrite(store, entry(made, "a:v1", platform={"os": "linux"}), **{"x-top": [1]})
    store.tag(made.descriptor, ref("a:v1"))
    overwrite(store)
    (found,) = store.iter_entries()
    assert found[1].extra["platform"] == {"os": "linux"}


def test_failed_index_write_sets_no_name(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (put_artifact(store, name, name.encode()) for name in ("a:v1", "b:v1"))

    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(replacement, "write_shared", full)
    for name in ("a:v1", "c:v1"):
        with pytest.raises(Exception, match="no space left"):
            store.tag(two.descriptor, ref(name))
    assert names(store) == {"a:v1", "b:v1"}
    assert store.resolve(ref("a:v1")).digest == one.digest
    monkeypatch.undo()
    overwrite(store)
    assert names(store) == {"a:v1", "b:v1"}
    assert store.resolve(ref("a:v1")).digest == one.digest


# -- concurrent writes by another tool


def test_reads_wait_for_an_index_being_written_in_place(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truncated, partial, complete: each read finds more of it."""
    made = put_artifact(store, "a:v1", b"one")
    whole = file_of(store).read_bytes()
    states = [whole[: len(whole) // 2], whole[:-3], whole]
    file_of(store).write_bytes(b"")
    monkeypatch.setattr(time, "sleep", lambda _: file_of(store).write_bytes(states.pop(0)))
    assert store.resolve(ref("a:v1")).digest == made.digest
    assert states == []


def test_index_broken_long_ago_is_not_waited_for(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_artifact(store, "a:v1", b"one")
    file_of(store).write_bytes(b'{"manifests": [')
    os.utime(file_of(store), (time.time() - 60,) * 2)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(StoreError, match="not an OCI index"):
        list(store.list_tags())


def test_index_that_stays_broken_is_an_error(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_artifact(store, "a:v1", b"one")
    file_of(store).write_bytes(b'{"manifests": [')
    looks: list[Any] = []
    monkeypatch.setattr(time, "sleep", looks.append)
    with pytest.raises(StoreError, match="not an OCI index"):
        list(store.list_tags())
    assert sum(looks) < 1


def test_half_written_index_is_not_overwritten(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our entry is added after the other tool's write is complete."""
    made = put_artifact(store, "a:v1", b"one")
    theirs = entry(put_artifact(store, "b:v1", b"two"), "theirs:v1")
    whole = json.dumps({"schemaVersion": 2, "manifests": [theirs]}).encode()
    states = [whole]
    file_of(store).write_bytes(whole[:40])
    monkeypatch.setattr(time, "sleep", lambda _: file_of(store).write_bytes(states.pop(0)))
    store.tag(made.descriptor, ref("c:v1"))
    assert sorted(listed(store)) == ["a:v1", "b:v1", "c:v1", "theirs:v1"]


@pytest.mark.parametrize("name", ["theirs:v1", "Not A Reference!", None, 7], ids=repr)
def test_entries_added_between_read_and_write_are_kept(
    store: ImageLayout, name: str | int | None
) -> None:
    made = put_artifact(store, "a:v1", b"one")
    before = json.loads(file_of(store).read_bytes())["manifests"]
    added = entry(made, name, x=[None])
    with edit_index(store.root) as index:
        index["manifests"].append(entry(made, "ours:v1"))
        overwrite(store, *before, added, "what", None)
    value = json.loads(file_of(store).read_bytes())["manifests"]
    assert value == [*before, entry(made, "ours:v1"), added, "what", None]


def test_last_writer_of_a_name_wins(store: ImageLayout) -> None:
    """Another tool's name set during our write of another one is kept; ours wins for its own."""
    one, two, three = (put_artifact(store, name, name.encode()) for name in ("a:v1", "b:v1", "c"))
    before = json.loads(file_of(store).read_bytes())["manifests"]
    with edit_index(store.root) as index:
        index["manifests"][1] = entry(three, "b:v1")
        overwrite(store, entry(two, "a:v1"), entry(one, "b:v1"), before[2])
    assert store.resolve(ref("a:v1")).digest == two.digest
    assert store.resolve(ref("b:v1")).digest == three.digest
    assert len(listed(store)) == 3


def test_index_that_changes_repeatedly_is_merged(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every entry is kept, however often the file changes meanwhile."""
    made = put_artifact(store, "a:v1", b"one")
    theirs: list[Any] = []
    stamp_of = read_index_stamp

    def just_before(root: Path) -> tuple[int, ...] | None:
        if len(theirs) < 5:
            theirs.append(entry(made, f"theirs{len(theirs)}:v1"))
            overwrite(store, *theirs)
        return stamp_of(root)

    monkeypatch.setattr(replacement, "read_index_stamp", just_before)
    store.tag(made.descriptor, ref("b:v1"))
    assert sorted(listed(store)) == ["a:v1", "b:v1", *(f"theirs{n}:v1" for n in range(5))]


def test_index_created_by_both_at_once_is_merged(store: ImageLayout) -> None:
    made = put_artifact(store, "a:v1", b"one")
    file_of(store).unlink()
    with edit_index(store.root) as index:
        index["manifests"].append(entry(made, "ours:v1"))
        overwrite(store, entry(made, "theirs:v1"), **{"x-top": 1})
    assert sorted(listed(store)) == ["a:v1", "ours:v1", "theirs:v1"]


# -- many processes


def writers(root: Path, count: int = WRITERS, names: int = NAMES) -> list[Any]:
    """Start processes that each tag this many artifacts and fail on any error."""
    program = Path(__file__).parent / "layout_writer.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return [
        spawn(
            [sys.executable, str(program), str(root), str(who), str(names)],
            env=environment,
            stderr=subprocess.PIPE,
        )
        for who in range(count)
    ]


def ended(processes: Any) -> None:
    for process in processes:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said.decode()


def ours(count: int = WRITERS, names: int = NAMES) -> set[Any]:
    return {f"writer{who}:v{n}" for who in range(count) for n in range(names)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> ImageLayout:
    """Return a layout written by several processes together."""
    store = ImageLayout(tmp_path_factory.mktemp("written") / "store")
    ended(writers(store.root))
    return store


@pytest.mark.integration
def test_skopeo_reads_a_layout_of_several_processes(
    written: ImageLayout, skopeo: str, tmp_path: Path
) -> None:
    for name in ("writer0:v0", f"writer{WRITERS - 1}:v{NAMES - 1}"):
        copied = tmp_path / name.replace(":", "-")
        command = [skopeo, "copy", "-q", f"oci:{written.root}:{name}", f"dir:{copied}"]
        run(command, check=True)
        raw = (copied / "manifest.json").read_bytes()
        assert Digest.of(raw) == written.resolve(ref(name)).digest


@pytest.mark.integration
def test_umoci_reads_a_layout_of_several_processes(written: ImageLayout) -> None:
    umoci = shutil.which("umoci")
    if umoci is None:
        pytest.skip("umoci is not installed")
    done = run([umoci, "ls", "--layout", str(written.root)], check=True, text=True)
    assert set(done.stdout.split()) == ours()


@pytest.mark.integration
def test_concurrent_skopeo_loses_no_name_of_ours(
    store: ImageLayout, skopeo: str, tmp_path: Path
) -> None:
    """skopeo uses no lock: it may lose some of its own names, but none of ours."""
    source = ImageLayout(tmp_path / "source")
    put_artifact(source, "x:v1", b"theirs")
    put_artifact(store, "first:v1", b"first")

    def copy_in(who: Any) -> None:
        for n in range(3):
            target = f"oci:{store.root}:theirs{who}:v{n}"
            command = [skopeo, "copy", "-q", f"oci:{source.root}:x:v1", target]
            run(command)  # skopeo may conflict with itself

    threads = [threading.Thread(target=copy_in, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    ended(writers(store.root, names=10))
    for thread in threads:
        thread.join()
    left = set(listed(store))
    assert any(name.startswith("theirs") for name in left)
    last = put_artifact(store, "last:v1", b"last")  # our next command
    wanted = ours(names=10) | {"first:v1", "last:v1"}
    assert set(listed(store)) == wanted | left
    assert len(listed(store)) == len(wanted | left)
    assert store.resolve(ref("last:v1")).digest == last.digest
    for name, descriptor in store.list_tags():
        assert store.exists(descriptor), name
