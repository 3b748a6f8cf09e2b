"""The processes of a server. They share its listening sockets, and one process watches them.

The processes are forks: the sockets, the settings and the imported modules are theirs without
further work. The first process serves nothing. It passes signals on, tells systemd about all of
them, and begins another process for one that crashed.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from clowder_aimage.errors import AccessError
from clowder_aimage.http import systemd

# Seconds between two starts of a process
PAUSE = 1.0
_STOPS, _RELOAD = (signal.SIGINT, signal.SIGTERM), signal.SIGHUP
_ENVIRONMENT = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")
_log = logging.getLogger("aimage.http")


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a group: ``parent`` is readable once the first process has ended."""

    parent: int
    report_ready: Callable[[], None]


class ProcessGroup:
    """Processes that each call ``work``, until SIGINT or SIGTERM.

    A process that crashes is replaced, but one that ends before it was ready ends all of them.
    """

    def __init__(self, count: int, work: Callable[[Member], None]) -> None:
        self._count, self._work = count, work
        # The times of their starts by process id, and those that were ready since
        self._running: dict[int, float] = {}
        self._ready: set[int] = set()
        # The times at which processes begin
        self._due: list[float] = []
        self._is_stopping, self._failure = False, ""
        self._parent, self._alive = os.pipe()
        self._reports, self._reporting = os.pipe()
        self._signals, self._waker = socket.socketpair()

    def run(self, on_ready: Callable[[], object]) -> None:
        """Run the processes; call ``on_ready`` once all accept connections. Raises AccessError."""
        for end in (self._signals, self._waker):
            end.setblocking(False)
        # A signal wakes the loop; its handler does nothing
        waker = signal.set_wakeup_fd(self._waker.fileno())
        numbers = (*_STOPS, _RELOAD, signal.SIGCHLD)
        handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        try:
            self._run(on_ready)
        finally:
            signal.set_wakeup_fd(waker)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for descriptor in (self._parent, self._alive, self._reports, self._reporting):
                os.close(descriptor)
            self._signals.close()
            self._waker.close()
        if self._failure:
            raise AccessError(self._failure)

    def _run(self, on_ready: Callable[[], object]) -> None:
        self._due = [0.0] * self._count
        is_ready = False
        while self._running or (self._due and not self._is_stopping):
            self._start()
            self._wait()
            self._reap()
            if not is_ready and len(self._ready) == self._count:
                is_ready = True
                systemd.notify("READY=1")
                on_ready()

    def _start(self) -> None:
        """Begin the processes that are due."""
        current = time.monotonic()
        due = [] if self._is_stopping else [each for each in self._due if each <= current]
        self._due = [each for each in self._due if each not in due]
        for _ in due:
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if not pid:
                self._serve()
            self._running[pid] = current

    def _serve(self) -> NoReturn:
        """Be one of the processes."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (*_STOPS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(_RELOAD, signal.SIG_IGN)
            # A terminal interrupts the first process only, which passes that on
            os.setpgid(0, 0)
            for descriptor in (self._alive, self._reports):
                os.close(descriptor)
            self._signals.close()
            self._waker.close()
            for name in _ENVIRONMENT:
                os.environ.pop(name, None)
            self._work(Member(self._parent, self._report_ready))
            status = 0
        except BaseException as error:
            _log.error("a process of the server failed", exc_info=error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Threads that are still running are not joined
            os._exit(status)

    def _report_ready(self) -> None:
        os.write(self._reporting, f"{os.getpid()}\n".encode())

    def _wait(self) -> None:
        """Wait for a signal, for a process that is ready, or until something is due."""
        current = time.monotonic()
        times = [max(0.0, each - current) for each in self._due]
        period = systemd.read_watchdog_interval()
        if period is not None:
            systemd.notify("WATCHDOG=1")
            times.append(period)
        descriptors = [self._signals.fileno(), self._reports]
        readable, _, _ = select.select(descriptors, [], [], min(times, default=None))
        if self._reports in readable:
            # A report is shorter than what a pipe divides
            self._ready.update(map(int, os.read(self._reports, 4096).split()))
        if self._signals.fileno() in readable:
            for number in self._signals.recv(4096):
                if number in _STOPS:
                    self._stop()
                elif number == _RELOAD:
                    self._pass_on(_RELOAD)

    def _stop(self) -> None:
        if not self._is_stopping:
            systemd.notify("STOPPING=1")
        self._is_stopping = True
        self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: signal.Signals) -> None:
        for pid in self._running:
            os.kill(pid, number)

    def _reap(self) -> None:
        """Take note of processes that have ended."""
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            started, code = self._running.pop(pid), os.waitstatus_to_exitcode(status)
            was_ready = pid in self._ready
            self._ready.discard(pid)
            if self._is_stopping:
                continue
            _log.error("a process of the server has ended", extra={"pid": pid, "status": code})
            if was_ready:
                self._due.append(started + PAUSE)
            else:
                self._failure = f"a process of the server ended at its start, with status {code}"
                self._stop()
