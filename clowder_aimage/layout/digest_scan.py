"""What a document needs: every digest that it mentions, found by a pattern.

That is rather too much than too little, holds for documents of any kind, and is twice as fast as
parsing them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from clowder_aimage.errors import AImageError
from clowder_aimage.layout.os_error import store_errors
from clowder_aimage.oci import Digest

LARGEST = 64 * 1024 * 1024  # bytes of a document that is read to see what it needs
MAX_DEPTH = 100  # of indexes, for the stack; far more than can be pulled
_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_CONFIG = re.compile(rb'"config"\s*:\s*\{[^{}]*\}')


def plain(raw: bytes) -> bytes:
    """A document without the roundabout spellings (\\u0073) that JSON has for plain letters."""
    if b"\\u" in raw:
        with contextlib.suppress(ValueError, RecursionError):
            return json.dumps(json.loads(raw)).encode()
    return raw


def mentioned(raw: bytes) -> list[bytes]:
    """The digests in a plain document."""
    return _DIGEST.findall(raw)


def configs(raw: bytes) -> list[bytes]:
    """The digests of its configs: they say what compressed layers unpack to."""
    found = _CONFIG.findall(raw)
    if not found and b'"config"' in raw:  # it has annotations, or the like
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            found = [json.dumps(json.loads(raw)["config"]).encode()]
    return [digest for config in found for digest in _DIGEST.findall(config)]


def documents(raw: bytes) -> Iterator[Digest]:
    """The manifests in an index, whatever they call themselves."""
    if b'"manifests"' not in raw:
        return
    try:
        children = json.loads(raw).get("manifests")
    except (ValueError, RecursionError, AttributeError):
        return
    for child in children if isinstance(children, list) else ():
        with contextlib.suppress(AImageError, AttributeError):
            yield Digest.parse(child.get("digest"))


def blobs(root: Path) -> Iterator[tuple[bytes, os.stat_result]]:
    """All that is called like a blob, by its digest. Raises StoreError."""
    for algorithm in ("sha256", "sha512"):
        with store_errors(root), contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(root / "blobs" / algorithm):
                name = f"{algorithm}:{entry.name}".encode("utf-8", "surrogateescape")
                if _DIGEST.fullmatch(name) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        yield name, entry.stat(follow_symlinks=False)
