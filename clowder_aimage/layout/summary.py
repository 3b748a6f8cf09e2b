"""Summaries of manifests for listings, which are kept in the store."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from clowder_aimage.content.store import ContentStore
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.errors import AImageError, is_passing
from clowder_aimage.layout.blob_directory import BlobDirectories
from clowder_aimage.layout.description import LISTING, DescriptionFiles
from clowder_aimage.oci import MAX_MANIFEST_SIZE, Descriptor, Manifest, mediatype

_UNKNOWN = {"size": None, "kind": "?", "family": None, "type": None, "created": None}
# Characters of a value from a config
_MAX_TEXT = 60


class SummaryReader:
    """The summaries of the manifests in a store; new ones are kept when it is closed."""

    def __init__(self, store: ContentStore, root: Path) -> None:
        self._store, self._files = store, DescriptionFiles(root, LISTING)
        self._blobs: BlobDirectories | None = None
        # Reads of single blobs report what is wrong
        with contextlib.suppress(OSError):
            self._blobs = BlobDirectories([root])

    def __enter__(self) -> SummaryReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._blobs is not None:
            self._blobs.__exit__(kind, error, trace)
        self._files.__exit__(kind, error, trace)

    def read(self, descriptor: Descriptor) -> dict[str, Any]:
        """Return ``size`` (bytes of all blobs) and ``kind`` (a dialect, or ``index``).

        ``family``, ``type`` (quantization or dtype) and ``created`` are those in its config. They
        are None, and ``kind`` is ``?``, if the manifest is missing or malformed.
        """
        if descriptor.media_type in mediatype.INDEXES:
            return _UNKNOWN | {"kind": "index"}
        value = self._files.read(descriptor.digest)
        if value is not None and _is_summary(value):
            return value
        try:
            raw = self._read_blob(descriptor)
            # Of thousands, each is read once
            return self.derive(descriptor, Manifest.parse_once(raw, descriptor.digest))
        except AImageError as error:
            if not is_passing(error):
                self._files.add(descriptor.digest, _UNKNOWN)
        return _UNKNOWN

    def derive(self, descriptor: Descriptor, manifest: Manifest) -> dict[str, Any]:
        """Derive the summary of a manifest. Raises FormatError: it is not an AImage."""
        from clowder_aimage.dialect import detect
        from clowder_aimage.dialect.aimage import parse_config

        dialect = detect(manifest)
        size = sum(blob.size for blob in manifest.children)
        value, is_final = _UNKNOWN | {"size": size, "kind": dialect.name}, True
        try:
            config = self._read_blob(manifest.config)
            properties = parse_config(dialect.read_config(manifest, config))
            family = (
                properties.get("family")
                or properties.get("architecture")
                or properties.get("format")
            )
            fields = {
                "family": family,
                "type": find_weight_type(properties),
                "created": properties.get("created"),
            }
            value |= {key: _shorten(text) for key, text in fields.items()}
        except (AImageError, OSError) as error:
            is_final = not is_passing(error)
        if is_final:
            self._files.add(descriptor.digest, value)
        return value

    def _read_blob(self, content: Descriptor) -> bytes:
        """Return a blob, verified. Raises NotFoundError, VerificationError, StoreError."""
        if self._blobs is not None and content.size <= MAX_MANIFEST_SIZE:
            with contextlib.suppress(OSError):
                raw = self._blobs.read(str(content.digest), content.size + 1)
                if raw is not None and content.digest.matches(raw):
                    return raw
        # Damaged, or in another store
        return read_all(self._store.open(content), content)


def _is_summary(value: dict[str, Any]) -> bool:
    texts = [text for key, text in value.items() if key != "size" and text is not None]
    size = value.get("size")
    return (
        value.keys() == _UNKNOWN.keys()
        and (size is None or (type(size) is int and size >= 0))
        and value["kind"] is not None
        and all(isinstance(text, str) and text == _shorten(text) for text in texts)
    )


def keep_summary(
    store: ContentStore, root: Path, descriptor: Descriptor, manifest: Manifest
) -> None:
    """Keep the summary of a manifest, if possible. Raises FormatError: it is not an AImage."""
    with SummaryReader(store, root) as summaries:
        summaries.derive(descriptor, manifest)


def find_weight_type(properties: Mapping[str, Any]) -> object:
    """Return the quantization of the weights in a config, else their dtype."""
    if isinstance(name := properties.get("quantization"), str):
        return name
    components = properties.get("components")
    for component in components.values() if isinstance(components, dict) else ():
        quantization = component.get("quantization") if isinstance(component, dict) else None
        if isinstance(quantization, dict) and isinstance(quantization.get("type"), str):
            return quantization["type"]
    return properties.get("dtype")


def _shorten(text: object) -> str | None:
    return " ".join(text.split())[:_MAX_TEXT] if isinstance(text, str) and text else None
