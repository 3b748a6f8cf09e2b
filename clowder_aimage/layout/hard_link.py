"""Hard links from the files of other programs to blobs."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from clowder_aimage.content.atomic_file import sync_directory
from clowder_aimage.content.store import ContentStore, file_body
from clowder_aimage.content.verified_reader import verify
from clowder_aimage.errors import StoreError
from clowder_aimage.layout.ingest import blob_path, is_file
from clowder_aimage.layout.layout import ImageLayout
from clowder_aimage.oci import Descriptor

# another file system, one without links, another user's file (protected_hardlinks)
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES)


def adopt(store: ContentStore, path: Path, content: Descriptor) -> bool:
    """Add ``content`` to ``store`` from the file at ``path``, by a hard link where possible.

    The file is hashed first. The other program must never change it, as content stores do not.

    Returns:
        Whether it is linked, rather than copied.

    Raises:
        VerificationError: it is not that content.
        StoreError, NoSpaceError: it cannot be read, or cannot be kept.
    """
    try:
        with path.open("rb") as file:
            verify(file, content)
        if isinstance(store, ImageLayout) and _link(store.root, path, content):
            return True
        store.push(content, file_body(path))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error
    return False


def _link(root: Path, path: Path, content: Descriptor) -> bool:
    """Link the file to the path of the blob, and return whether that was possible."""
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
    sync_directory(place.parent)
    return True
