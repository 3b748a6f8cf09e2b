"""The recording layer under the other tests: it sees every write and injects the faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.crash.power import Disk, check_replayed, read_log
from tests.crash.scene import ROOT
from tests.process import run

BEGIN = """
import json, os, pathlib, sys
from tests.crash.recorder import Layer
Layer(json.loads(sys.argv[1])).install()
top = pathlib.Path(sys.argv[2])
os.chdir(top)
"""
EVERYTHING = """
os.mkdir("a")
(top / "a" / "b").mkdir()
fd = os.open("a/file", os.O_RDWR | os.O_CREAT, 0o600)
os.write(fd, b"0123456789")
os.write(fd, memoryview(b"abc"))
os.pwrite(fd, bytearray(b"XY"), 20)
os.ftruncate(fd, 21)
os.fchmod(fd, 0o644)
os.fsync(fd)
os.close(fd)
fd = os.open(top / "a" / "file", os.O_WRONLY | os.O_APPEND)
os.write(fd, b"more")
os.fdatasync(fd)
os.close(fd)
os.truncate("a/file", 23)
os.utime("a/file")
(top / "text").write_text("text")
(top / "bytes").write_bytes(b"bytes" * 10000)
with open("text", "a") as file:
    file.write(" and more")
with (top / "bytes").open("r+b") as file:
    file.seek(7)
    file.write(b"!")
with os.fdopen(os.open("fd", os.O_WRONLY | os.O_CREAT), "wb") as file:
    file.write(b"by number")
os.open("bytes", os.O_WRONLY | os.O_TRUNC)
(top / "a" / "file").rename("a/b/file")
os.replace("text", "a/text")
(top / "a" / "text").chmod(0o640)
(top / "gone").touch()
(top / "gone").unlink()
(top / "gone").write_bytes(b"")
os.remove("gone")
os.mkdir("empty")
os.rmdir("empty")
"""


@pytest.fixture
def top(tmp_path: Path) -> Path:
    path = tmp_path / "top"
    path.mkdir()
    return path


def record(top: Path, program: str, **order: Any) -> subprocess.CompletedProcess[str]:
    order |= {"top": str(top)}
    return run(
        [sys.executable, "-c", BEGIN + program, json.dumps(order), str(top)],
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_every_write_is_recorded(top: Path, tmp_path: Path) -> None:
    done = record(top, EVERYTHING, log=str(tmp_path / "log"))
    assert done.returncode == 0, done.stderr
    disk, calls = Disk(), read_log(tmp_path / "log")
    for call, data in calls:
        disk.apply(call, data)
    check_replayed(disk, top)
    assert (top / "a" / "b" / "file").read_bytes() == b"0123456789abc" + bytes(7) + b"Xmo"
    assert len(calls) > 30


def test_unrecorded_calls_are_refused(top: Path) -> None:
    done = record(top, "os.writev(os.open('x', os.O_WRONLY | os.O_CREAT), [b'x'])")
    assert "AssertionError: writev is not watched" in done.stderr


@pytest.mark.parametrize(
    ("order", "left"),
    [
        ({"kill": 0}, None),
        ({"kill": 3, "torn": True}, b"012345"),
    ],
)
def test_kill_ends_the_process_before_a_call(
    top: Path, order: dict[str, int], left: bytes | None
) -> None:
    program = """
fd = os.open("x", os.O_WRONLY | os.O_CREAT)
os.write(fd, b"0123")
os.fsync(fd)
os.write(fd, b"4567")
"""
    assert record(top, program, **order).returncode == -signal.SIGKILL
    assert ((top / "x").read_bytes() if (top / "x").exists() else None) == left


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"full": 2}, "4 28 4"),
        ({"full": 1, "ever": True}, "2 28 28"),
    ],
)
def test_full_fails_a_call(top: Path, order: dict[str, int], said: str) -> None:
    program = """
def write():
    try:
        return os.write(fd, b"0123")
    except OSError as error:
        return error.errno

fd = os.open("x", os.O_WRONLY | os.O_CREAT)
print(write(), write(), write())
"""
    done = record(top, program, **order)
    assert done.stdout.strip() == said
