"""A file that lies elsewhere on this machine becomes a blob: by a hard link where that can be."""

from __future__ import annotations

import errno
import os
import secrets
from functools import partial
from pathlib import Path
from typing import BinaryIO

from clowder_aimage.content.store import ContentStore
from clowder_aimage.content.verified_reader import verify
from clowder_aimage.errors import StoreError
from clowder_aimage.layout.ingest import blob_path, is_file
from clowder_aimage.layout.layout import ImageLayout
from clowder_aimage.oci import Descriptor

# other file systems, file systems without links, files of others under protected_hardlinks
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES)


def adopt(store: ContentStore, path: Path, content: Descriptor) -> bool:
    """Have ``store`` hold ``content``, which is in the file at ``path``; says whether it is linked.

    The file is hashed first. A linked one stays the other program's too: what never changes its
    files, as content stores do not, may be adopted from.

    Raises:
        VerificationError: it is not that content.
        StoreError, NoSpaceError: it cannot be read, or not be kept.
    """
    try:
        with path.open("rb") as file:
            verify(file, content)
        if isinstance(store, ImageLayout) and _link(store.root, path, content):
            return True
        store.push(content, partial(_open_at, path))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error
    return False


def _open_at(path: Path, offset: int = 0, /) -> BinaryIO:
    file = path.open("rb")
    file.seek(offset)
    return file


def _link(root: Path, path: Path, content: Descriptor) -> bool:
    """Whether the file could be linked to the place of the blob."""
    place = Path(blob_path(root, content))
    new = place.with_name(f".{secrets.token_hex(8)}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        os.link(path.resolve(), new)  # of a link, what it leads to
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    try:
        if not is_file(os.fspath(new)):
            return False
        with new.open("rb") as file:
            os.fsync(file.fileno())  # the other program may not have waited for the disk
        new.replace(place)
    finally:
        new.unlink(missing_ok=True)  # two names of one file: replace leaves both
    folder = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return True
