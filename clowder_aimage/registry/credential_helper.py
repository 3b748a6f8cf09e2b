"""Credential helpers: programs that keep credentials for docker.

Source: docker-credential-helpers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from clowder_aimage.errors import FormatError, UnauthorizedError
from clowder_aimage.oci import read_json

# Seconds. A person may have to unlock a key ring.
DEADLINE = 30.0
# The only messages that mean that a helper works and has no credentials.
_NOT_FOUND = frozenset({"credentials not found in native keychain"})
_MAX_REASON = 200  # characters
# Seconds for which a helper that hangs is not run again.
_HUNG = 300.0
# What a helper has for a server, or None.
Query = Callable[[str, str], dict[str, Any] | None]
_running: set[int] = set()
# The program that is being started, and the signals that arrived meanwhile.
_starting: list[str] = []
_deferred: list[int] = []
# Reentrant: a signal may interrupt the thread that holds it.
_lock = threading.RLock()
_DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)


class CredentialHelperError(UnauthorizedError):
    """A credential helper failed. ``reason`` is its message, or that of the system."""

    def __init__(self, program: str, reason: str, hint: str | None = None) -> None:
        super().__init__(f"{program} {reason}", hint=hint)
        self.reason = reason


def get_program(name: str) -> str:
    """Return the name of a helper's program."""
    return f"docker-credential-{name}"


def query_helper(name: str, server: str, deadline: float = DEADLINE) -> dict[str, Any] | None:
    """Return the credential of a helper for a server, or None. Raises CredentialHelperError."""
    program = get_program(name)
    try:
        output = run_helper(name, "get", server, deadline)
    except _NotStoredError:
        return None
    try:
        stored = read_json(output, "it")
        if not isinstance(stored["Username"] + stored["Secret"], str):
            raise TypeError
    except (FormatError, LookupError, TypeError):
        reason = "printed something other than a JSON object with Username and Secret"
        raise CredentialHelperError(program, reason) from None
    return dict(stored) if stored["Secret"] else None


class _NotStoredError(CredentialHelperError):
    """A helper has no credentials for a server."""


class _HungError(CredentialHelperError):
    """A helper did not answer in time."""


class _NotInstalledError(CredentialHelperError):
    """There is no program of this name."""


def erase_from_helper(name: str, server: str, *, is_optional: bool) -> bool:
    """Remove the credential of a helper for a server; return False if it had none.

    If it is optional, the helper need not be installed. Raises CredentialHelperError.
    """
    try:
        run_helper(name, "erase", server)
    except _NotStoredError:
        return False
    except _NotInstalledError:
        if is_optional:
            return False
        raise
    return True


class HelperQueries:
    """Queries of helpers; one that did not answer is not run again for some minutes. Thread-safe.

    A command, or a node, may need the credentials of many repositories.
    """

    def __init__(
        self,
        query: Query = query_helper,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._query, self._clock = query, clock
        # By name, the reason, and the time until which it holds.
        self._hung: dict[str, tuple[str, float]] = {}

    def __call__(self, name: str, server: str) -> dict[str, Any] | None:
        """Return the credential of a helper for a server, or None. Raises CredentialHelperError."""
        reason, end = self._hung.get(name, ("", 0.0))
        if self._clock() < end:
            raise CredentialHelperError(get_program(name), reason)
        try:
            return self._query(name, server)
        except _HungError as error:
            self._hung[name] = error.reason, self._clock() + _HUNG
            raise


def run_helper(name: str, verb: str, text: str, deadline: float = DEADLINE) -> bytes:
    """Run a helper, with ``text`` as its input, and return its output.

    After ``deadline`` seconds its process group is killed. Raises CredentialHelperError.
    """
    program = get_program(name)
    # Helpers are programs on PATH only.
    if "/" in name or "\0" in name:
        raise CredentialHelperError(program, "is not the name of a program")
    try:
        code, output, errors = _run([program, verb], text.encode(), deadline)
    except OSError as error:
        if shutil.which(program) is None:
            hint = "install it, or remove it from docker's config.json"
            raise _NotInstalledError(program, "is not installed", hint) from None
        reason = f"cannot be run: {error.strerror or error}"
        raise CredentialHelperError(program, reason) from None
    except subprocess.TimeoutExpired:
        raise _HungError(program, f"did not answer within {deadline:.0f} seconds") from None
    if code == 0:
        return output
    # Helpers print errors to either stream; an object may have a secret.
    is_object = output.lstrip().startswith(b"{")
    message = ((not is_object and output.strip()) or errors).decode(errors="replace")
    line = " ".join(message.split())[:_MAX_REASON]
    kind = _NotStoredError if line in _NOT_FOUND else CredentialHelperError
    raise kind(program, f"failed: {line or 'no message'} (exit status {code})")


def end_helpers() -> None:
    """Kill all running helpers: the process is about to exit."""
    with _lock:
        for pid in _running:
            _kill(pid)


def _run(command: list[str], text: bytes, deadline: float) -> tuple[int, bytes, bytes]:
    """Run a program in its own process group, which is killed unless the program ends in time."""
    with _end_with_process(), _start(command) as process:
        try:
            output, errors = process.communicate(text, deadline)
        except BaseException:
            _kill(process.pid)
            raise
        finally:
            with _lock:
                _running.discard(process.pid)
        return process.returncode, output, errors


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a program. Signals and ``end_helpers`` wait until it is listed as running."""
    pipe = subprocess.PIPE
    try:
        with _lock:
            _starting.append(command[0])
            try:
                process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
                )
                _running.add(process.pid)
            finally:
                _starting.clear()
    finally:
        if _deferred and threading.current_thread() is threading.main_thread():
            _end_process(_deferred.pop(), None)
    return process


@contextlib.contextmanager
def _end_with_process() -> Iterator[None]:
    """End helpers if a signal ends this process; servers handle these signals themselves."""
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if (handler := signal.getsignal(number)) in _DEFAULT_HANDLERS:
                handlers[number] = handler
                signal.signal(number, _end_process)
    try:
        yield
    finally:
        for changed, handler in handlers.items():
            signal.signal(changed, handler)


def _end_process(number: int, _: object) -> None:
    with _lock:
        # The signal interrupts the start in this thread: other threads hold the lock meanwhile.
        if _starting:
            _deferred.append(number)
            return
        for pid in _running:
            _kill(pid)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _kill(pid: int) -> None:
    # It may have ended.
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
