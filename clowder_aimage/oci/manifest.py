"""Image manifests and indexes (OCI image-spec, manifest.md and image-index.md).

The received bytes are kept and never serialised again, so that the digest stays the same and
unknown fields survive.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from clowder_aimage.document.strict_json import MAX_DOCUMENT_SIZE, ParseCache, read_json
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import mediatype
from clowder_aimage.oci.descriptor import Descriptor, check_spelling, read_annotations
from clowder_aimage.oci.digest import Digest

MAX_MANIFEST_SIZE = MAX_DOCUMENT_SIZE
_PARSED = ParseCache()
# Manifests share most of their layers with others: a layer of up to this many bytes is parsed once.
_MAX_LAYER = 1024
_MAX_LAYERS = 2048
_LAYERS, _SEPARATOR, _END = b'"layers":[{', b"},{", b"}]"
_LOOSE_SEPARATOR = re.compile(rb"\}(?:[ \t\n\r]+,[ \t\n\r]*|,[ \t\n\r]+)\{")
# Static file servers send these types for every document.
_UNSPECIFIC = frozenset({"application/json", "application/octet-stream", "text/plain"})
_FIELDS = frozenset(
    "schemaVersion mediaType artifactType config layers manifests subject annotations".split()
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One artifact: a config and its layers in order."""

    raw: bytes
    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]
    artifact_type: str
    annotations: Mapping[str, str]
    subject: Descriptor | None
    digest: Digest

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor of the document's bytes."""
        return Descriptor(self.media_type, self.digest, len(self.raw))

    @property
    def children(self) -> tuple[Descriptor, ...]:
        """The content that must be stored before this document."""
        return (self.config, *self.layers)

    @classmethod
    def parse(cls, raw: bytes, media_type: str = "", digest: Digest | None = None) -> Manifest:
        """Parse the bytes of a manifest; ``media_type`` is from the transport.

        ``digest`` is that of the bytes, if it has been verified.

        Raises:
            FormatError: the bytes are not a manifest, or not one of that media type.
        """
        return cls._check(parse_document(raw, media_type, digest))

    @classmethod
    def parse_once(cls, raw: bytes, digest: Digest) -> Manifest:
        """Parse a manifest with a verified digest as ``parse`` does, but keep no value for others.

        Raises FormatError.
        """
        if len(raw) > MAX_MANIFEST_SIZE or digest.algorithm != "sha256":
            return cls.parse(raw, digest=digest)
        return cls._check(_parse(raw, "", digest))

    @classmethod
    def _check(cls, document: Manifest | Index) -> Manifest:
        if not isinstance(document, cls):
            raise FormatError(
                f"{document.media_type} is an index, not a manifest",
                hint="select one of its manifests by variant or platform",
                remedy="choose_manifest",
            )
        return document

    @classmethod
    def build(cls, document: Mapping[str, Any]) -> Manifest:
        """Build a manifest from JSON values: compact, in the given order."""
        return cls.parse(encode(document))


@dataclass(frozen=True, slots=True)
class Index:
    """Several manifests under one digest."""

    raw: bytes
    media_type: str
    manifests: tuple[Descriptor, ...]
    artifact_type: str
    annotations: Mapping[str, str]
    subject: Descriptor | None
    digest: Digest

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor of the document's bytes."""
        return Descriptor(self.media_type, self.digest, len(self.raw))

    @property
    def children(self) -> tuple[Descriptor, ...]:
        """The content that must be stored before this document."""
        return self.manifests


