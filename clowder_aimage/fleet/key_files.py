"""The keys of a fleet in files: seeds that only their owner may read, and public keys."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

from clowder_aimage.content.atomic_file import write_all, write_file
from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.document.optional_file import warn
from clowder_aimage.errors import ContentError, FormatError, StoreError, UsageError
from clowder_aimage.fleet.key import ROOT, FleetKey, KeySet, decode_public_key

_MAX_SEED = 4096
_SEED = re.compile(r"S[A-Z2-7]{57}")


class KeyDirectory:
    """The directory of the keys of one fleet, in the configuration of a user."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get_seed_path(self, name: str) -> Path:
        """Return the file of a seed: "root", or the role of its key."""
        return self.path / f"{name}.seed"

    def read_public_root(self) -> str:
        """Return the public root key; "" if it is not here. Raises UsageError."""
        path = self.path / "root.public"
        return read_public_root_key(str(path)) if path.is_file() else ""

    def write_public_root(self, public: str) -> None:
        """Write the public root key, which everybody may read. Raises StoreError."""
        _make_directory(self.path)
        try:
            write_file(self.path / "root.public", f"{public}\n".encode(), mode=0o644)
        except OSError as error:
            raise _convert_error(self.path, error) from None

    def read_copy(self, root: str, fleet: str) -> KeySet | None:
        """Return the last key set that was published from here, if it is of that root key."""
        with contextlib.suppress(OSError, ContentError):
            return KeySet.decode((self.path / "keys.json").read_bytes(), root, fleet)
        return None

    def write_copy(self, raw: bytes) -> None:
        """Keep a key set, for a server that loses its data. The directory may be read-only."""
        with contextlib.suppress(OSError):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_file(self.path / "keys.json", raw, mode=0o600)


def read_seed(path: Path, kind: int) -> FleetKey:
    """Return the key whose seed is in a file. Raises UsageError."""
    try:
        mode = path.stat().st_mode
        # A pipe would be waited for.
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path} is not a file")
        if mode & stat.S_IROTH:
            warn(f"all users can read the key in {path}")
        with path.open("rb") as file:
            data = file.read(_MAX_SEED)
    except OSError as error:
        raise UsageError(f"cannot read the key in {path}: {error.strerror or error}") from None
    try:
        return FleetKey.parse(data, kind)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}") from None


def write_seed(path: Path, key: FleetKey) -> None:
    """Write a seed to a new file, which only its owner may read. Raises UsageError, StoreError."""
    _make_directory(path.parent)
    try:
        with OpenDirectory(path.parent) as directory:
            fd = directory.create(path.name, 0o600)
            try:
                write_all(fd, f"{key.seed}\n".encode())
                os.fsync(fd)
            finally:
                os.close(fd)
            directory.sync()
    except FileExistsError:
        message = f"{path} exists: a key is never overwritten"
        raise UsageError(message, hint="choose another file, or move it away") from None
    except OSError as error:
        raise _convert_error(path, error) from None


def read_public_root_key(text: str) -> str:
    """Return the public root key that ``text`` is, or that is in the file ``text``.

    Raises UsageError.
    """
    check_no_seed(text)
    if not text.startswith("O") or len(text) != 56:
        try:
            text = Path(text).read_bytes()[:_MAX_SEED].decode("ascii", "replace").strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            message = f"{text[:200]} is neither a public root key (O...) nor a file: {reason}"
            raise UsageError(message) from None
    check_no_seed(text)
    try:
        decode_public_key(text, ROOT)
    except FormatError as error:
        raise UsageError(error.message) from None
    return text


def check_no_seed(text: str) -> None:
    """Raise UsageError for a seed in the place of a public key: messages would repeat it."""
    if _SEED.fullmatch(text):
        raise UsageError("this is a seed, which is secret: a public key is needed (O... or U...)")


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _convert_error(path, error) from None


def _convert_error(path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot write {path}: {error.strerror or error}")
