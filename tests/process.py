"""Run the command line in this process or as a child process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from clowder_aimage.cli.main import run as run_verb

PROGRAM = [sys.executable, "-m", "clowder_aimage.cli"]
_PROGRAM = [*PROGRAM]
# Variables that the interpreter or a library reads once at startup
AT_START = ("LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TZ")
# Pooled threads, which remain, and calls of the hub, which are left behind when they take too
# long; those of the last line belong to servers in this process
POOLS = (
    "aimage-hub",
    *("aimage-write", "aimage-mlx", "asyncio", "waitpid"),
    *("aimage-io", "aimage-locking", "aimage-decoding", "aimage-generation", "aimage-probe"),
)
# For programs that become another user, who may not be allowed to read the interpreter's modules:
# those that are loaded late, in functions
LATE_MODULES = "import concurrent.futures.thread, ctypes, encodings.ascii"
_CONTROLLED = """
import fcntl, os, sys, termios
if child := os.fork():  # the child is not a group leader, and may have a session of its own
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
THREADS_END = 20.0  # seconds
TIMEOUT = 300.0  # seconds
_setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
_children: list[subprocess.Popen[Any]] = []


def spawn(
    command: Sequence[object], *, is_shared: bool = False, **options: Any
) -> subprocess.Popen[Any]:
    """Start a child that is killed when the test or this process ends, with its descendants.

    Args:
        command: The program and its arguments.
        is_shared: The child outlives the test and is ended by a session fixture.
        options: As for ``subprocess.Popen``. The child leads its own process group.
    """
    words = [str(word) for word in command]
    if _setpriv is not None and threading.current_thread() is threading.main_thread():
        words = [_setpriv, "--pdeathsig", "KILL", *words]  # exec keeps the pid
    child = subprocess.Popen(words, process_group=0, **options)
    if not is_shared:
        _children.append(child)
    return child


def spawn_at(terminal: int, command: Sequence[object], **options: Any) -> subprocess.Popen[Any]:
    """Start a child whose controlling terminal is the slave of a pseudo-terminal, and close that.

    The child waits for the program, which has a session of its own.
    """
    child = spawn(
        [sys.executable, "-S", "-c", _CONTROLLED, *command],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        **options,
    )
    os.close(terminal)
    return child


