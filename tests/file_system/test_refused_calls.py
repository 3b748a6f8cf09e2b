"""Every verb on file systems that refuse calls, as shares, FUSE and old kernels do.

A library that is compiled here refuses calls (``refuse.c``). A new situation is an errno in
``CALLS``.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from clowder_aimage.cli.console.store_limit import describe
from clowder_aimage.content.file_system import Limit
from clowder_aimage.layout import ImageLayout
from tests.file_system.session import VERBS
from tests.importer.conftest import Model
from tests.process import end, run, spawn
from tests.registry_app import RegistryThread

# A call, the errors that file systems have for it, and the limit that is reported.
CALLS: dict[str, tuple[str, Limit | None]] = {
    "flock": ("ENOLCK ENOSYS EOPNOTSUPP EINVAL EBADF EACCES", Limit.LOCKS),
    # NFS: an exclusive lock requires a descriptor for writing
    "flock_mode": ("EBADF", None),
    "sync_directory": ("EINVAL EBADF EACCES ENOTSUP EPERM ENOSYS EROFS", Limit.DIRECTORY_SYNC),
    # syncfs is the next best way
    "sync_file": ("EINVAL ENOSYS ENOTSUP EROFS", None),
    "syncfs": ("ENOSYS EINVAL EOPNOTSUPP EPERM", None),
    # NFS with all_squash, SMB and FUSE with the option uid: not an error, but the owner's number
    "owner": ("4242", None),
    "chmod": ("EPERM ENOTSUP EACCES ENOSYS EROFS", Limit.MODES),
    "link": ("EPERM EXDEV EMLINK ENOTSUP ENOSYS EACCES", None),
    "symlink": ("EPERM ENOTSUP", None),
    # 0: reports zeros
    "statvfs": ("0 ENOSYS EACCES EIO", Limit.FREE_SPACE),
    "utime": ("EPERM ENOSYS EACCES", None),
    "direct": ("EINVAL", None),
    "direct_write": ("EINVAL EOPNOTSUPP EACCES", None),
    "truncate": ("ENOSYS EPERM EINVAL", None),
    "rename": ("EBUSY EACCES ETXTBSY EPERM", None),
    "read_stale": ("ESTALE", None),
    "lock_stale": ("ESTALE", None),
    "open_stale": ("ESTALE", None),
    "unlink_busy": ("EBUSY ETXTBSY", None),
    "sendfile": ("EINVAL ENOSYS", None),
    "clone": ("EXDEV EINVAL EOPNOTSUPP EIO", None),
    "copy_file_range": ("EXDEV EINVAL EOPNOTSUPP EIO", None),
    "fallocate": ("EOPNOTSUPP ENOSYS", None),
}
# Calls that fail at the same time: file systems of the table in docs/operations.md.
SHARES = {
    "NFS": "flock_mode=EBADF read_stale=ESTALE link=EMLINK clone=EOPNOTSUPP",
    "NFSv3 without locks": "flock=ENOLCK read_stale=ESTALE",
    "SMB": "owner=4242 chmod=EPERM sync_directory=EINVAL link=EOPNOTSUPP rename=EACCES "
    "direct_write=EACCES",
    "NFS with all_squash": "owner=4242 flock_mode=EBADF chmod=EPERM utime=EPERM",
    "FUSE": "flock=ENOSYS statvfs=0 sync_directory=ENOSYS sync_file=ENOSYS syncfs=ENOSYS "
    "chmod=ENOSYS link=ENOSYS utime=ENOSYS direct=EINVAL sendfile=EINVAL fallocate=EOPNOTSUPP",
    "9p": "chmod=EPERM link=EPERM direct=EINVAL sync_directory=EBADF rename=EBUSY",
}
SINGLES = [f"{call}={code}" for call, (codes, _) in CALLS.items() for code in codes.split()]


def pair() -> list[str]:
    """Return sets of refusals: of two calls each alone, both, and none are refused in some set.

    Calls are refused in different four of seven sets, with their errors in turn.
    """
    rows: list[list[str]] = [[] for _ in range(7)]
    for call, numbers in zip(CALLS, itertools.combinations(range(7), 4), strict=False):
        for number, code in zip(numbers, itertools.cycle(CALLS[call][0].split()), strict=False):
            rows[number].append(f"{call}={code}")
    return [" ".join(row) for row in rows]


def expect(refusals: str) -> set[Limit]:
    """Return the limits that are reported for refused calls."""
    calls = {word.partition("=")[0] for word in refusals.split()}
    limits = {limit for call in calls if (limit := CALLS[call][1]) is not None}
    if {"sync_file", "syncfs"} <= calls:
        limits.add(Limit.FILE_SYNC)
    if "utime" in calls:
        limits.add(Limit.TIMES)
    return limits


@dataclass
class Session:
    """A process that runs verbs with the library."""

    directory: Path
    child: subprocess.Popen[Any]
    model: Path
    host: str
    count: int = 0

    def run(
        self, refusals: str, first: str = VERBS[0], large: str = ""
    ) -> tuple[Path, list[tuple[str, int, str, str]]]:
        """Run all verbs, refuse calls from ``first`` on; return their directory and results.

        With ``large`` each index is a large one.
        """
        self.count += 1
        home = self.directory / str(self.count)
        home.mkdir()
        numbers = [
            f"{call}={code if code.isdigit() else getattr(errno, code)}"
            for call, _, code in (word.partition("=") for word in refusals.split())
        ]
        order = {
            "refuse": " ".join(numbers),
            "first": first,
            "large": large,
            "home": str(home),
            "host": self.host + f"/{self.count}",
            "model": str(self.model),
            "answer": str(self.directory / f"{self.count}.json"),
        }
        sending: IO[str] = self.child.stdin  # type: ignore[assignment]
        answers: IO[str] = self.child.stdout  # type: ignore[assignment]
        sending.write(json.dumps(order) + "\n")
        sending.flush()
        assert answers.readline() == "0\n"
        return home, json.loads(Path(order["answer"]).read_text())


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or sys.platform != "linux":
        pytest.skip("requires Linux and a C compiler")
    directory = tmp_path_factory.mktemp("refused")
    library, source = directory / "refuse.so", Path(__file__).with_name("refuse.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
    run(command, check=True)
    model = Model(directory / "model", directory).fill()
    # A blob that is large enough for direct I/O
    (model.directory / "LICENSE").write_bytes(os.urandom(300_000))
    served = RegistryThread(ImageLayout(directory / "registry"))
    root = Path(__file__).parent.parent.parent
    child = spawn(
        [sys.executable, "-m", "tests.file_system.session"],
        is_shared=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "LD_PRELOAD": str(library), "REFUSE": ""},
    )
    yield Session(directory, child, model.directory, served.host)
    end(child)


@pytest.fixture(scope="module")
def check(session: Session) -> Callable[..., None]:
    """Return a check that the verbs do on such a file system what they do on others."""
    usual_home, usual = session.run("")
    assert [code for _, code, _, _ in usual] == [0] * len(VERBS), [one for one in usual if one[1]]
    assert {limits_of(usual)} == {frozenset()}

    def compare(refusals: str, large: str = "") -> None:
        home, results = session.run(refusals, large=large)
        failed = [result for result in results if result[1] or "Traceback" in result[3]]
        assert failed == []
        assert limits_of(results) == expect(refusals)
        assert files(home) == files(usual_home)
        warned = expect(refusals) - {Limit.TIMES}
        for line, _, _, err in results:
            warnings = [each for each in err.splitlines() if each.startswith("warning")]
            assert len({each.partition("(")[0] for each in warnings}) == len(warnings), line
            assert not warnings or warned
        messages = "".join(err for *_, err in results)
        assert (f"of the store {home}/store" in messages) == bool(warned)
        # The first sentence states all limits.
        first = results[0][3].partition("\n")[0]
        assert not first.startswith("warning") or first.endswith(describe(warned)), first

    return compare


def limits_of(results: list[tuple[str, int, str, str]]) -> frozenset[str]:
    """Return the limits that ``df`` has printed."""
    (text,) = (out for line, _, out, _ in results if line == "df --json")
    return frozenset(json.loads(text)[0]["fileSystem"]["limits"])


def files(home: Path) -> dict[str, bytes]:
    """Return the files that were written: of stores those that are part of an image layout."""
    paths = sorted(path for path in home.rglob("*") if path.is_file())
    names = ((str(path.relative_to(home)), path) for path in paths)
    # The name of the directory is in that of the repository.
    repository = f"/{home.name}/t/m".encode()
    return {
        name: path.read_bytes().replace(repository, b"/t/m")
        for name, path in names
        if "/.aimage/" not in name and not name.endswith(".tar")
    }


@pytest.mark.integration
@pytest.mark.parametrize("share", SHARES)
def test_all_verbs_work_on_a_share(check: Callable[..., None], share: str) -> None:
    check(SHARES[share])


@pytest.mark.integration
@pytest.mark.parametrize("share", ["local", *SHARES])
def test_all_verbs_work_with_a_list_of_changes_on_a_share(
    check: Callable[..., None], share: str
) -> None:
    check(SHARES.get(share, ""), large="yes")


@pytest.mark.integration
@pytest.mark.parametrize("refusals", pair())
def test_all_verbs_work_without_pairs_of_calls(check: Callable[..., None], refusals: str) -> None:
    check(refusals)


# Faults of a disk and of a server; the calls of FAULTY are refused in each verb.
FAULTY = "flock sync_directory sync_file syncfs chmod link utime rename mkdir unlink truncate"
FAULTS = [
    *(f"{call}=EIO" for call in FAULTY.split()),
    *("create=EIO", "create=EROFS", "create=ENOSPC", "create=EACCES", "create=EMFILE"),
    *("open=EIO", "open=ESTALE", "open=EACCES", "read=EIO", "read=ESTALE"),
    *("write=EIO", "write=ENOSPC", "write=EDQUOT", "unlink=EBUSY", "rename=EIO", "flock=ESTALE"),
    *("close=EIO", "close=EDQUOT", "write=EFBIG"),
]


@pytest.mark.integration
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "first", [pytest.param(VERBS[0], marks=pytest.mark.slow), "ls"], ids=["new", "filled"]
)
def test_a_fault_is_a_clear_error(session: Session, fault: str, first: str) -> None:
    _, results = session.run(fault, first)
    for line, code, out, err in results:
        assert code in (0, 1, 2, 3, 5, 6), line
        assert "Traceback" not in err
        assert "cannot read or write a file" not in err, line
        assert not code or "aimage: " in err or '"event": "error"' in err or out, line


@pytest.mark.slow
@pytest.mark.parametrize("refusal", SINGLES)
def test_all_verbs_work_without_a_call(check: Callable[..., None], refusal: str) -> None:
    check(refusal)
