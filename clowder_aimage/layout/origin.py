"""The repositories that manifests came by, and whose names they lost: a policy counts them, too.

Each manifest has a file in ``.aimage/origins`` with a line for each repository. Lines are appended,
and begin with their separator: one that a crash cuts off does not damage the next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from clowder_aimage.content.atomic_file import write_all
from clowder_aimage.errors import UsageError
from clowder_aimage.layout.lock import (
    APPEND,
    PRIVATE,
    check_own,
    make_directory,
    open_regular,
    open_shared,
    translate_store_errors,
)
from clowder_aimage.oci import Digest, Reference

ORIGINS = "origins"
# Bytes of a file
_MAX_SIZE = 16 << 20


def add_origins(root: Path, digest: Digest, names: Iterable[str], *, durable: bool) -> None:
    """Record names of a manifest. Raises StoreError or NoSpaceError."""
    known = list_origins(root, digest)
    new = dict.fromkeys(map(_strip_tag, names))
    text = "".join(f"\n{name}" for name in new if name not in known and "\n" not in name)
    if not text:
        return
    with translate_store_errors(root):
        path = make_directory(root, PRIVATE, ORIGINS) / digest.encoded
        fd = open_shared(path, APPEND)
        try:
            write_all(fd, text.encode(errors="replace"))
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)


def list_origins(root: Path, digest: Digest) -> set[str]:
    """Return the recorded repositories of a manifest. Raises StoreError."""
    path = os.path.join(check_own(root, ORIGINS), digest.encoded)
    with (
        translate_store_errors(root),
        contextlib.suppress(FileNotFoundError),
        open(open_regular(path), "rb", buffering=0) as file,
    ):
        raw = file.read(_MAX_SIZE) or b""
        return set(filter(None, raw.decode(errors="replace").split("\n")))
    return set()


def _strip_tag(name: str) -> str:
    """Return the repository of a name; other tools set names that are no references."""
    try:
        return Reference.parse(name).name
    except UsageError:
        return name
