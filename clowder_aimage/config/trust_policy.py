"""The policy of this user and this machine, as the gate of this process.

It is read again when a file changes, so that a server follows it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clowder_aimage.content.gate import GATES, Gate
from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError, UsageError

if TYPE_CHECKING:
    from clowder_aimage.registry import ClientOptions
    from clowder_aimage.trust.policy import Policy

# The policy of a machine: its rules come before those of users.
SYSTEM_FILES = [Path("/etc/aimage/trust.yaml")]
_KEY = "trust"
# Bytes of a document
_MAX_SIZE = 1 << 20
_Stamp = tuple[tuple[str | int | bool, ...] | None, ...]


class UserFiles(NamedTuple):
    """The configuration of a user: its path, and whether the environment names it."""

    find_config_file: Callable[[], Path | None]
    names_config_file: Callable[[], bool]


def use_trust_policy(files: UserFiles, connect: Callable[[], ClientOptions]) -> None:
    """Let this process follow the policy, which is read when content is."""
    if not GATES:
        GATES.append(_CurrentGate(files, connect).find_gate)


def read_policy(files: UserFiles) -> Policy | None:
    """Return the policy, None without one. Raises UsageError: it cannot be used."""
    documents = list[tuple[Path, dict[str, Any]]]()
    for path in SYSTEM_FILES:
        if (raw := _read(path)) is not None:
            documents.append((path, _parse(path, raw)))
    own = files.find_config_file()
    is_explicit = files.names_config_file()
    if own is not None and (document := _read_user(own, is_explicit)) is not None:
        documents.append((own, document))
    if not documents:
        return None
    from clowder_aimage.document.schema import validate
    from clowder_aimage.trust.policy import build_policy

    for path, document in documents:
        try:
            validate("trust", document)
        except (ValueError, FormatError) as error:
            raise _build_error(path, error) from None
    return build_policy(documents)


def _read_user(path: Path, is_explicit: bool) -> dict[str, Any] | None:
    """Return the policy in a configuration, None without one.

    A configuration that is malformed counts as absent elsewhere, with a warning; not if it may have
    a policy.
    """
    try:
        raw = _read(path)
    except UsageError:
        if is_explicit or _is_broken(path):
            raise
        return None
    if raw is None or _KEY.encode() not in raw:
        return None
    document = _parse(path, raw)
    if _KEY not in document:
        return None
    value = document[_KEY]
    if not isinstance(value, dict):
        raise _build_error(path, "trust is not an object")
    return value


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_SIZE + 1)
    except (FileNotFoundError, NotADirectoryError):
        if _is_broken(path):
            raise _build_error(path, "it is a link to a file that does not exist") from None
        return None
    except OSError as error:
        raise _build_error(path, error.strerror or str(error)) from None
    if len(raw) > _MAX_SIZE:
        raise _build_error(path, f"it has more than {_MAX_SIZE} bytes")
    return raw


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    from clowder_aimage.document.yaml import read_yaml

    try:
        if path.suffix in (".yaml", ".yml"):
            value = read_yaml(raw.decode("utf-8-sig"), path.name)[0]
        else:
            value = read_json(raw.removeprefix(b"\xef\xbb\xbf"), path.name)
    except (UnicodeDecodeError, FormatError) as error:
        raise _build_error(path, error) from None
    if not isinstance(value, dict):
        raise _build_error(path, "it is empty" if value is None else "it is not an object")
    return value


def _build_error(path: Path, reason: object) -> UsageError:
    return UsageError(
        f"cannot use the policy in {path}: {reason}",
        hint="nothing is accepted until it can be read",
    )


class _CurrentGate:
    """The gate of the files as they are now."""

    def __init__(self, files: UserFiles, connect: Callable[[], ClientOptions]) -> None:
        self._files, self._connect = files, connect
        self._lock = threading.Lock()
        self._stamp: _Stamp | None = None
        # The files that the policy names, such as those of keys
        self._named: tuple[Path, ...] = ()
        # Where this process has found a policy
        self._documents: frozenset[Path] = frozenset()
        self._gate: Gate | None = None

    def find_gate(self) -> Gate | None:
        """Return the gate, None without a policy. Raises UsageError."""
        with self._lock:
            stamp = self._build_stamp()
            if stamp != self._stamp:
                # An error is raised again by the next call
                self._stamp, self._gate = None, None
                policy = self._read_policy()
                while policy is not None and policy.files != self._named:
                    # Each file is read after its stamp, so that no change is missed.
                    self._named = policy.files
                    stamp = self._build_stamp()
                    policy = self._read_policy()
                self._gate = None if policy is None else self._build_gate(policy)
                self._stamp = stamp
            return self._gate

    def _read_policy(self) -> Policy | None:
        """Return the policy, None without one. Raises UsageError, also if one is missing now.

        A file that is being replaced may be missing for a moment, or be empty.
        """
        policy = read_policy(self._files)
        found = frozenset(() if policy is None else policy.documents)
        for path in sorted(self._documents - found):
            raise UsageError(
                f"the policy in {path} has disappeared",
                hint="nothing is accepted until it is there again; restart to run without it",
            )
        self._documents = found
        return policy

    def _build_stamp(self) -> _Stamp:
        paths = (*SYSTEM_FILES, self._files.find_config_file(), *self._named)
        return tuple(map(_read_stamp, paths))

    def _build_gate(self, policy: Policy) -> Gate:
        from clowder_aimage.trust.gate import PolicyGate

        return PolicyGate(policy, self._connect)


def _read_stamp(path: Path | None) -> tuple[str | int | bool, ...] | None:
    """Return what changes with a file: its status, or why there is none."""
    if path is None:
        return None
    try:
        status = path.stat()
    except OSError as error:
        return str(path), error.errno or 0, _is_broken(path)
    # The time of the last change cannot be set, unlike that of the last modification.
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return str(path), *times, status.st_size, status.st_ino


def _is_broken(path: Path) -> bool:
    """Return True if a path leads through a link to something that does not exist."""
    for part in filter(os.path.islink, (path, *path.parents)):
        try:
            part.stat()
        except FileNotFoundError:
            return True
        except OSError:
            # Reading it tells what is wrong
            continue
    return False
