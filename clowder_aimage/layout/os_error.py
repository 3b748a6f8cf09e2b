"""What the operating system says, in words for people."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clowder_aimage.errors import AImageError, NoSpaceError, StoreError

_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def store_errors(root: Path) -> Iterator[None]:
    """Turn an OSError about the store at ``root`` into a StoreError or a NoSpaceError."""
    try:
        yield
    except OSError as error:
        raise translate(error, root) from error


def translate(error: OSError, root: Path) -> AImageError:
    """The error to raise for ``error``."""
    if error.errno in _FULL:
        return NoSpaceError(
            f"no space left for the store {root}",
            hint="free some space, or point --store at another disk; "
            "what was complete is kept and will not be fetched again",
        )
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOTDIR, errno.EEXIST) and not root.is_dir():
        return StoreError(
            f"the store {root} is not a directory", hint="name a directory with --store"
        )
    return StoreError(
        f"cannot use the store {root}: {reason} ({error.filename or root})",
        hint="check the directory's permissions, or name another one with --store",
    )
