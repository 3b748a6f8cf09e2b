"""Possible disk contents after a power cut: a pure model of recorded calls.

Only synchronised data is guaranteed: a file's bytes after its fsync, a name after the fsync of
its directory. Each later change may be present or not, independently. ``Disk`` replays the
calls; ``violations`` lists where a possible state would break a guarantee of the store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

STORE = "store"
_LASTING = (f"{STORE}/.aimage/names/", f"{STORE}/.aimage/pins/")
_NAME = "io.containerd.image.name"
Entries = dict[str, "Node"]
Span = tuple[int, int]


@dataclass(eq=False)
class Node:
    """A file or a directory. ``sure`` is what is guaranteed after a power cut."""

    is_directory: bool
    mode: int = 0o644
    data: bytearray = field(default_factory=bytearray)
    sure: bytes = b""
    unsure: list[Span] = field(default_factory=list)  # written since the last synchronisation
    entries: Entries = field(default_factory=dict)
    sure_entries: Entries = field(default_factory=dict)
    changes: dict[str, list[Change]] = field(default_factory=dict)  # changed since then, by name

    @property
    def is_clean(self) -> bool:
        return not self.unsure

    def synchronise(self) -> None:
        if self.is_directory:
            for change in [change for some in self.changes.values() for change in some]:
                self.settle(change)
                if change.twin is not None:
                    change.twin.place.settle(change.twin)
        elif self.unsure:
            self.sure, self.unsure = bytes(self.data), []

    def put(self, name: str, node: Node | None) -> Change:
        _set(self.entries, name, node)
        change = Change(self, name, node)
        self.changes.setdefault(name, []).append(change)
        return change

    def settle(self, change: Change) -> None:
        """Mark a change as on disk, with all earlier changes of the same name."""
        found = self.changes.get(change.name, [])
        if change in found:
            _set(self.sure_entries, change.name, change.node)
            del found[: found.index(change) + 1]

    def candidates(self, name: str) -> list[Node | None]:
        """Return everything that the name may refer to after a power cut."""
        later = [change.node for change in self.changes.get(name, ())]
        return list(dict.fromkeys([self.sure_entries.get(name), *later]))

    def write(self, offset: int, data: bytes) -> None:
        self.data.extend(bytes(max(0, offset - len(self.data))))
        self.data[offset : offset + len(data)] = data
        self.unsure.append((offset, offset + len(data)))

    def truncate(self, length: int) -> None:
        low, high = sorted((length, len(self.data)))
        del self.data[length:]
        self.data.extend(bytes(length - len(self.data)))
        if low < high:
            self.unsure.append((low, high))


@dataclass(eq=False)
class Change:
    """A change of a directory entry.

    Both changes of a rename are on disk or neither: file systems journal them.
    """

    place: Node
    name: str
    node: Node | None
    twin: Change | None = None


def _set(entries: Entries, name: str, node: Node | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


class Disk:
    """The files in a directory, as seen by processes and as possible on disk."""

    def __init__(self) -> None:
        self.top = Node(True, 0o755)
        self._numbers: dict[int, Node] = {}

    @classmethod
    def of(cls, directory: Path) -> Disk:
        """Return the current files as fully synchronised."""
        disk = cls()
        for path in sorted(directory.rglob("*")):
            status = path.lstat()
            node = Node(path.is_dir(), status.st_mode & 0o7777)
            if not node.is_directory:
                node.sure = path.read_bytes()
                node.data = bytearray(node.sure)
            disk._numbers[status.st_ino] = node
            parent, name = disk._parent(str(path.relative_to(directory)))
            parent.entries[name] = parent.sure_entries[name] = node
        return disk

    def _parent(self, path: str) -> tuple[Node, str]:
        *parents, name = PurePosixPath(path).parts
        node = self.top
        for part in parents:
            node = node.entries[part]
        return node, name

    def find(self, path: str) -> Node | None:
        """Return what processes see under a path."""
        node: Node | None = self.top
        for part in PurePosixPath(path).parts:
            node = node.entries.get(part) if node else None
        return node

    def possible(self, path: str) -> list[Node | None]:
        """Return everything that a path may refer to after a power cut."""
        found: list[Node | None] = [self.top]
        for part in PurePosixPath(path).parts:
            below = [node.candidates(part) if node else [None] for node in found]
            found = list(dict.fromkeys(one for some in below for one in some))
        return found

    def surely(self, path: str) -> Node | None:
        """Return what a path is guaranteed to refer to, with its bytes, or None."""
        found = self.possible(path)
        return found[0] if len(found) == 1 and found[0] and found[0].is_clean else None

    def walk(self) -> Iterator[tuple[str, Node]]:
        """Return all files that processes see."""
        return _walk(self.top, "", lambda node: node.entries)

    def apply(self, call: dict[str, Any], data: bytes = b"") -> None:  # noqa: C901 - a row per call
        """Replay a call; ``data`` is what it wrote."""
        op, path = call["op"], call["path"]
        if op in ("create", "mkdir"):
            parent, name = self._parent(path)
            node = Node(op == "mkdir", call["mode"])
            self._numbers[call["ino"]] = node
            parent.put(name, node)
        elif op == "write":
            self._numbers[call["ino"]].write(call["offset"], data)
        elif op == "truncate":
            self._numbers[call["ino"]].truncate(call["length"])
        elif op == "chmod":
            self._numbers[call["ino"]].mode = call["mode"]
        elif op == "sync":
            (self._numbers[call["ino"]] if path != "." else self.top).synchronise()
        elif op == "syncfs":
            for _, node in self.walk():
                node.synchronise()
        elif op in ("unlink", "rmdir"):
            parent, name = self._parent(path)
            parent.put(name, None)
        elif op == "rename":
            (old, name), (new, to) = self._parent(path), self._parent(call["to"])
            came = new.put(to, old.entries[name])
            came.twin = old.put(name, None)
            came.twin.twin = came
        elif op != "utime":
            raise AssertionError(f"{op} has no place in the model")

    # -- states after a power cut

    def pessimistic(self) -> Iterator[tuple[str, Node, bytes]]:
        """Return what is guaranteed, and nothing else."""
        for path, node in _walk(self.top, "", lambda node: node.sure_entries):
            yield path, node, node.sure

    def torn(self) -> Iterator[tuple[str, Node, bytes]]:
        """Return every former name; unsynchronised data is zeros."""
        for path, node in self.walk():
            yield path, node, node.sure[: len(node.data)].ljust(len(node.data), b"\0")

    def empty(self) -> Iterator[tuple[str, Node, bytes]]:
        """Return every former name; unsynchronised files have their former length."""
        for path, node in self.walk():
            yield path, node, node.sure


def _walk(node: Node, path: str, entries: Callable[[Node], Entries]) -> Iterator[tuple[str, Node]]:
    if path or node.is_directory:
        yield path or ".", node
    for name, below in entries(node).items():
        yield from _walk(below, f"{path}/{name}".lstrip("/"), entries)


def write_down(state: Iterable[tuple[str, Node, bytes]], directory: Path) -> None:
    """Write the state to files."""
    for path, node, data in state:
        place = directory / path
        if node.is_directory:
            place.mkdir(exist_ok=True)
        else:
            place.write_bytes(data)
            place.chmod(node.mode)


def check_replayed(disk: Disk, directory: Path) -> None:
    """Verify that the replayed calls produce the actual files."""
    there = {str(path.relative_to(directory)): path for path in directory.rglob("*")}
    seen = {path: node for path, node in disk.walk() if path != "."}
    assert seen.keys() == there.keys()
    for name, path in there.items():
        assert seen[name].is_directory == path.is_dir()
        assert seen[name].is_directory or seen[name].data == path.read_bytes(), name
        assert seen[name].is_directory or seen[name].mode == path.stat().st_mode & 0o7777, name


# -- guarantees


def violations(disk: Disk, calls: Sequence[tuple[dict[str, Any], bytes]]) -> list[str]:
    """Return the violations possible after a power cut at any moment.

    Args:
        disk: The state before the first call.
        calls: Recorded calls, which end with those of a successful command.
    """
    watch = _Watch(disk)
    for number, (call, data) in enumerate(calls):
        watch.before(call, data)
        disk.apply(call, data)
        watch.after()
        for text in watch.found:
            watch.told.setdefault(text, number)
        watch.found.clear()
    watch.at_the_end()
    return [f"call {n}: {text}" for text, n in watch.told.items()] + watch.found


class _Watch:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._digests: dict[int, tuple[Node, str]] = {}
        self._documents: dict[int, tuple[Node, Any]] = {}
        self.found: list[str] = []
        self.told: dict[str, int] = {}

    # -- before a call: forbidden calls

    def before(self, call: dict[str, Any], data: bytes) -> None:
        if call["op"] == "rename" and call["to"] == f"{STORE}/index.json":
            self._check_records(self._disk.find(call["path"]))
        if call["path"].endswith(".journal") and call["op"] in ("write", "unlink"):
            self._check_journal(call, data)

    def _check_records(self, new: Node | None) -> None:
        """Verify that names are recorded, or removed, before the index is written."""
        old = self._named(self._disk.find(f"{STORE}/index.json"))
        named = self._named(new)
        for name, digest in (named.items() | old.items()) - (named.items() & old.items()):
            path = record_path(name)
            record = self._disk.surely(path)
            if name in named and digest == named[name]:
                said = self._document(record)["entry"]["digest"] if record else None
                if said != digest:
                    self.found.append(f"index.json names {name}, and its record may be lost")
            elif name not in named and self._disk.possible(path) != [None]:
                self.found.append(f"index.json forgets {name}, and its record may stay")

    def _check_journal(self, call: dict[str, Any], data: bytes) -> None:
        journal = self._disk.find(call["path"])
        node = self._disk.find(call["path"].removesuffix(".journal"))
        unsure = journal.unsure if journal else ()
        if journal and any(_list_lasting(journal.data[low:high]) for low, high in unsure):
            self.found.append("a line of the journal was not synchronised")
        for line in _list_lasting(data):
            for span in line.split(","):
                start, end = map(int, span.split("-"))
                wrong = node is None or end > len(node.sure)
                if wrong or any(low < end and start < high for low, high in node.unsure):  # type: ignore[union-attr]
                    self.found.append(f"the journal notes {span}, which may be lost")

    # -- after a call: possible states

    def after(self) -> None:
        for index in self._disk.possible(f"{STORE}/index.json"):
            if index is not None and not index.is_clean:
                self.found.append("index.json may be torn")
            elif index is not None:
                for name, digest in self._named(index).items():
                    self._check_document(name, digest)
        for place in self._disk.possible(f"{STORE}/blobs"):
            self._check_blobs(place)

    def _check_document(self, name: str, digest: str) -> None:
        node = self._disk.surely(blob_path(digest))
        if node is None:
            self.found.append(f"index.json may name {name}, and {digest} may be lost")
            return
        document = self._document(node)
        for child in [document["config"], *document["layers"]]:
            if self._disk.surely(blob_path(child["digest"])) is None:
                self.found.append(f"index.json may name {name}, and a blob of it may be lost")

    def _check_blobs(self, place: Node | None) -> None:
        for algorithm in {*place.sure_entries, *place.changes} if place else ():
            for directory in place.candidates(algorithm) if place else ():
                for name in {*directory.sure_entries, *directory.changes} if directory else ():
                    for node in directory.candidates(name) if directory else ():
                        self._check_blob(f"{algorithm}:{name}", node)

    def _check_blob(self, digest: str, node: Node | None) -> None:
        if node is None:
            return
        if not node.is_clean:
            self.found.append(f"{digest} may be torn under its final name")
        elif self._digest(node, digest.partition(":")[0]) != digest:
            self.found.append(f"{digest} is not what its name says")

    def at_the_end(self) -> None:
        """Verify that a successful command's changes are durable."""
        for path in ("index.json", "oci-layout"):
            if self._disk.surely(f"{STORE}/{path}") is None:
                self.found.append(f"at the end: {path} may be lost")
        for path, node in self._disk.walk():
            is_fact = path.startswith(_LASTING) and not node.is_directory
            if is_fact and self._disk.surely(path) is not node:
                self.found.append(f"at the end: {path} may be lost")

    # -- documents

    def _named(self, index: Node | None) -> dict[str, str]:
        entries = self._document(index)["manifests"] if index else []
        return {entry["annotations"][_NAME]: entry["digest"] for entry in entries}

    def _document(self, node: Node | None) -> Any:
        assert node is not None
        if id(node) not in self._documents:
            self._documents[id(node)] = node, json.loads(node.data)
        return self._documents[id(node)][1]

    def _digest(self, node: Node, algorithm: str) -> str:
        if id(node) not in self._digests:
            hasher = hashlib.new(algorithm, node.data)
            self._digests[id(node)] = node, f"{algorithm}:{hasher.hexdigest()}"
        return self._digests[id(node)][1]


def _list_lasting(data: bytes | bytearray) -> list[str]:
    """Return the lines of a journal that count after a power cut: those without an ID."""
    return [line for line in data.decode().split("\n") if line and " " not in line]


def blob_path(digest: str) -> str:
    return f"{STORE}/blobs/{digest.replace(':', '/')}"


def record_path(name: str) -> str:
    encoded = hashlib.sha256(name.encode()).hexdigest()[:40]
    return f"{STORE}/.aimage/names/{encoded}"


def read_log(log: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Return the calls that a recorder logged, with the data written."""
    data = log.with_name(f"{log.name}.data").read_bytes()
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    return [
        (call, data[call["at"] :][: call["size"]] if call["op"] == "write" else b"")
        for call in calls
    ]
