"""Descriptions of manifests, kept in the store by digest: each is derived once.

Content never changes, so a description holds until another version of the program derives it. That
there is nothing to describe is kept, too. Other programs may write these files: who reads a
description checks its form, and derives it again if that is another.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from clowder_aimage import __version__
from clowder_aimage.errors import AImageError, FormatError, StoreError
from clowder_aimage.layout.lock import PRIVATE, check_own, make_directory, open_regular
from clowder_aimage.layout.metadata import write_shared
from clowder_aimage.oci import Digest, read_json

LISTING, MODEL = "listing", "described"
# Of the manifests of unpacked files
UNPACKED = "unpacked"
# The memory of models
MEASURED = "measured"
# Those that garbage collection removes with their manifests
KINDS = (LISTING, MODEL, UNPACKED, MEASURED)
# Bytes of a file
_MAX_SIZE = 64 * 1024


def read_description(root: Path, kind: str, manifest: Digest) -> dict[str, Any] | None:
    """Return the description of a manifest, unchecked; None without one of this version."""
    with contextlib.suppress(OSError, FormatError, StoreError):
        path = os.path.join(check_own(root, kind), manifest.encoded)
        with open(open_regular(path), "rb", buffering=0) as file:
            value = read_json(file.read(_MAX_SIZE) or b"", "it")
        if isinstance(value, dict) and value.pop("version", None) == __version__:
            return value
    return None


def keep_description(root: Path, kind: str, manifest: Digest, value: dict[str, Any]) -> bool:
    """Write the description of a manifest; return False if it is too long to be kept.

    A store that cannot be written stays as it is.
    """
    data = json.dumps({"version": __version__} | value).encode()
    if len(data) >= _MAX_SIZE:
        return False
    with contextlib.suppress(OSError, AImageError):
        directory = make_directory(root, PRIVATE, kind)
        write_shared(os.path.join(directory, manifest.encoded), data, durable=False)
    return True
