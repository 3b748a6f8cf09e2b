"""The order of writes and synchronisations: a power cut at any moment breaks no guarantee."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.crash.power import (
    Disk,
    blob_path,
    check_replayed,
    read_log,
    record_path,
    violations,
    write_down,
)
from tests.crash.scene import Job, Place, Places, side_by_side

FEW = 1  # call numbers of a command
STATES = ["pessimistic", "torn", "empty"]


def record(job: Job, places: Places) -> tuple[Place, Disk, list[tuple[dict[str, Any], bytes]]]:
    """Return a command's calls, and the disk before them."""
    place = places.new(job.template)
    disk, log = Disk.of(place.top), place.directory / "log"
    done = place.run(*job.argv, log=log)
    assert done.code == 0, done.err
    return place, disk, read_log(log)


def test_a_power_cut_breaks_no_guarantee(job: Job, places: Places) -> None:
    """For the recorded calls, which are complete."""
    place, disk, calls = record(job, places)
    assert calls
    assert violations(copy.deepcopy(disk), calls) == []
    for call, data in calls:
        disk.apply(call, data)
    check_replayed(disk, place.top)


def cut(job: Job, places: Places, before: Disk, calls: Any, number: int, state: str) -> None:
    """Cut the power before a call; then run the same command again."""
    disk = copy.deepcopy(before)
    for call, data in calls[:number]:
        disk.apply(call, data)
    place = places.new()
    place.boot = "after-the-power-cut"
    write_down(getattr(disk, state)(), place.top)
    try:
        job.check_broken(place)
        job.finish(place)
    except AssertionError as error:
        error.add_note(f"{job.verb}, cut before call {number}, {state}, {place.directory}")
        raise
    places.drop(place)


def cut_at(job: Job, places: Places, numbers: range | list[int]) -> None:
    _, before, calls = record(job, places)
    side_by_side(
        [
            partial(cut, job, places, before, calls, min(number, len(calls)), state)
            for number in numbers
            for state in STATES
        ]
    )


def test_the_command_completes_after_a_power_cut(job: Job, places: Places) -> None:
    cut_at(job, places, random.sample(range(job.calls + 1), FEW))


@pytest.mark.slow
def test_the_command_completes_after_a_power_cut_at_any_call(job: Job, places: Places) -> None:
    cut_at(job, places, range(job.calls + 1))


# -- the model itself


