"""Temporary directories: those of processes that were killed are removed, and no others."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.content import file_system
from clowder_aimage.model.llama import temporary_directory
from clowder_aimage.model.llama.temporary_directory import create_temporary_directory
from tests.process import spawn

NAME = "aimage-load-abcd_123"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "t"
    place.mkdir()
    monkeypatch.setattr(temporary_directory, "_MAX_DIRECTORY", 4096)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def leave(place: Path, name: str = NAME, mode: int = 0o700, *files: str) -> Path:
    directory = place / name
    directory.mkdir()
    for file in files or ("1.sock", "log", "m-00001-of-00002.gguf"):
        (directory / file).write_bytes(b"")
    directory.chmod(mode)
    return directory


def test_a_directory_is_private_and_removed(place: Path) -> None:
    with create_temporary_directory() as directory:
        assert Path(directory).stat().st_mode & 0o777 == 0o700
        assert list(place.iterdir()) == [Path(directory)]
        Path(directory, "anything").mkdir()
    assert list(place.iterdir()) == []


def test_a_long_place_is_not_used(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary_directory, "_MAX_DIRECTORY", len(str(place)))
    with create_temporary_directory() as directory:
        assert Path(directory).parent == Path("/tmp")


def test_that_of_a_process_that_was_killed_is_removed(place: Path) -> None:
    code = (
        "import socket, sys, tempfile, time\n"
        "from clowder_aimage.model.llama import temporary_directory as module\n"
        "tempfile.tempdir, module._MAX_DIRECTORY = sys.argv[1], 4096\n"
        "with module.create_temporary_directory() as directory:\n"
        "    open(f'{directory}/log', 'w').close()\n"
        "    print(directory, flush=True)\n"
        "    time.sleep(600)\n"
    )
    child = spawn([sys.executable, "-c", code, place], stdout=-1, text=True)
    assert child.stdout is not None
    theirs = Path(child.stdout.readline().strip())
    with create_temporary_directory():
        assert theirs.exists()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert theirs.exists()
    with create_temporary_directory():
        assert not theirs.exists()


def link(place: Path) -> Path:
    real = leave(place, "theirs")
    (place / NAME).symlink_to(real)
    return real / "log"


# What is in the place, which stays there
OTHERS: dict[str, Callable[[Path], Path]] = {
    "another name": lambda place: leave(place, "aimage-load-pictures2"),
    "a name of a person": lambda place: leave(place, "aimage-pictures"),
    "a directory for others": lambda place: leave(place, NAME, 0o755),
    "another file": lambda place: leave(place, NAME, 0o700, "notes.txt") / "notes.txt",
    "a link": link,
}


@pytest.mark.parametrize("build", OTHERS.values(), ids=OTHERS)
def test_directories_of_others_stay(place: Path, build: Callable[[Path], Path]) -> None:
    path = build(place)
    with create_temporary_directory():
        pass
    assert path.exists()


def test_a_directory_that_is_left_is_removed(place: Path) -> None:
    directory = leave(place)
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(directory)
        listening.bind("-1.sock")
        os.chdir("/")
    with create_temporary_directory():
        assert not directory.exists()


def test_nothing_is_removed_where_there_are_no_locks(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = leave(place)
    monkeypatch.setattr(temporary_directory, "lock", lambda *_: False)
    with create_temporary_directory():
        assert directory.exists()


def test_a_directory_that_another_process_removes_at_once_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[str]()
    mkdtemp = tempfile.mkdtemp

    def race(**options: str) -> str:
        made.append(mkdtemp(**options))
        if len(made) == 1:
            Path(made[0]).rmdir()
        if len(made) == 2:
            descriptor = os.open(made[1], os.O_RDONLY)
            file_system.lock(descriptor, fcntl.LOCK_EX)
            held.append(descriptor)
        return made[-1]

    held = list[int]()
    monkeypatch.setattr(tempfile, "mkdtemp", race)
    with create_temporary_directory() as directory:
        assert directory == made[2]
    os.close(held[0])
