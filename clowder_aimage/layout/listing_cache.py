"""Summaries of manifests for listings, kept beside the index: a manifest never changes."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from clowder_aimage.content.store import ContentStore
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.dialect import detect
from clowder_aimage.errors import AImageError, StoreError
from clowder_aimage.layout.lock import PRIVATE, check_own, make_directory, open_regular
from clowder_aimage.layout.metadata import write_shared
from clowder_aimage.oci import Descriptor, Manifest, mediatype

_KIND = "listing"
_UNKNOWN = {"size": None, "kind": "?"}


def summary(root: Path, store: ContentStore, descriptor: Descriptor) -> dict[str, Any]:
    """Return ``size`` (bytes of all blobs) and ``kind`` (a dialect, or ``index``) of a manifest.

    They are None and ``?`` where the manifest is missing or malformed.
    """
    if descriptor.media_type in mediatype.INDEXES:
        return {"size": None, "kind": "index"}
    path = os.path.join(root, PRIVATE, _KIND, descriptor.digest.encoded)
    with contextlib.suppress(OSError, ValueError, RecursionError, StoreError):
        check_own(root, _KIND)
        with open(open_regular(path), "rb", buffering=0) as file:
            value = json.loads(file.read(4096))
        if isinstance(value, dict) and value.keys() == _UNKNOWN.keys():
            return value
    try:
        manifest = Manifest.parse(read_all(store.open(descriptor), descriptor))
        return remember(root, descriptor, manifest)
    except AImageError:
        return _UNKNOWN  # the other names are listed all the same


def remember(root: Path, descriptor: Descriptor, manifest: Manifest) -> dict[str, Any]:
    """Keep the summary of a manifest, if possible. Raises FormatError: it is not an AImage."""
    value = {"size": sum(blob.size for blob in manifest.children), "kind": detect(manifest).name}
    with contextlib.suppress(OSError, AImageError):
        directory = make_directory(root, PRIVATE, _KIND)
        path = os.path.join(directory, descriptor.digest.encoded)
        write_shared(path, json.dumps(value).encode(), durable=False)
    return value
