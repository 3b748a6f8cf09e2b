"""Leases: content used by a running process is not collected."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from clowder_aimage import generate
from clowder_aimage.content import build_bytes_body, copy, file_system
from clowder_aimage.create import create
from clowder_aimage.errors import NotFoundError, StoreError
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout import ImageLayout, gc, lock
from clowder_aimage.layout import lease as lease_module
from clowder_aimage.layout.gc import Collector
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.layout.lease import COLLECTION, FileLease, read_leases
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference
from clowder_aimage.pull import pull
from clowder_aimage.push import push
from clowder_aimage.registry import ClientOptions
from tests.content.artifact import manifest, put, put_artifact
from tests.process import LATE_MODULES, Aimage, run, spawn
from tests.proxy import Proxy
from tests.real_registry import RealRegistry
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving

if TYPE_CHECKING:
    from clowder_aimage.importer.blob_writer import WrittenLayer


ROOT = Path(__file__).parent.parent.parent
NOBODY = 65534
HOLD = """
import sys
from pathlib import Path
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Digest
with ImageLayout(Path(sys.argv[1])).lease(*map(Digest.parse, sys.argv[2:])):
    print("held", flush=True)
    sys.stdin.read()
"""
# another user may not be allowed to read the code, so it is imported before the switch
AS_NOBODY = f"""
import os, sys
from pathlib import Path
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Digest
{LATE_MODULES}
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
layout = ImageLayout(Path(sys.argv[1]))
with layout.lease(Digest.parse(sys.argv[2])) as lease:
    lease.add(Digest.of(b"more"))
print("fine")
"""


@pytest.fixture
def stray(store: ImageLayout) -> Descriptor:
    """Return an unneeded blob."""
    return put(store, b"stray")


def collected(store: ImageLayout) -> gc.Collection:
    return Collector(store, grace=0).run()


def leases(store: ImageLayout) -> list[Any]:
    return list((store.root / ".aimage" / "lease").glob("*"))


@pytest.fixture
def holder(store: ImageLayout, stray: Descriptor) -> Iterator[subprocess.Popen[Any]]:
    """Return a process that holds a lease of the stray."""
    with spawn(
        [sys.executable, "-c", HOLD, str(store.root), str(stray.digest)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


# -- lifetime


def test_a_lease_of_a_running_process_keeps_blobs(
    store: ImageLayout, stray: Descriptor, holder: Any
) -> None:
    other = put(store, b"other")
    assert collected(store).blobs == 1
    assert store.exists(stray)
    assert not store.exists(other)
    assert len(leases(store)) == 1
    holder.communicate()  # a normal exit removes the lease
    assert leases(store) == []
    assert collected(store).blobs == 1


def test_a_lease_ends_with_its_process(store: ImageLayout, stray: Descriptor, holder: Any) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert len(leases(store)) == 1
    assert read_leases(store.root, remove=False) == set()
    assert len(leases(store)) == 1
    assert collected(store).blobs == 1
    assert not store.exists(stray)
    assert leases(store) == []


def test_added_digests_are_kept_until_the_lease_closes(
    store: ImageLayout, stray: Descriptor
) -> None:
    later = put(store, b"later")
    with store.lease(stray.digest) as lease:
        lease.add(later.digest)
        lease.add(later.digest, stray.digest)
        assert read_leases(store.root, remove=True) == {stray.digest, later.digest}
        (path,) = leases(store)
        assert sorted(path.read_text().split()) == sorted([str(stray.digest), str(later.digest)])
        assert collected(store).blobs == 0
    assert leases(store) == []
    assert collected(store).blobs == 2


def test_a_lease_of_a_manifest_keeps_only_leased_digests(store: ImageLayout) -> None:
    """The holder leases every digest that it needs."""
    made = put_artifact(store, "a", b"one")
    store.untag(Reference.parse("a"))
    with store.lease(made.digest, *(child.digest for child in made.children)):
        assert collected(store).blobs == 0
    assert collected(store).blobs == 3


def test_threads_add_to_one_lease(store: ImageLayout, stray: Descriptor) -> None:
    digests = [[Digest.of(f"{who}/{n}".encode()) for n in range(40)] for who in range(8)]
    lease = store.lease(stray.digest)

    def add(mine: Any) -> None:
        for digest in mine:
            lease.add(digest, stray.digest)

    threads = [threading.Thread(target=add, args=(mine,)) for mine in digests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_leases(store.root, remove=True) == {
        stray.digest,
        *(digest for mine in digests for digest in mine),
    }
    (path,) = leases(store)
    assert len(path.read_text().split()) == 8 * 40 + 1  # each once, and complete
    lease.close()
    lease.close()  # again


def test_torn_lease_keeps_its_readable_digests(store: ImageLayout, stray: Descriptor) -> None:
    with store.lease(stray.digest):
        (path,) = leases(store)
        with path.open("ab") as file:
            file.write(b"sha256:abc\n\xff\xff\n" + str(Digest.of(b"torn")).encode()[:-3])
        assert read_leases(store.root, remove=True) == {stray.digest}


def test_many_digests_are_written_in_full(
    store: ImageLayout, stray: Descriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the system accepts few bytes per write."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:1000]))
    digests = {Digest.of(str(n).encode()) for n in range(100)}
    with store.lease(*digests):
        assert read_leases(store.root, remove=True) == digests


def test_empty_lease_creates_no_store(store: ImageLayout) -> None:
    with store.lease():
        assert not store.root.exists()


# -- read-only stores


@pytest.mark.parametrize(("code", "what"), [(errno.EROFS, "locks"), (errno.EACCES, "files")])
def test_a_lease_in_a_read_only_store_is_skipped(
    store: ImageLayout, stray: Descriptor, monkeypatch: pytest.MonkeyPatch, code: int, what: str
) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lock if what == "locks" else lease_module, "open_shared", refuse)
    with store.lease(stray.digest) as lease:
        lease.add(Digest.of(b"more"))
    assert leases(store) == []


def test_lease_on_a_failing_disk_is_an_error(
    store: ImageLayout, stray: Descriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(lock, "open_shared", refuse)
    with pytest.raises(StoreError, match="Input/output error"):
        store.lease(stray.digest)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_lease_in_a_store_of_another_user(store: ImageLayout, stray: Descriptor) -> None:
    for path in (store.root, *store.root.parents):
        if not path.stat().st_mode & 0o005:
            path.chmod(path.stat().st_mode | 0o005)
    done = run(
        [sys.executable, "-c", AS_NOBODY, str(store.root), str(stray.digest)],
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd="/",
    )
    assert done.stdout == "fine\n", done.stderr
    assert not (store.root / ".aimage" / "lease").exists()


def test_an_unreadable_lease_stops_a_collection(
    store: ImageLayout, stray: Descriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leased digests are unknown."""
    real = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).parent.name == "lease":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *arguments, **options)

    with store.lease(stray.digest):
        monkeypatch.setattr(os, "open", refuse)
        put(store, b"other")
        with pytest.raises(StoreError, match="Permission denied"):
            collected(store)
        assert len(list((store.root / "blobs" / "sha256").iterdir())) == 2