def run(
    command: Sequence[object],
    *,
    input: str | bytes | None = None,  # noqa: A002
    timeout: float = TIMEOUT,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a child to its end; its outputs are returned.

    Args:
        command: The program and its arguments.
        input: The data for its stdin.
        timeout: The child is killed after this many seconds.
        check: Raise CalledProcessError if the child fails.
        options: As for ``subprocess.Popen``.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        pipes["stdin"] = subprocess.PIPE
    child = spawn(command, **pipes | options)
    try:  # not reaped(): other threads may start children meanwhile
        out, err = child.communicate(input, timeout=timeout)
    finally:
        end(child)
    done = subprocess.CompletedProcess(child.args, child.returncode, out, err)
    if check:
        done.check_returncode()
    return done


@contextlib.contextmanager
def reaped() -> Iterator[None]:
    """Kill the children started inside the context, with their process groups."""
    before = len(_children)
    try:
        yield
    finally:
        for child in _children[before:]:
            end(child)


def end(child: subprocess.Popen[Any]) -> None:
    """Kill a child with its process group, and close its pipes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    for stream in (child.stdin, child.stdout, child.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.close()
    child.wait()
    with contextlib.suppress(ValueError):
        _children.remove(child)


def restore_signals() -> None:
    """Restore default signals: children inherit what a shell sets for background jobs."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            default = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)


@dataclass
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """Return the only line of stdout."""
        (line,) = self.out.splitlines()
        return line


@dataclass
class Aimage:
    """``aimage`` with its own home and store."""

    home: Path
    store: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: object, code: int = 0, stdin: str = "") -> Done:
        """Run a verb in this process; fail the test with all output on another exit code.

        A child process is used outside the main thread, with variables that are read at startup,
        or with another ``PROGRAM``.
        """
        has_own_start = any(name.startswith(AT_START) for name in self.environment)
        is_aside = threading.current_thread() is not threading.main_thread()
        if has_own_start or is_aside or PROGRAM != _PROGRAM:
            return self.process(*arguments, code=code, stdin=stdin)
        threads = set(threading.enumerate())
        done = _run_here([str(each) for each in arguments], self.env(), self.home, stdin)
        _check(done, code)
        _join(threads, done)
        return done

    def attempt(self, *arguments: object, stdin: str = "") -> Done:
        """Run a verb in this process, whatever its exit code."""
        return _run_here([str(each) for each in arguments], self.env(), self.home, stdin)

    def process(self, *arguments: object, code: int = 0, stdin: str = "") -> Done:
        """Run a verb as a child process."""
        command = [*PROGRAM, *arguments]
        ended = run(command, input=stdin, timeout=120, text=True, env=self.env(), cwd=self.home)
        done = Done(ended.returncode, ended.stdout, ended.stderr)
        assert "Traceback" not in done.err, done.err
        _check(done, code)
        return done

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        """Start a verb and return at once."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        place = {"env": self.env(), "cwd": self.home}
        return spawn([*PROGRAM, *arguments], **pipes | place | options)

    def env(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AIMAGE_", "DOCKER_"))}
        for name in ("SOURCE_DATE_EPOCH", "REGISTRY_AUTH_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
            kept.pop(name, None)
        return kept | {
            "HOME": str(self.home),
            "XDG_DATA_HOME": str(self.home / "data"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "DOCKER_CONFIG": str(self.home / "docker"),
            "AIMAGE_STORE": str(self.store),
            "AIMAGE_HOST": "",  # not the default worker of this machine
            "PYTHONPATH": str(Path(__file__).parent.parent),
            **self.environment,
        }


def _check(done: Done, code: int) -> None:
    assert done.code == code, f"{done.code}: {done.out}\n{done.err}"


def _join(before: set[threading.Thread], done: Done) -> None:
    """Join the threads that the process would have left running."""
    until = time.monotonic() + THREADS_END
    while left := [each for each in set(threading.enumerate()) - before if _is_ours(each)]:
        assert time.monotonic() < until, f"{left[0].name} goes on: {done.out}\n{done.err}"
        time.sleep(0.005)  # not join(): it fails on a thread that has not started yet


def _is_ours(thread: threading.Thread) -> bool:
    """Return whether a verb may have started the thread, rather than a pool or a test server."""
    return not (thread.name.startswith(POOLS) or "process_request_thread" in thread.name)


def _run_here(
    arguments: Sequence[str], environment: dict[str, str], home: Path, stdin: str
) -> Done:
    """Run a verb with the environment, directory, files and signal handlers of a process."""
    with contextlib.ExitStack() as stack:
        stack.callback(os.chdir, os.getcwd())  # noqa: PTH109
        os.chdir(home)
        stack.enter_context(_environment(environment))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            stack.callback(signal.signal, number, signal.getsignal(number))
        stack.enter_context(_logging())
        given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write(stdin.encode())
        given.seek(0)
        with _streams(given, out, err):
            code = run_verb(arguments)
        return Done(code, _text(out), _text(err))


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n")


@contextlib.contextmanager
def _environment(environment: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Restore the logging configuration that a daemon changes."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        if "structlog" in sys.modules:
            sys.modules["structlog"].reset_defaults()


@contextlib.contextmanager
def _streams(*files: BinaryIO) -> Iterator[None]:
    """Redirect descriptors 0, 1 and 2, and Python's files on them, to ``files``."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in range(3)]
    named = sys.stdin, sys.stdout, sys.stderr
    try:
        for number, file in enumerate(files):
            os.dup2(file.fileno(), number)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(  # noqa: SIM115
            2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
        )
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        sys.stdin, sys.stdout, sys.stderr = named
        for number, fd in enumerate(kept):
            os.dup2(fd, number)
            os.close(fd)
