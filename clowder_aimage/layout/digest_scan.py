"""Scan documents for the digests that they mention.

A pattern may match too much but misses nothing, works for documents of any kind and depth, and is
twice as fast as a parser. Collections thus keep the content that other tools need (docs/adr/0010).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.errors import AImageError
from clowder_aimage.layout.lock import translate_store_errors
from clowder_aimage.oci import Digest

# Maximum bytes of a scanned document
LARGEST = 64 * 1024 * 1024
# The algorithms of blobs, and the hex digits of their digests
ALGORITHMS = {"sha256": 64, "sha512": 128}
_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_CONFIG = re.compile(rb'"config"\s*:\s*\{[^{}]*\}')

Read = Callable[[str], bytes | None]


@dataclass(frozen=True, slots=True)
class ScannedDocument:
    """The digests in a document, and those of manifests and of configs among them."""

    digests: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    configs: tuple[str, ...] = ()


class DigestScanner:
    """A cache of scanned documents. Equal digests share one string, to save memory.

    ``companions``: by the digest of a manifest, those of manifests that live as long as it.
    """

    def __init__(self, companions: Mapping[str, Sequence[str]] | None = None) -> None:
        self.companions = companions or {}
        self._documents: dict[str, ScannedDocument] = {}
        self._interned: dict[bytes, str] = {}

    def walk(self, root: str, read: Read) -> Iterator[tuple[str, ScannedDocument | None]]:
        """Yield a document and all below it, each once; None for one that ``read`` lacks.

        The companions of a manifest are below it.
        """
        pending, visited = [root], set()
        while pending:
            digest = pending.pop()
            if digest not in visited:
                visited.add(digest)
                document = self.scan(digest, read)
                yield digest, document
                pending += document.documents if document else ()
                pending += self.companions.get(digest, ())

    def scan(self, digest: str, read: Read) -> ScannedDocument | None:
        """Return the digests in one document, or None if ``read`` does not find it."""
        if digest not in self._documents:
            if (raw := read(digest)) is None:
                return None
            raw = normalize(raw)
            self._documents[digest] = ScannedDocument(
                tuple(self._intern(_DIGEST.findall(raw))),
                tuple(str(child) for child in iter_manifests(raw)),
                tuple(self._intern(_find_configs(raw))),
            )
        return self._documents[digest]

    def needs(self, root: str, read: Read, read_config: Read) -> set[str]:
        """Return the root and all digests in it, in the documents below it and in their configs.

        The configs contain the digests of layers that other tools compress.
        """
        digests = {root}
        for digest, document in self.walk(root, read):
            digests.add(digest)
            if document is not None:
                digests.update(document.digests)
                for config in document.configs:
                    if (scanned := self.scan(config, read_config)) is not None:
                        digests.update(scanned.digests)
        return digests

    def _intern(self, digests: list[bytes]) -> Iterable[str]:
        if not digests:
            return ()
        interned = self._interned
        for digest in set(digests).difference(interned):
            interned[digest] = digest.decode()
        return map(interned.__getitem__, digests)


def find_digests(raw: bytes) -> set[str]:
    """Return the digests in a plain document."""
    return {digest.decode() for digest in _DIGEST.findall(raw)}


def normalize(raw: bytes) -> bytes:
    """Return a document with JSON's escapes of code points replaced by plain letters."""
    # A digest may be written as "sha256\u003a...".
    if b"\\u" in raw:
        with contextlib.suppress(ValueError, RecursionError):
            return json.dumps(json.loads(raw)).encode()
    return raw


def iter_manifests(raw: bytes) -> Iterator[Digest]:
    """Yield the manifests in an index, regardless of media types."""
    if b'"manifests"' not in raw:
        return
    try:
        children = json.loads(raw).get("manifests")
    except (ValueError, RecursionError, AttributeError):
        return
    for child in children if isinstance(children, list) else ():
        with contextlib.suppress(AImageError, AttributeError):
            yield Digest.parse(child.get("digest"))


def _find_configs(raw: bytes) -> list[bytes]:
    if b'"config"' not in raw:
        return []
    configs = _CONFIG.findall(raw)
    # The pattern fails if the descriptor has objects, such as annotations.
    if not configs:
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            configs = [json.dumps(json.loads(raw)["config"]).encode()]
    return [digest for config in configs for digest in _DIGEST.findall(config)]


def iter_blobs(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the digest and the status of all files named like blobs. Raises StoreError."""
    for algorithm, size in ALGORITHMS.items():
        is_encoded = re.compile(f"[0-9a-f]{{{size}}}").fullmatch
        with (
            translate_store_errors(root),
            contextlib.suppress(FileNotFoundError),
            # A status takes less time by the descriptor of the directory than by a path
            OpenDirectory(root / "blobs" / algorithm) as directory,
        ):
            for entry in os.scandir(directory.fd):
                if is_encoded(entry.name) and entry.is_file(follow_symlinks=False):
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield f"{algorithm}:{entry.name}", status