# -- leases during a collection


def test_adding_waits_while_a_collection_removes(
    store: ImageLayout, stray: Descriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later check for the blob is then reliable."""
    waiting = threading.Event()
    said: list[object] = []
    take = file_system.lock

    def noted(fd: int, operation: int) -> bool:
        if operation == fcntl.LOCK_SH:
            waiting.set()
        return take(fd, operation)

    def add() -> None:
        with store.lease(stray.digest):
            said.append(store.exists(stray))

    def sweep(self: Collector, *arguments: Any) -> None:
        thread.start()
        assert waiting.wait(60)
        assert leases(store) == []
        sweeping(self, *arguments)
        said.append("removed")

    thread = threading.Thread(target=add)
    sweeping = Collector._sweep
    monkeypatch.setattr(lock, "lock", noted)
    monkeypatch.setattr(Collector, "_sweep", sweep)
    assert collected(store).blobs == 1
    thread.join()
    assert said == ["removed", False]


def test_blob_leased_between_marking_and_sweeping_is_kept(
    store: ImageLayout, stray: Descriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = put(store, b"other")
    taken = []
    held = lock.hold_lock

    def wrapped(*arguments: Any, **options: Any) -> AbstractContextManager[None]:
        taken.append(store.lease(stray.digest))
        return held(*arguments, **options)

    monkeypatch.setattr(gc, "hold_lock", wrapped)
    assert collected(store).blobs == 1
    assert store.exists(stray)
    assert not store.exists(other)
    taken[0].close()


def test_keep_blocks_collections(store: ImageLayout, stray: Descriptor) -> None:
    with store.keep():
        fd = os.open(store.root / ".aimage" / COLLECTION, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)


# -- holders


BLOBS = [b"{}", b"a" * 3000, b"b" * 2000, b"c" * 1000]


def pulled(
    store: ImageLayout, tmp_path: Path, during: Callable[[Any], gc.Collection | None]
) -> list[str]:
    """Pull the blobs in order; ``during(number)`` runs before each response."""
    raw, by_digest = artifact(*BLOBS)
    asked: list[Any]
    answers, asked = serving(raw, by_digest), []

    def script(seen: Seen) -> Answer:
        if "/blobs/" in seen.path:
            during(len(asked))
            asked.append(seen.path.rpartition("/")[2])
        return answers(seen)

    with ScriptedRegistry(script).running() as registry:
        name = Reference.parse(f"{registry.host}/team/x:v1")
        pull(name, store, ClientOptions(docker_config=tmp_path, connections_override=1))
    whole = Manifest.parse(raw)
    for content in (whole.descriptor, *whole.children):
        assert store.exists(content), content
    assert store.resolve(name).digest == whole.digest
    return asked


@pytest.mark.parametrize("kind", ["new", "made"])
def test_a_pull_leases_fetched_blobs(store: ImageLayout, tmp_path: Path, kind: str) -> None:
    if kind == "made":
        put_artifact(store, "other", b"other")
    removed = []
    pulled(store, tmp_path, lambda number: removed.append(collected(store).blobs))
    assert removed == [0] * 4
    assert leases(store) == []


def test_a_pull_leases_existing_blobs(store: ImageLayout, tmp_path: Path) -> None:
    found, other = put(store, BLOBS[1]), put(store, b"other")
    asked = pulled(store, tmp_path, lambda number: collected(store))
    assert len(asked) == 3
    assert str(found.digest) not in asked
    assert not store.exists(other)


def test_a_copy_leases_its_blobs_until_it_is_tagged(
    store: ImageLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is written last; a collection just before the tag removes nothing."""
    source = ImageLayout(tmp_path / "source")
    made = put_artifact(source, "a", b"one", b"two")
    tag = ImageLayout.tag

    def late(self: ImageLayout, *arguments: Any, **options: Any) -> None:
        assert collected(self).blobs == 0
        tag(self, *arguments, **options)

    monkeypatch.setattr(ImageLayout, "tag", late)
    copy(source, Reference.parse("a"), store)
    assert all(store.exists(content) for content in (made.descriptor, *made.children))


@pytest.mark.parametrize("kind", ["new", "made"])
def test_create_leases_its_blobs(store: ImageLayout, tiny: Path, kind: str) -> None:
    if kind == "made":
        put_artifact(store, "other", b"other")
    removed: list[int] = []

    def written(_: WrittenLayer) -> None:
        removed.append(collected(store).blobs)

    form = ModelForm(whole_files=True)
    packed = create(store, Reference.parse("x"), tiny, form=form, on_written=written)
    assert removed == [0] * len(packed.layers) and len(removed) > 5
    assert leases(store) == []


def test_a_push_leases_its_blobs(
    store: ImageLayout, registry: RealRegistry, repository: str, tmp_path: Path
) -> None:
    """The name is removed and a collection runs during the push."""
    with Proxy(registry.host).running() as proxy:
        name = Reference.parse(f"{proxy.host}/{repository.partition('/')[2]}:v1")
        made = put_artifact(store, str(name), b"one", b"two")
        removed: list[Any] = []

        def instead(passed: Any) -> None:
            if not removed and passed.method == "POST":
                removed.append(None)
                store.untag(name)
                removed.append(collected(store).blobs)

        proxy.instead = instead
        connection = ClientOptions(docker_config=tmp_path)
        assert push(store, name, connection).digest == made.digest
        assert removed == [None, 0]
        assert collected(store).blobs == 4
        again = ImageLayout(tmp_path / "again")
        pull(name, again, connection)
    assert all(again.exists(content) for content in (made.descriptor, *made.children))


def test_a_run_leases_its_model(
    aimage: Callable[..., Aimage], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From before it is resolved until the end."""
    here = aimage()
    here("create", "x", tiny)
    store = ImageLayout(here.store)
    before = {path.name for path in (here.store / "blobs" / "sha256").iterdir()}

    def load(*_: Any, **__: Any) -> NoReturn:
        store.untag(Reference.parse("x"))
        assert collected(store).blobs == 0
        raise NotFoundError("the test has seen enough")

    monkeypatch.setattr(generate, "load", load)
    assert "seen enough" in here("run", "x", "fox", code=3).err
    assert {path.name for path in (here.store / "blobs" / "sha256").iterdir()} == before
    assert collected(store).blobs == len(before)


def test_several_stores_are_leased_and_none_is_created(
    store: ImageLayout, tmp_path: Path, stray: Descriptor
) -> None:
    absent = tmp_path / "absent"
    first = tmp_path / "first"
    (first / "blobs").mkdir(parents=True)
    with LayeredStore([first, store.root, absent]).lease(stray.digest):
        assert collected(store).blobs == 0
    assert not absent.exists()
    assert collected(store).blobs == 1


def test_a_child_process_does_not_inherit_a_lease(store: ImageLayout, stray: Descriptor) -> None:
    """Its file is closed in child processes."""
    lease = FileLease(store.root, [stray.digest])
    with spawn(
        [sys.executable, "-c", "print('here', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        os.close(lease._fd)  # simulates our exit
        lease._fd = -1
        assert collected(store).blobs == 1
        child.communicate(b"\n")


def test_a_leased_manifest_may_be_incomplete(store: ImageLayout) -> None:
    """A lease also lists blobs that are still to be fetched."""
    absent = manifest(Descriptor.of("x/y", b"{}"), [])
    store.push(Descriptor.of("x/y", b"{}"), build_bytes_body(b"{}"))
    with store.lease(absent.digest, absent.config.digest):
        assert collected(store).blobs == 0
        assert store.exists(absent.config)


def test_damaged_leased_manifest_does_not_stop_a_collection(store: ImageLayout) -> None:
    """A damaged manifest that is leased is being repaired, and stops nothing."""
    made = put_artifact(store, "a", b"one")
    store.untag(Reference.parse("a"))
    path = store.find_path(made.descriptor)
    path.chmod(0o644)
    path.write_bytes(json.dumps({}).encode())
    with store.lease(made.digest):
        collected(store)
        assert path.exists()
