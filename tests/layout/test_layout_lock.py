"""Locks between processes, file systems without locks, and stores shared by a group."""

from __future__ import annotations

import errno
import fcntl
import grp
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clowder_aimage.content import copy
from clowder_aimage.content.store import IngestBusyError
from clowder_aimage.errors import StoreError
from clowder_aimage.layout import ImageLayout, lock
from clowder_aimage.layout.gc import Collector
from clowder_aimage.layout.index import edit_index
from clowder_aimage.layout.ingest import JOURNALED
from clowder_aimage.layout.lock import hold_lock
from clowder_aimage.oci import Digest, Reference
from tests.content.artifact import blob, put, put_artifact
from tests.process import LATE_MODULES, Aimage, end, run, spawn
from tests.real_registry import RealRegistry

ROOT = Path(__file__).parent.parent.parent
DATA = b"0123456789"


# -- locks


def test_lock_is_exclusive_or_shared(store: ImageLayout) -> None:
    store.root.mkdir()
    with hold_lock(store.root, "x", shared=True), hold_lock(store.root, "x", shared=True):
        fd = os.open(store.root / ".aimage" / "x", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def test_lock_is_released_after_an_error(store: ImageLayout) -> None:
    store.root.mkdir()
    with pytest.raises(ZeroDivisionError), hold_lock(store.root, "x"):
        _ = 1 / 0
    with hold_lock(store.root, "x"):
        pass


# -- file systems without locks


@pytest.fixture
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    code = getattr(request, "param", errno.ENOLCK)

    def refuse(*_: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize("no_locks", [errno.ENOSYS, errno.EOPNOTSUPP], indirect=True)
def test_stores_work_without_locks(store: ImageLayout, tmp_path: Path, no_locks: None) -> None:
    source = ImageLayout(tmp_path / "source")
    put_artifact(source, "a:v1", b"one", b"x" * (JOURNALED + 1))
    copy(source, Reference.parse("a:v1"), store)
    stray = put(store, b"stray")
    store.tag(store.resolve(Reference.parse("a:v1")), Reference.parse("b:v1"))
    store.untag(Reference.parse("a:v1"))
    with edit_index(store.root) as index:
        index["x"] = 1
    assert Collector(store, grace=0).run().blobs == 1
    assert not store.exists(stray)
    assert [name for name, _ in store.list_tags()] == ["b:v1"]
    for path in (store.root / "blobs" / "sha256").iterdir():
        assert Digest.of(path.read_bytes()).encoded == path.name


def test_without_locks_two_ingests_of_a_blob_both_commit(
    store: ImageLayout, no_locks: None
) -> None:
    """Each runs as if alone: neither may overwrite or truncate the other's file."""
    content = blob(DATA)
    first = store.ingest(content.digest.encoded, content)
    first.write_at(0, DATA[:5])
    second = store.ingest(content.digest.encoded, content)
    second.write_at(0, DATA[:3])
    first.write_at(5, DATA[5:])
    first.commit(content)
    assert store.find_path(content).read_bytes() == DATA
    second.write_at(3, DATA[3:])
    second.commit(content)
    assert store.find_path(content).read_bytes() == DATA
    assert list((store.root / ".aimage" / "ingest").iterdir()) == []


def test_without_locks_leases_keep_blobs(store: ImageLayout, no_locks: None) -> None:
    """It is unknown if its process is running, so its blobs are kept."""
    stray = put(store, b"stray")
    lease = store.lease(stray.digest)
    assert Collector(store, grace=0).run().blobs == 0
    lease.close()
    assert Collector(store, grace=0).run().blobs == 1


@pytest.mark.parametrize("what", ["index", "ingest", "lease"])
def test_other_lock_errors_are_raised(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    stray = put(store, b"stray")

    def refuse(*_: Any) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuse)
    begin = {
        "index": lambda: edit_index(store.root).__enter__(),
        "ingest": lambda: store.ingest("x"),
        "lease": lambda: store.lease(stray.digest),
    }
    with pytest.raises(StoreError, match="Input/output error"):
        begin[what]()


def test_second_ingest_of_a_blob_is_busy(store: ImageLayout) -> None:
    content = blob(DATA)
    first = store.ingest(content.digest.encoded, content)
    with pytest.raises(IngestBusyError):
        store.ingest(content.digest.encoded, content)
    first.abort()


def test_concurrent_tags_by_threads_are_all_kept(store: ImageLayout) -> None:
    def name(who: Any) -> None:
        for n in range(5):
            put_artifact(store, f"t{who}:v{n}", f"{who}/{n}".encode())

    threads = [threading.Thread(target=name, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = {f"t{who}:v{n}" for who in range(4) for n in range(5)}
    assert {found for found, _ in store.list_tags()} == wanted


# -- a store shared by a group

GROUP, ANNA, BERT = 61_000, 61_001, 61_002
# another user may not be allowed to read the code, so it is imported before the switch
AS_MEMBER = f"""
import difflib, gc, importlib, json, os, pkgutil, stringprep, sys
import encodings.idna, encodings.utf_8_sig
{LATE_MODULES}
import clowder_aimage
for module in pkgutil.walk_packages(clowder_aimage.__path__, "clowder_aimage."):
    if not module.name.startswith(("clowder_aimage.model", "clowder_aimage.distribution")) and (
        module.name != "clowder_aimage.generate" and not module.name.endswith("__main__")
    ):
        importlib.import_module(module.name)
import jsonschema
from clowder_aimage.cli.main import main
from clowder_aimage.document.schema import validate
try:
    validate("aimage-config", dict())
except Exception:
    pass
uid, group = map(int, sys.argv[1:3])
os.setgroups([group])
os.setgid(uid)
os.setuid(uid)
os.umask(0o022)
os.chdir("/")
gc.freeze()
for line in sys.stdin:
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    for number, name in enumerate(("out", "err"), 1):
        path = os.path.join(os.environ["HOME"], name)
        os.dup2(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR), number)
    sys.argv[1:] = json.loads(line)
    main()
"""
TAKE_IN = f"""
import os, sys
from functools import partial
from pathlib import Path
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor
{LATE_MODULES}
uid, group = int(sys.argv[1]), int(sys.argv[2])
os.setgroups([group]); os.setgid(uid); os.setuid(uid); os.umask(0o022)
data = b"0123456789abcdef" * int(sys.argv[4])
content = Descriptor.of("application/vnd.example.blob", data)
layout = ImageLayout(Path(sys.argv[3]))
ingest = layout.ingest(content.digest.encoded, content)
if sys.argv[5] == "kill":
    ingest.write_at(0, data[:-5])
    ingest.checkpoint()
    os.kill(os.getpid(), 9)
for start, end in ingest.list_missing():
    ingest.write_at(start, data[start:end])
ingest.commit(content)
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


class Member:
    """A user of the group, with their own home and a restrictive umask.

    Each verb is a process, forked from one that has imported everything.
    """

    def __init__(self, uid: int, directory: Path) -> None:
        self.home = directory / str(uid)
        self.home.mkdir()
        os.chown(self.home, uid, uid)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AIMAGE_", "DOCKER_"))}
        self._process = spawn(
            [sys.executable, "-c", AS_MEMBER, str(uid), str(GROUP)],
            is_shared=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=kept
            | {
                "HOME": str(self.home),
                "XDG_STATE_HOME": str(self.home / "state"),
                "XDG_CONFIG_HOME": str(self.home / "config"),
                "XDG_RUNTIME_DIR": str(self.home / "run"),
                "DOCKER_CONFIG": str(self.home / "docker"),
                "PYTHONPATH": str(ROOT),
            },
        )

    def __call__(self, *arguments: object) -> str:
        """Run a verb, and return its stdout."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps([str(each) for each in arguments]) + "\n")
        stdin.flush()
        code = stdout.readline().strip()
        out, err = ((self.home / name).read_text() for name in ("out", "err"))
        assert code == "0", f"{arguments}: {out}\n{err}"
        return out

    def end(self) -> None:
        end(self._process)


@pytest.fixture(scope="module")
def members() -> Iterator[tuple[Member, Member]]:
    """Return two members of the group."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        members = Member(ANNA, Path(name)), Member(BERT, Path(name))
        yield members
        for member in members:
            member.end()


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a directory that belongs to the group."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        store = Path(name) / "store"
        store.mkdir()
        os.chown(store, 0, GROUP)
        store.chmod(0o2775)
        yield store


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Path]:
    """Return the embedded model where everyone may read it."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        shutil.copytree(tiny, Path(name) / "tiny")
        yield Path(name) / "tiny"


def check_modes(store: Path) -> None:
    """Verify that the group can use everything, and that no user can change blobs."""
    for path in [store, *store.rglob("*")]:
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        assert status.st_gid == GROUP, path
        if path.is_dir():
            assert mode == 0o2775, f"{path}: {mode:o}"
        elif "blobs" in path.parts:
            assert mode == 0o444, f"{path}: {mode:o}"
        else:
            assert mode & 0o060 == 0o060, f"{path}: {mode:o}"
            assert not mode & 0o002, f"{path}: {mode:o}"


@pytest.mark.integration
@needs_root
def test_two_users_of_a_group_share_a_store(
    members: tuple[Member, Member], shared: Path, model: Path
) -> None:
    anna, bert = (partial(member, "--store", shared) for member in members)
    first = anna("-q", "create", "anna:v1", model, "--whole-files").strip()
    assert (
        bert("-q", "create", "bert:v1", model, "--whole-files", "--license", "mit").strip() != first
    )
    check_modes(shared)
    assert bert("tag", "anna:v1", "again:v1").strip() == first
    anna("rm", "bert:v1", "again:v1")
    bert("pin", "anna:v1")
    anna("unpin", "anna:v1")
    done = json.loads(anna("--json", "gc", "--grace", "0"))
    assert done["blobs"] > 0
    bert("rm", "anna:v1")
    assert json.loads(bert("--json", "gc", "--grace", "0"))["left"] == 0
    anna("-q", "create", "anna:v2", model, "--whole-files")
    bert("verify")
    check_modes(shared)


@pytest.mark.integration
@needs_root
def test_two_users_pull_into_one_store(
    members: tuple[Member, Member],
    shared: Path,
    registry: RealRegistry,
    repository: str,
    tmp_path: Path,
) -> None:
    put_artifact(ImageLayout(tmp_path / "source"), f"{repository}:v1", b"one", b"two")
    Aimage(tmp_path, tmp_path / "source")("push", "-q", f"{repository}:v1")
    for member in reversed(members):
        member("--store", shared, "-q", "pull", f"{repository}:v1")
    members[0]("--store", shared, "verify")
    check_modes(shared)


@needs_root
@pytest.mark.parametrize(
    "journaled",
    [False, pytest.param(True, marks=pytest.mark.integration)],
    ids=["small", "large"],
)
def test_unfinished_ingest_of_another_user_is_replaced(shared: Path, journaled: bool) -> None:
    """Anna's process is killed in the middle of a blob; Bert needs the same one."""
    data = b"0123456789abcdef" * ((JOURNALED // 16 + 16) if journaled else 1)
    content = blob(data)

    def take_in(uid: int, what: str) -> subprocess.CompletedProcess[Any]:
        arguments = map(str, (uid, GROUP, shared, len(data) // 16))
        return run(
            [sys.executable, "-c", TAKE_IN, *arguments, what],
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    assert take_in(ANNA, "kill").returncode == -9
    assert len(list((shared / ".aimage" / "ingest").iterdir())) == 1 + journaled
    done = take_in(BERT, "finish")
    assert done.returncode == 0, done.stderr
    assert ImageLayout(shared).find_path(content).read_bytes() == data
    check_modes(shared)
    assert list((shared / ".aimage" / "ingest").iterdir()) == []


@needs_root
def test_a_private_store_is_not_opened_to_the_group(tmp_path: Path) -> None:
    store = ImageLayout(tmp_path / "store")
    put_artifact(store, "a:v1", b"one")
    with store.lease(Digest.of(b"x")):
        for path in store.root.rglob("*"):
            assert not path.stat().st_mode & 0o022, path


def test_the_test_group_has_no_members_on_this_machine() -> None:
    """Otherwise another user of this machine could interfere."""
    assert GROUP not in {group.gr_gid for group in grp.getgrall()}


def test_a_process_that_is_waited_for_is_named(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is released once the wait for it was reported."""
    reported, seen = threading.Event(), list[tuple[str, int | None]]()

    def listener(what: str, pid: int | None) -> None:
        seen.append((what, pid))
        reported.set()

    monkeypatch.setattr(lock, "_NOTICE", 0.0)
    monkeypatch.setattr(lock, "ON_WAIT", [listener])
    with lock.hold_lock(store.root, "lock"):
        waiting = threading.Thread(target=lambda: put_artifact(store, "a:v1", b"a"))
        waiting.start()
        assert reported.wait(60)
    waiting.join()
    pid = os.getpid() if Path("/proc/locks").exists() else None
    assert set(seen) == {(f"the store {store.root}", pid)}
    assert [name for name, _ in store.list_tags()] == ["a:v1"]


def test_a_busy_ingest_names_its_process(store: ImageLayout) -> None:
    content = blob(DATA)
    first = store.ingest(content.digest.encoded, content)
    with pytest.raises(IngestBusyError) as raised:
        store.ingest(content.digest.encoded, content)
    first.abort()
    assert raised.value.facts["pid"] == (str(os.getpid()) if Path("/proc/locks").exists() else "")
