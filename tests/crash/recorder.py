"""Run the command line over a file system that is recorded, fills up, or stops at a call.

``python -m tests.crash.recorder`` reads orders from stdin, one JSON object per line, runs each in
a process forked from this one, and answers ``{"code": ...}``. An order has ``argv``,
``environ``, ``cwd`` and ``out`` (the file for stdout and stderr); ``top``, the directory
whose files are watched; and these optional fields:

log      log every writing call to this file, and the data to the one beside it (.data)
kill     end by SIGKILL before the writing call of this number
torn     ... and if that is a write, do half of it first
full     fail the allocating call of this number with a full disk
ever     ... and all later ones; of a write, half still fits
locks    false: flock has no effect
syncs    each checkpoint of an ingest is synchronised
boot     the ID of the system's start
large    an index of any size is large: it is written after this number of seconds
after    kill the process after this number of seconds
"""

from __future__ import annotations

import _pyio  # type: ignore[import-not-found]
import builtins
import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_WRITING = set("wax+")
# Unused by the commands, or slow to import
_APART = tuple(
    f"clowder_aimage.{name}"
    for name in "__main__ api cli.__main__ distribution engine generate http model node".split()
)


class Layer:
    """A layer between the process and the files in ``top``. Calls are serialised."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.top = os.path.realpath(order["top"])
        self._kill, self._torn = order.get("kill", -1), order.get("torn", False)
        self._full, self._ever = order.get("full", -1), order.get("ever", False)
        self._log = self._data = -1
        if log := order.get("log"):
            self._log, self._data = (os.open(p, _FLAGS, 0o600) for p in (log, f"{log}.data"))
        self._write, self._stat, self._fstat = os.write, os.stat, os.fstat
        self._noted = 0  # bytes of data
        self._calls = self._allocations = 0
        self._files: dict[int, tuple[str, int]] = {}
        self._lock = threading.Lock()

    # -- watched files

    def place(self, path: Any, dir_fd: int | None = None) -> str:
        """Return the absolute form of a path, which may be relative to an open directory."""
        base = Path() if dir_fd is None else Path(self.top, self.known(dir_fd) or os.pardir)
        return os.path.abspath(Path(base, os.fsdecode(path)))  # noqa: PTH100

    def inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return a path relative to ``top``, or None for one elsewhere."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        whole = self.place(path, dir_fd)
        if whole != self.top and not whole.startswith(self.top + os.sep):
            return None
        return os.path.relpath(whole, self.top)

    def known(self, fd: int) -> str | None:
        """Return the path of an open file, if it is watched."""
        if fd in self._files:
            path, ino = self._files[fd]
            with contextlib.suppress(OSError):
                if self._fstat(fd).st_ino == ino:
                    return path
        return None

    # -- faults

    def pass_on(
        self,
        call: dict[str, Any],
        real: Callable[[], Any],
        *,
        allocates: bool = False,
        half: Callable[[], Any] | None = None,
        after: Callable[[Any], dict[str, Any]] = lambda result: {},
        data: Any = b"",
    ) -> Any:
        """Perform a writing call unless a fault prevents it, and log it."""
        with self._lock:
            if self._calls == self._kill:
                if half is not None and self._torn:
                    half()
                os.kill(os.getpid(), signal.SIGKILL)
            self._calls += 1
            if allocates:
                number, self._allocations = self._allocations, self._allocations + 1
                if number == self._full and self._ever and half is not None:
                    real = half
                elif number == self._full or (self._ever and -1 < self._full < number):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), call.get("path"))
            result = real()
            if self._log >= 0:
                call |= after(result) | {"allocates": allocates}
                if call["op"] == "write":
                    call |= {"at": self._noted, "size": result}
                    self._noted += self._write_all(self._data, bytes(data[:result]))
                self._write_all(self._log, json.dumps(call).encode() + b"\n")
            return result

    def _write_all(self, fd: int, data: bytes) -> int:
        done = 0
        while done < len(data):
            done += self._write(fd, data[done:])
        return done

    # -- calls

    def install(self) -> None:
        """Replace the functions that the process calls."""
        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):
                self._wrap_sync(name)
        for name in ("rename", "replace"):
            self._wrap_rename(name)
        for name in ("unlink", "remove", "rmdir", "mkdir", "chmod", "utime", "truncate"):
            self._wrap_path(name)
        for name in ("link", "symlink"):
            self._wrap_link(name)
        for name in ("ftruncate", "fchmod"):
            self._wrap_fd(name)
        self._wrap_open()
        self._wrap_write()
        self._refuse()
        self._wrap_files()
        self._wrap_syncfs()

    def _wrap_open(self) -> None:
        real = os.open

        def wrapped(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            inner = self.inside(path, dir_fd)
            is_new = bool(flags & os.O_CREAT) and not os.path.lexists(self.place(path, dir_fd))

            def really() -> int:
                return real(path, flags, mode, dir_fd=dir_fd)

            if inner is None:
                fd = really()
            elif is_new:
                call: dict[str, Any] = {"op": "create", "path": inner}
                fd = self.pass_on(call, really, allocates=True, after=self._look)
            elif flags & os.O_TRUNC:
                call = {"op": "truncate", "path": inner, "length": 0}
                fd = self.pass_on(call, really, after=self._look)
            else:
                fd = really()
            self._files.pop(fd, None)
            if inner is not None:
                self._files[fd] = inner, self._fstat(fd).st_ino
            return fd

        os.open = wrapped

    def _look(self, fd: int) -> dict[str, Any]:
        status = self._fstat(fd)
        return {"ino": status.st_ino, "mode": status.st_mode & 0o7777}

    def _wrap_write(self) -> None:
        real_write, real_pwrite = os.write, os.pwrite

        def write(fd: int, data: Any, /) -> int:
            path = self.known(fd)
            if path is None:
                return real_write(fd, data)
            view = memoryview(data).cast("B")
            appends = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
            offset = self._fstat(fd).st_size if appends else os.lseek(fd, 0, os.SEEK_CUR)
            call = {"op": "write", "path": path, "ino": self._fstat(fd).st_ino, "offset": offset}
            half = (lambda: real_write(fd, view[: len(view) // 2])) if len(view) > 1 else None
            return self.pass_on(
                call, lambda: real_write(fd, view), allocates=True, half=half, data=view
            )

        def pwrite(fd: int, data: Any, offset: int, /) -> int:
            path = self.known(fd)
            if path is None:
                return real_pwrite(fd, data, offset)
            view = memoryview(data).cast("B")
            call = {"op": "write", "path": path, "ino": self._fstat(fd).st_ino, "offset": offset}
            left = view[: len(view) // 2 & -4096 or len(view) // 2]  # direct I/O: whole pages only
            half = (lambda: real_pwrite(fd, left, offset)) if len(view) > 1 else None
            return self.pass_on(
                call, lambda: real_pwrite(fd, view, offset), allocates=True, half=half, data=view
            )

        os.write, os.pwrite = write, pwrite

    def _wrap_sync(self, name: str) -> None:
        real = getattr(os, name)

        def wrapped(fd: Any) -> None:
            number = fd if isinstance(fd, int) else fd.fileno()
            path = self.known(number)
            if path is None:
                return real(fd)
            call = {"op": "sync", "path": path, "ino": self._fstat(number).st_ino}
            return self.pass_on(call, lambda: real(fd), allocates=True)

        setattr(os, name, wrapped)

    def _wrap_rename(self, name: str) -> None:
        real = getattr(os, name)

        def wrapped(old: Any, new: Any, **rest: Any) -> None:
            here = self.inside(old, rest.get("src_dir_fd"))
            there = self.inside(new, rest.get("dst_dir_fd"))
            if here is None and there is None:
                return real(old, new, **rest)
            if here is None or there is None:
                raise AssertionError(f"renamed over the border: {old} {new}")
            call = {"op": "rename", "path": here, "to": there}
            is_new = not os.path.lexists(Path(self.top, there))
            return self.pass_on(call, lambda: real(old, new, **rest), allocates=is_new)

        setattr(os, name, wrapped)

    def _wrap_path(self, name: str) -> None:
        real = getattr(os, name)

        def wrapped(path: Any, *arguments: Any, **rest: Any) -> Any:
            inner = self.inside(path, rest.get("dir_fd"))
            if inner is None:
                return real(path, *arguments, **rest)
            call = {"op": {"remove": "unlink"}.get(name, name), "path": inner}
            if name == "truncate":
                call["length"] = arguments[0]

            def after(result: Any) -> dict[str, Any]:
                if name not in ("mkdir", "chmod", "truncate"):
                    return {}
                status = self._stat(Path(self.top, inner))
                return {"ino": status.st_ino, "mode": status.st_mode & 0o7777}

            def really() -> Any:
                return real(path, *arguments, **rest)

            return self.pass_on(call, really, allocates=name == "mkdir", after=after)

        setattr(os, name, wrapped)

    def _wrap_link(self, name: str) -> None:
        real = getattr(os, name)

        def wrapped(source: Any, path: Any, **rest: Any) -> None:
            if (inner := self.inside(path, rest.get("dst_dir_fd", rest.get("dir_fd")))) is None:
                return real(source, path, **rest)
            call = {"op": name, "path": inner}  # our code creates none
            return self.pass_on(call, lambda: real(source, path, **rest), allocates=True)

        setattr(os, name, wrapped)

    def _wrap_fd(self, name: str) -> None:
        real = getattr(os, name)

        def wrapped(fd: int, value: int, /) -> None:
            path = self.known(fd)
            if path is None:
                return real(fd, value)
            call = {"op": name.removeprefix("f"), "path": path, "ino": self._fstat(fd).st_ino}
            call |= {"length": value} if name == "ftruncate" else {"mode": value}
            return self.pass_on(call, lambda: real(fd, value))

        setattr(os, name, wrapped)

    def _refuse(self) -> None:
        """Refuse calls that our code never makes on watched files, and that are not recorded."""
        for name in ("writev", "pwritev", "sendfile", "copy_file_range", "posix_fallocate"):
            if real := getattr(os, name, None):
                setattr(os, name, self._refusing(name, real))

    def _refusing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        place = 1 if name == "copy_file_range" else 0

        def wrapped(*arguments: Any, **rest: Any) -> Any:
            if self.known(arguments[place]) is not None:
                raise AssertionError(f"{name} is not watched")
            return real(*arguments, **rest)

        return wrapped

    def _wrap_files(self) -> None:
        """Files opened for writing are written in Python, through ``os``."""
        real = io.open

        def wrapped(file: Any, mode: str = "r", *arguments: Any, **rest: Any) -> Any:
            if isinstance(file, int):
                ours = self.known(file) is not None
            else:
                ours = self.inside(file) is not None
            if ours and set(mode) & _WRITING:
                return _pyio.open(file, mode, *arguments, **rest)
            return real(file, mode, *arguments, **rest)

        io.open = builtins.open = wrapped

    def _wrap_syncfs(self) -> None:
        from clowder_aimage.content import file_system

        found = file_system._load_syncfs()
        if found is None:
            return

        def wrapped(fd: int) -> int:
            try:
                call = {"op": "syncfs", "path": self.known(fd) or "."}
                result: int = self.pass_on(call, lambda: found(fd), allocates=True)
                return result
            except OSError as error:
                ctypes.set_errno(error.errno or 0)
                return -1

        file_system._load_syncfs = lambda: wrapped


# -- processes


def _become(order: dict[str, Any]) -> NoReturn:
    """Continue as if the command line had been started like this, and exit."""
    from clowder_aimage.cli.main import run
    from clowder_aimage.layout import ingest

    for number, name in ((0, os.devnull), (1, f"{order['out']}.out"), (2, f"{order['out']}.err")):
        fd = os.open(name, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if number else 0), 0o600)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["environ"])
    os.chdir(order["cwd"])
    sys.argv = ["aimage", *order["argv"]]
    if not order.get("locks", True):
        fcntl.flock = lambda fd, operation: None
    if "large" in order:
        make_large(order["large"])
    if order.get("syncs"):
        ingest._SYNC_INTERVAL = 0
    if boot := order.get("boot"):
        vars(ingest)["read_boot_id"] = lambda: boot
    Layer(order).install()
    code = run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the interpreter would look at the objects of all modules once more


def make_large(interval: float) -> None:
    """Take an index of any size for a large one, which is written after an interval in seconds."""
    from clowder_aimage.layout import index, pending_names

    pending_names.SMALL, index._MIN_INTERVAL, index._MAX_SHARE = 0, interval, 0


def _wait(pid: int, after: float | None) -> int:
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)  # not reaped yet: the pid is still valid
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _import_all() -> None:
    import clowder_aimage

    for module in pkgutil.walk_packages(clowder_aimage.__path__, "clowder_aimage."):
        if not module.name.startswith(_APART):
            importlib.import_module(module.name)
    importlib.import_module("jsonschema")


def serve() -> None:
    """Execute orders until the end of input."""
    _import_all()
    gc.freeze()  # a fork shares its memory until it is written
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            _become(order)
        print(json.dumps({"code": _wait(pid, order.get("after"))}), flush=True)


if __name__ == "__main__":
    serve()
