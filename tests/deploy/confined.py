"""Run a program under a unit's seccomp filters, as systemd would: ``confined.py UNIT PROGRAM ...``.

systemd.exec(5) defines SystemCallFilter=, MemoryDenyWriteExecute= and RestrictAddressFamilies=;
the names in ``@group`` are listed by ``systemd-analyze syscall-filter``. The rules are loaded by
libseccomp (seccomp_rule_add_array(3)). Exit code 77: not supported on this machine.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path

CANNOT = 77
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM  # SCMP_ACT_ALLOW, SCMP_ACT_ERRNO(EPERM)
EQUAL, MASKED = 4, 7  # enum scmp_compare
FAMILIES = {"AF_UNIX": socket.AF_UNIX, "AF_INET": socket.AF_INET, "AF_INET6": socket.AF_INET6}


class Argument(ctypes.Structure):
    """struct scmp_arg_cmp of seccomp.h."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


class Filter:
    """A seccomp filter under construction."""

    def __init__(self, default: int) -> None:
        self._library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
        self._library.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._library.seccomp_init(ctypes.c_uint32(default)))

    def add(self, action: int, name: str, *arguments: Argument) -> None:
        """Add a rule for a system call; skip one that this machine does not have."""
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            return
        array = (Argument * len(arguments))(*arguments)
        code = self._library.seccomp_rule_add_array(
            self._context, ctypes.c_uint32(action), number, len(arguments), array
        )
        if code:
            raise OSError(-code, f"seccomp rule for {name}: {os.strerror(-code)}")

    def load(self) -> None:
        """Load the filter into the kernel, for children too."""
        code = self._library.seccomp_load(self._context)
        if code:
            raise OSError(-code, os.strerror(-code))


def settings(unit: Path) -> list[tuple[str, str]]:
    """Return the lines ``KEY=VALUE`` of a unit."""
    lines = (line.strip() for line in unit.read_text().splitlines())
    pairs = (line.partition("=") for line in lines if "=" in line and line[0] != "#")
    return [(key, value) for key, _, value in pairs]


def members(group: str) -> set[str]:
    """Return the system calls of a name; ``@group`` for those of a group."""
    if not group.startswith("@"):
        return {group}
    command = ["systemd-analyze", "syscall-filter", "--no-pager", group]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = {line.strip() for line in said.splitlines()[1:]}
    found: set[str] = set()
    for name in names:
        if name and not name.startswith("#"):
            found |= members(name)
    return found


def allowed(lines: list[tuple[str, str]]) -> set[str]:
    """Return the system calls that SystemCallFilter= allows."""
    found: set[str] = set()
    for value in (value for key, value in lines if key == "SystemCallFilter"):
        named = set().union(*(members(group) for group in value.lstrip("~").split()))
        found = found - named if value.startswith("~") else found | named
    return found | members("@default")


def confine(unit: Path) -> None:
    """Load the filters of ``unit``. Raises OSError if that is not possible."""
    lines = settings(unit)
    calls = Filter(REFUSE)
    for name in sorted(allowed(lines)):
        calls.add(ALLOW, name)
    other = Filter(ALLOW)
    if ("MemoryDenyWriteExecute", "yes") in lines:
        both = mmap.PROT_WRITE | mmap.PROT_EXEC
        other.add(REFUSE, "mmap", Argument(2, MASKED, both, both))
        for name in ("mprotect", "pkey_mprotect"):
            other.add(REFUSE, name, Argument(2, MASKED, mmap.PROT_EXEC, mmap.PROT_EXEC))
    families = dict(lines).get("RestrictAddressFamilies", "").split()
    if families:
        known = {FAMILIES[name] for name in families}
        for number in set(range(1, 46)) - known:
            other.add(REFUSE, "socket", Argument(0, EQUAL, number, 0))
    if ctypes.CDLL(None, use_errno=True).prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "no_new_privs")
    other.load()  # first: the second forbids loading another one
    calls.load()


def main() -> None:
    unit, *command = sys.argv[1:]
    try:
        confine(Path(unit))
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"cannot confine: {error}", file=sys.stderr)
        raise SystemExit(CANNOT) from None
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main()
