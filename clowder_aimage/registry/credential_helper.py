"""Credential helpers: programs that keep credentials for docker.

Source: docker-credential-helpers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from typing import Any

from clowder_aimage.errors import FormatError, UnauthorizedError
from clowder_aimage.oci import read_json

# Seconds. A person may have to unlock a key ring.
DEADLINE = 30.0
# The only messages that mean that a helper works and has no credentials.
_NOT_FOUND = frozenset({"credentials not found in native keychain"})
_MAX_REASON = 200  # characters
_running: set[int] = set()
_lock = threading.Lock()


class CredentialHelperError(UnauthorizedError):
    """A credential helper failed. ``reason`` is its message, or that of the system."""

    def __init__(self, program: str, reason: str, hint: str | None = None) -> None:
        super().__init__(f"{program} {reason}", hint=hint)
        self.reason = reason


def get_program(name: str) -> str:
    """Return the name of a helper's program."""
    return f"docker-credential-{name}"


def query_helper(name: str, server: str, deadline: float = DEADLINE) -> dict[str, Any] | None:
    """Return what a helper has for a server; None for nothing. Raises CredentialHelperError."""
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
    except FileNotFoundError:
        raise CredentialHelperError(
            program,
            "is not installed",
            hint="install it, or remove it from docker's config.json",
        ) from None
    except OSError as error:
        reason = f"cannot be run: {error.strerror or error}"
        raise CredentialHelperError(program, reason) from None
    except subprocess.TimeoutExpired:
        reason = f"did not answer within {deadline:.0f} seconds"
        raise CredentialHelperError(program, reason) from None
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
    """Run a program in its own process group, which ends with this call."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    ) as process:
        with _lock:
            _running.add(process.pid)
        try:
            output, errors = process.communicate(text, deadline)
        except BaseException:
            _kill(process.pid)
            raise
        finally:
            with _lock:
                _running.discard(process.pid)
        return process.returncode, output, errors


def _kill(pid: int) -> None:
    # It may have ended.
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