def encode(value: object) -> bytes:
    """Return compact JSON in UTF-8, keys in the given order: the same bytes on every machine.

    Raises:
        FormatError: a string in it has a lone surrogate.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        context = text[max(0, error.start - 40) : error.end]
        raise FormatError(f"invalid Unicode text: {context!r}") from None


def parse_document(
    raw: bytes, media_type: str = "", digest: Digest | None = None
) -> Manifest | Index:
    """Parse a manifest or an index; ``digest`` is that of the bytes, if it has been verified.

    Raises:
        FormatError: it is not JSON, too large, both a manifest and an index (CVE-2021-41190), of
            another media type than the transport's, or has a malformed descriptor.
    """
    if len(raw) > MAX_MANIFEST_SIZE:
        raise FormatError(
            f"a manifest of {len(raw)} bytes is too large: the limit is {MAX_MANIFEST_SIZE}",
            hint="pack the model into fewer layers, with its experts together",
        )
    if digest is None or digest.algorithm != "sha256":
        digest = Digest.of(raw)
    return _PARSED.get((digest, media_type), len(raw), lambda: _parse(raw, media_type, digest))


def _parse(raw: bytes, media_type: str, digest: Digest) -> Manifest | Index:
    text, layers = _split_layers(raw) or (raw, None)
    value = _load(text)
    if layers is not None and "layers" not in value:
        # The list is that of another object
        value, layers = _load(raw), None
    media_type = _resolve_media_type(value, media_type.partition(";")[0].strip())
    # A document that is a manifest to one client and an index to another is refused
    # (CVE-2021-41190).
    has_layers = "layers" in value or "config" in value
    if has_layers and "manifests" in value:
        raise FormatError("a document with both layers and manifests is ambiguous")
    common: dict[str, Any] = {
        "raw": raw,
        "media_type": media_type,
        "artifact_type": _parse_string(value, "artifactType"),
        "annotations": read_annotations(value, "the manifest"),
        "subject": Descriptor.from_json(value["subject"], "subject")
        if value.get("subject") is not None
        else None,
        "digest": digest,
    }
    if media_type in mediatype.INDEXES:
        if has_layers:
            raise FormatError(
                f"the media type is that of an index ({media_type}), but the content has layers"
            )
        return Index(manifests=_parse_descriptors(value, "manifests"), **common)
    config = Descriptor.from_json(value.get("config"), "config")
    layers = _parse_descriptors(value, "layers") if layers is None else layers
    return Manifest(config=config, layers=layers, **common)


def is_unspecific(media_type: str) -> bool:
    """Return True for another type than that of a document, as which one can be parsed."""
    plain = media_type.partition(";")[0].strip()
    is_parsed = not plain or plain in _UNSPECIFIC | mediatype.DOCUMENTS
    return is_parsed and media_type not in mediatype.DOCUMENTS


def _split_layers(raw: bytes) -> tuple[bytes, tuple[Descriptor, ...]] | None:
    """Return the text of a compact manifest with an empty list of layers, and the layers.

    None if a layer is invalid, nested or long, or if the place of the list is
    uncertain: the whole text is parsed then.
    """
    start, end = raw.find(_LAYERS) + len(_LAYERS), raw.rfind(_END)
    if start < len(_LAYERS) or end < start:
        return None
    rest = raw[: start - 1] + raw[end + 1 :]
    if rest.count(b'"layers"') != 1 or b"\\" in rest:
        return None
    layers = _LAYER_CACHE.parse(raw[start:end])
    return None if layers is None else (rest, layers)


class _LayerCache:
    """Layers by their texts: manifests share most of them, and each text is parsed once.

    Layers at the start of a list that the last one began with, too, are not even divided.
    """

    def __init__(self) -> None:
        self._layers: dict[bytes, Descriptor] = {}
        # A list: its text, the starts of all layers but the first one, and the layers
        self._last: tuple[bytes, list[int], tuple[Descriptor, ...]] = b"", [], ()

    def parse(self, text: bytes) -> tuple[Descriptor, ...] | None:
        """Return the layers of a list without its outer braces.

        None if one is invalid, or if there are too many.
        """
        last, starts, layers = self._last
        same = bisect_left(starts, True, key=lambda start: not text.startswith(last[:start]))
        start = starts[same - 1] if same else 0
        pieces = text[start:].split(_SEPARATOR)
        if same + len(pieces) > _MAX_LAYERS or (found := self._find(pieces)) is None:
            return None
        lengths = (len(piece) + len(_SEPARATOR) for piece in pieces[:-1])
        new_starts = islice(accumulate(lengths, initial=start), 1, None)
        self._last = text, [*starts[:same], *new_starts], (*layers[:same], *found)
        return (*layers[:same], *found)

    def _find(self, texts: list[bytes]) -> tuple[Descriptor, ...] | None:
        known = self._layers
        if new := [text for text in texts if text not in known]:
            if (parsed := _parse_layers(new)) is None:
                return None
            if len(known) + len(new) > _MAX_LAYERS:
                known = self._layers = {text: known[text] for text in texts if text in known}
            known.update(zip(new, parsed, strict=True))
        return tuple(map(known.__getitem__, texts))


_LAYER_CACHE = _LayerCache()


def _parse_layers(texts: list[bytes]) -> list[Descriptor] | None:
    """Return the layers with these texts, parsed as one list; None if one is invalid or nested.

    A separator within a string makes the list shorter. Only one with spaces makes it longer.
    """
    raw = b"[{" + _SEPARATOR.join(texts) + b"}]"
    if max(map(len, texts)) > _MAX_LAYER or _LOOSE_SEPARATOR.search(raw):
        return None
    try:
        values = read_json(raw, "the layers")
        layers = [Descriptor.from_json(value, "a layer") for value in values]
    except FormatError:
        return None
    extras = [item for layer in layers if layer.extra for item in layer.extra.values()]
    is_nested = any(isinstance(item, (dict, list)) for item in extras)
    return None if is_nested or len(layers) != len(texts) else layers


def _load(raw: bytes) -> dict[str, Any]:
    value = read_json(raw, "the manifest")
    if not isinstance(value, dict):
        raise FormatError("a manifest must be a JSON object")
    check_spelling(value, _FIELDS, "the manifest")
    version = value.get("schemaVersion")
    if version == 1:
        raise FormatError(
            "unsupported Docker schema 1 manifest, which has no config and no sizes",
            hint="push it again with a newer tool, in OCI format",
            remedy="convert_schema_1",
        )
    # Go does not read 2.0 as an integer.
    if type(version) is not int or version != 2:
        raise FormatError(f"schemaVersion must be 2, not {version!r:.40}")
    return value


def _resolve_media_type(value: Mapping[str, Any], transport: str) -> str:
    """Return the document's media type. The stated one and the transport's must agree."""
    stated = _parse_string(value, "mediaType")
    if transport in _UNSPECIFIC:
        transport = ""
    if stated and transport and stated != transport:
        raise FormatError(f"its media type is {stated[:100]}, expected {transport[:100]}")
    guess = mediatype.OCI_INDEX if "manifests" in value else mediatype.OCI_MANIFEST
    media_type = stated or transport or guess
    if media_type not in mediatype.MANIFESTS | mediatype.INDEXES:
        raise FormatError(f"unsupported manifest media type {media_type[:100]!r}")
    return media_type


def _parse_descriptors(value: Mapping[str, Any], key: str) -> tuple[Descriptor, ...]:
    items = value.get(key)
    if items is None and key in value:
        # Go writes an empty list as null.
        return ()
    if not isinstance(items, list):
        raise FormatError(f"{key} must be a list")
    return tuple(Descriptor.from_json(item, f"{key}[{i}]") for i, item in enumerate(items))


def _parse_string(value: Mapping[str, Any], key: str) -> str:
    item = value.get(key, "")
    if not isinstance(item, str):
        raise FormatError(f"{key} must be a string")
    return item