class Calls:
    """Synthetic calls on an empty disk."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self._numbers: dict[str, int] = {}

    def add(self, op: str, path: str, data: bytes = b"", **more: Any) -> None:
        if path in self._numbers:
            more["ino"] = self._numbers[path]
        self.calls.append(({"op": op, "path": path, **more}, data))

    def make(self, op: Any, path: str) -> None:
        self._numbers[path] = 1 + max(self._numbers.values(), default=0)
        self.add(op, path, mode=0o755)

    def write(self, path: str, data: bytes, offset: int = 0) -> None:
        if path not in self._numbers:
            self.make("create", path)
        self.add("write", path, data, offset=offset)

    def rename(self, path: str, to: str) -> None:
        self.add("rename", path, to=to)
        self._numbers[to] = self._numbers.pop(path)


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


CHILD, CONFIG = b"child", b"{}"
MANIFEST = json.dumps(
    {"config": {"digest": digest(CONFIG)}, "layers": [{"digest": digest(CHILD)}]}
).encode()
ENTRY = {"digest": digest(MANIFEST), "annotations": {"io.containerd.image.name": "a:v1"}}
INDEX = json.dumps({"manifests": [ENTRY]}).encode()
NOTHING = json.dumps({"manifests": []}).encode()
BLOBS, INGEST, NAMES = "store/blobs/sha256", "store/.aimage/ingest", "store/.aimage/names"
DIRECTORIES = [".", "store", "store/blobs", BLOBS, "store/.aimage", INGEST, NAMES]
PARTIAL, JOURNAL = f"{INGEST}/x", f"{INGEST}/x.journal"
PLACED = [blob_path(digest(data)) for data in (CHILD, CONFIG, MANIFEST)]
RECORD = record_path("a:v1")


def replace_index(made: Calls, data: bytes = INDEX) -> None:
    made.write(f"{INGEST}/index", data)
    made.add("sync", f"{INGEST}/index")
    made.rename(f"{INGEST}/index", "store/index.json")
    made.add("sync", "store")


def prepare(made: Calls) -> None:
    for path in DIRECTORIES[1:]:
        made.make("mkdir", path)
    made.write("store/oci-layout", b"{}")
    for path in [*DIRECTORIES, "store/oci-layout"]:
        made.add("sync", path)


def name_one() -> Calls:
    """Write an artifact and its name in the right order."""
    made = Calls()
    prepare(made)
    for data, path in zip((CHILD, CONFIG, MANIFEST), PLACED, strict=True):
        made.write(PARTIAL, data)
        made.add("sync", PARTIAL)
        made.rename(PARTIAL, path)
    made.add("sync", BLOBS)
    made.write(RECORD, json.dumps({"entry": ENTRY}).encode())
    made.add("sync", RECORD)
    made.add("sync", NAMES)
    replace_index(made)
    return made


def name_and_forget() -> Calls:
    made = name_one()
    made.add("unlink", RECORD)
    made.add("sync", NAMES)
    replace_index(made, NOTHING)
    made.add("unlink", PLACED[0])
    return made


def found(calls: list[Any]) -> list[str]:
    return violations(Disk(), calls)


def test_the_right_order_breaks_no_guarantee() -> None:
    assert found(name_one().calls) == []
    assert found(name_and_forget().calls) == []


SPARE = {(INGEST, 0), (BLOBS, 0), (NAMES, 0)}  # the directories were empty


@pytest.mark.parametrize(
    ("make", "spare"), [(name_one, SPARE), (name_and_forget, {*SPARE, ("store", 1)})]
)
def test_every_omitted_synchronisation_is_a_violation(
    make: Callable[[], Calls], spare: set[tuple[str, int]]
) -> None:
    calls = make().calls
    times: Counter[str] = Counter()
    for number, (call, _) in enumerate(calls):
        if call["op"] != "sync":
            continue
        place = call["path"], times[call["path"]]
        times[call["path"]] += 1
        left = found([*calls[:number], *calls[number + 1 :]])
        assert bool(left) != (place in spare), f"{place}: {left}"


def test_one_call_may_synchronise_everything() -> None:
    calls = name_one().calls
    place = next(n for n, (call, _) in enumerate(calls) if call["path"] == RECORD)
    rest = [one for one in calls[:place] if one[0]["op"] != "sync"]
    assert found([*rest, *calls[place:]])
    assert found([*rest, ({"op": "syncfs", "path": "."}, b""), *calls[place:]])  # too late
    late = next(n for n, (call, _) in enumerate(rest) if call["op"] == "rename")
    assert found([*rest[:late], ({"op": "syncfs", "path": "."}, b""), *rest[late:]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda made: made.write(PLACED[0], b"X"), "may be torn under its final name"),
        (lambda made: made.add("unlink", PLACED[0]), "a blob of it may be lost"),
        (lambda made: made.add("unlink", PLACED[2]), f"{digest(MANIFEST)} may be lost"),
        (lambda made: replace_index(made, NOTHING), "its record may stay"),
        (lambda made: made.write("store/index.json", b"x"), "index.json may be torn"),
    ],
    ids=["written", "blob removed", "manifest removed", "forgotten", "index in place"],
)
def test_violations_names_the_broken_guarantee(change: Callable[[Any], Any], said: str) -> None:
    made = name_one()
    change(made)
    assert any(said in text for text in found(made.calls))


def test_violations_names_a_blob_under_another_name() -> None:
    made = Calls()
    prepare(made)
    made.write(f"{INGEST}/x", b"other")
    made.add("sync", f"{INGEST}/x")
    made.rename(f"{INGEST}/x", PLACED[0])
    assert any("is not what its name says" in text for text in found(made.calls))


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("data sync note keep data sync note keep", ""),
        ("data note sync keep", "the journal notes 0-10"),
        ("data sync note gone", "was not synchronised"),
        ("data sync note keep gone", ""),
        ("data sync note data sync note", "was not synchronised"),
        ("data sync data note", "the journal notes 0-10"),
        ("data mark mark sync note keep mark gone", ""),
        ("data mark note", "the journal notes 0-10"),
    ],
)
def test_a_journal_entry_requires_synchronised_data(order: str, said: str) -> None:
    made = Calls()
    prepare(made)
    for step in order.split():
        if step == "data":
            made.write(PARTIAL, b"0123456789")
        elif step == "note":
            made.write(JOURNAL, b"\n0-10\n")
        elif step == "mark":
            made.write(JOURNAL, b"\n0-10 boot\n")
        elif step == "gone":
            made.add("unlink", JOURNAL)
        else:
            made.add("sync", PARTIAL if step == "sync" else JOURNAL)
    told = [text for text in found(made.calls) if "journal" in text]
    assert said in str(told) if said else told == []


def test_possible_states_after_a_power_cut() -> None:
    disk, made = Disk(), Calls()
    prepare(made)
    made.write(PARTIAL, b"01234")
    made.add("sync", PARTIAL)
    made.add("sync", INGEST)
    made.write(PARTIAL, b"56789", 5)
    made.write(f"{INGEST}/y", b"01234")
    for call, data in made.calls:
        disk.apply(call, data)
    left = {state: {p: d for p, _, d in getattr(disk, state)()} for state in STATES}
    assert PARTIAL not in left["torn"].keys() - left["pessimistic"].keys()
    assert left["pessimistic"][PARTIAL] == left["empty"][PARTIAL] == b"01234"
    assert f"{INGEST}/y" not in left["pessimistic"]
    assert left["empty"][f"{INGEST}/y"] == b""
    assert left["torn"][PARTIAL] == b"01234" + bytes(5)
    assert left["torn"][f"{INGEST}/y"] == bytes(5)


def test_a_rename_is_durable_with_both_entries_or_neither() -> None:
    disk, made = Disk(), Calls()
    prepare(made)
    made.write(PARTIAL, CHILD)
    made.add("sync", PARTIAL)
    made.add("sync", INGEST)
    made.rename(PARTIAL, PLACED[0])
    for call, data in made.calls:
        disk.apply(call, data)
    assert (disk.surely(PARTIAL), disk.surely(PLACED[0])) == (None, None)
    made.add("sync", BLOBS)
    disk.apply(*made.calls[-1])
    assert disk.possible(PARTIAL) == [None]
    assert disk.surely(PLACED[0]) is not None
