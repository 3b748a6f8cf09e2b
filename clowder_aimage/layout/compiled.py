"""The directory of a store for code that was compiled for models on this machine.

It is run without a check, so only the user who runs it may write there: a store that others write
has none.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from clowder_aimage.errors import AImageError
from clowder_aimage.layout.lock import PRIVATE, is_shared, make_directory

COMPILED = "compiled"
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def open_compiled(root: Path) -> Path | None:
    """Return the directory, created if it is missing; None if others could write to it.

    Also None for a store that cannot be written.
    """
    with contextlib.suppress(OSError, AImageError):
        if is_shared(root.stat()):
            return None
        path = make_directory(root, PRIVATE, COMPILED)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
            return path
    return None
