"""Tries of what strangers wrote, in a process with limits of processor time, memory and output.

A library that compiles such text may take any time and memory, and cannot be interrupted. So it
does that first in a process of its own, which ends at the limits; the text is refused then. The
process limits itself once it has imported its modules, so that their size does not matter. What
takes longer than most waits for the few processes that have more time, so that it holds up nothing
else.

macOS has no limit of memory: there the time alone bounds the process.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

from clowder_aimage.errors import ModelError

SECONDS = 2.0  # of processor time
_SHORT = 0.25  # seconds of the first try
MEMORY = 256 << 20  # bytes beyond those of the process when it has started
OUTPUT = 1 << 20  # bytes
# Seconds of a process that waits instead of computing
_PATIENCE = 60
_LANES = ((_SHORT, threading.BoundedSemaphore(4)), (SECONDS, threading.BoundedSemaphore(2)))
# Added to the nice value of the process with more time
_NICE = 5
# Seconds between two looks whether the try is cancelled
_INTERVAL = 0.1
_REFUSED, _UNSTARTED = 3, 4  # exit statuses
# Libraries look for GPUs when they are loaded, which takes time and memory
_WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
_TIME_SIGNALS = (signal.SIGPROF, signal.SIGXCPU, signal.SIGALRM)


class RefusedError(Exception):
    """An input is refused, for the reason in the message."""


class _TimeoutError(RefusedError):
    """A process has used its time."""


def run_bounded(
    module: str,
    data: bytes,
    is_cancelled: Callable[[], bool] = lambda: False,
    *,
    seconds: float = SECONDS,
    memory: int = MEMORY,
) -> bytes:
    """Return the output of a module whose ``main`` calls ``answer``. Blocks; thread-safe.

    It may use ``seconds`` of processor time, and ``memory`` in bytes beyond that of its start.

    Raises:
        RefusedError: The module refuses the data, exceeds a limit, or is cancelled.
        ModelError: The process cannot be started.
    """
    for lane, slots in _LANES:
        while not slots.acquire(timeout=_INTERVAL):
            _check_cancelled(is_cancelled)
        try:
            return _run_within(min(lane, seconds), memory, module, data, is_cancelled)
        except _TimeoutError:
            if lane >= seconds:
                raise
        except OSError as error:
            raise ModelError(f"cannot start a process: {error.strerror or error}") from None
        finally:
            slots.release()
    raise AssertionError  # the last lane returns or raises


def _run_within(
    seconds: float, memory: int, module: str, data: bytes, is_cancelled: Callable[[], bool]
) -> bytes:
    # Files, so that neither side waits for the other
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as log:
        source.write(data)
        source.seek(0)
        command = (sys.executable, "-m", module, str(seconds), str(memory))
        return _run(command, source, log, is_cancelled)


def _run(
    command: Sequence[str], source: BinaryIO, log: BinaryIO, is_cancelled: Callable[[], bool]
) -> bytes:
    environment = {**os.environ, **_WITHOUT_GPU, "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(
        command,
        stdin=source,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
        env=environment,
    )
    try:
        with process:
            output = _read(process, is_cancelled)
    finally:
        process.kill()
    seconds, memory = float(command[-2]), int(command[-1])
    if process.returncode == _UNSTARTED:
        log.seek(0)
        last_line = log.read()[-500:].decode(errors="replace").strip().rpartition("\n")[2]
        raise ModelError(f"a process with limits cannot start: {last_line}")
    if -process.returncode in _TIME_SIGNALS:
        message = f"preparing it takes more than {seconds:g} seconds of processor time"
        raise _TimeoutError(message)
    if process.returncode == _REFUSED:
        raise RefusedError(output.decode(errors="replace"))
    if process.returncode:
        message = f"preparing it takes more than {memory >> 20} MiB of memory, or fails"
        raise RefusedError(message)
    return output


def _read(process: subprocess.Popen[bytes], is_cancelled: Callable[[], bool]) -> bytes:
    """Return the output of a process, up to its end."""
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    descriptor, output = process.stdout.fileno(), b""
    while True:
        if select.select([descriptor], [], [], _INTERVAL)[0]:
            data = os.read(descriptor, 1 << 16)
            output += data
            if not data:
                return output
        elif is_cancelled():
            process.kill()
            raise RefusedError("the request was cancelled")
        if len(output) > OUTPUT:
            process.kill()
            raise RefusedError(f"its result exceeds {OUTPUT >> 20} MiB")


def _check_cancelled(is_cancelled: Callable[[], bool]) -> None:
    if is_cancelled():
        raise RefusedError("the request was cancelled")


# -- in the process


def answer(prepare: Callable[[], Callable[[bytes], bytes]]) -> NoReturn:
    """Answer the data on standard input by the function that ``prepare`` returns.

    The limits are set after ``prepare``. The function raises RefusedError to refuse the data.
    """
    status, output = _UNSTARTED, b""
    try:
        work = prepare()
        target = os.fdopen(os.dup(1), "wb")
        # Output of libraries is an error
        os.dup2(2, 1)
        data = sys.stdin.buffer.read()
        _limit(float(sys.argv[1]), int(sys.argv[2]))
        status = 1
        output = work(data)
        status = 0
    except RefusedError as error:
        status, output = _REFUSED, str(error).encode(errors="replace")
    except Exception as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace")[:1000])
    if output:
        target.write(output)
        target.flush()
    # Exit at once, without joining the threads of libraries
    os._exit(status)


def read_log(start: int = 0) -> str:
    """Return what this process has written to standard error, from the byte ``start`` on."""
    return os.pread(2, OUTPUT, start).decode(errors="replace")


def _limit(seconds: float, memory: int) -> None:
    """Limit this process from now on. The signals of the limits end it."""
    if seconds > _SHORT:
        os.nice(_NICE)
    for number in _TIME_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(_PATIENCE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT, OUTPUT))
    if sys.platform == "linux":
        # Of the private memory, without the address space that libraries reserve for devices
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
