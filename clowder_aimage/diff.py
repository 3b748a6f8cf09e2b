"""diff: compare two AImages by their manifests and configs alone.

Layers are compared by name and digest, whatever the dialects. Other artifacts (a container image, a
chart) are compared, too: the names of their layers are their titles, or else their digests.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.content.platform import ANY, Platform, select
from clowder_aimage.content.store import Source
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.dialect import AImage, Layer, detect
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import MAX_CONFIG_SIZE
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.registry import ClientOptions, Repository

FOREIGN = "foreign"  # the dialect of an artifact that is not an AImage
_TITLE = "org.opencontainers.image.title"
_OF_CONFIG = (mediatype.CREATED, mediatype.LICENSES)  # annotations that repeat the config
_MAX_DEPTH = 16  # levels of a config; deeper values are compared as a whole


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two, and where it was found (``store`` or ``registry``)."""

    reference: Reference
    where: str
    manifest: Manifest
    dialect: str
    layers: Mapping[str, Layer]
    properties: Mapping[str, Any]

    @property
    def blobs(self) -> dict[Digest, int]:
        """Return the blobs that a pull fetches, with their sizes in bytes."""
        return {child.digest: child.size for child in self.manifest.children}

    @property
    def annotations(self) -> dict[str, str]:
        """Return the annotations of the manifest that do not repeat the config."""
        said = self.manifest.annotations
        if self.dialect == FOREIGN:
            return dict(said)
        return {key: value for key, value in said.items() if key not in _OF_CONFIG}


@dataclass(frozen=True, slots=True)
class Change:
    """A layer of one name: ``a`` is None where it was added, ``b`` where it was removed."""

    name: str
    a: Layer | None
    b: Layer | None

    @property
    def is_tensor(self) -> bool:
        layer = self.b or self.a
        return layer is not None and layer.is_tensor

    @property
    def before(self) -> int:
        """Bytes in A."""
        return self.a.descriptor.size if self.a else 0

    @property
    def after(self) -> int:
        """Bytes in B."""
        return self.b.descriptor.size if self.b else 0


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field of config or annotations: its path, and its value on each side.

    ``a`` and ``b`` hold one value, or none where that side has no such field.
    """

    path: tuple[str, ...]
    a: tuple[Any, ...]
    b: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """All differences; ``fetch`` are the blobs, and their bytes, that B needs beside A."""

    a: Side
    b: Side
    shared: tuple[Change, ...]
    changed: tuple[Change, ...]
    added: tuple[Change, ...]
    removed: tuple[Change, ...]
    config: tuple[FieldChange, ...]
    annotations: tuple[FieldChange, ...]
    fetch: Mapping[Digest, int]

    @property
    def is_empty(self) -> bool:
        """Return whether only the dialects may differ."""
        layers = (*self.changed, *self.added, *self.removed)
        return not (layers or self.config or self.annotations)


def diff(
    a: Reference,
    b: Reference,
    layout: ImageLayout,
    connection: ClientOptions,
    *,
    remote: bool = False,
) -> Difference:
    """Return how ``b`` differs from ``a``.

    Each is read from ``layout``, or from its registry if it is missing there, or with ``remote``.
    No layer is fetched. An index stands for its manifest for this machine's platform.

    Raises:
        UsageError: with ``remote``, a name without a registry; or an index in which more than one
            manifest fits.
        NotFoundError: one of them is not found, or its config is missing in the store.
        UnauthorizedError, NetworkError, RegistryError, StoreError: it cannot be read.
        FormatError, VerificationError: it is malformed or damaged.
    """
    first = _read(a, layout, connection, remote)
    return compare(first, _read(b, layout, connection, remote))


def compare(a: Side, b: Side) -> Difference:
    """Return how ``b`` differs from ``a``. Raises FormatError for a config nested too deeply."""
    names = sorted(a.layers.keys() | b.layers.keys())
    all_ = [Change(name, a.layers.get(name), b.layers.get(name)) for name in names]
    both = [(one, one.a.descriptor, one.b.descriptor) for one in all_ if one.a and one.b]
    here = {layer.descriptor.digest for layer in a.layers.values()} | a.blobs.keys()
    try:
        config = tuple(_fields(a.properties, b.properties))
    except RecursionError:
        raise FormatError("a config is nested too deeply to be compared") from None
    return Difference(
        a,
        b,
        shared=tuple(one for one, old, new in both if old.digest == new.digest),
        changed=tuple(one for one, old, new in both if old.digest != new.digest),
        added=tuple(one for one in all_ if one.a is None),
        removed=tuple(one for one in all_ if one.b is None),
        config=config,
        annotations=tuple(_fields(a.annotations, b.annotations)),
        fetch={digest: size for digest, size in b.blobs.items() if digest not in here},
    )


def _read(
    reference: Reference, layout: ImageLayout, connection: ClientOptions, remote: bool
) -> Side:
    """Read one side, from the store if it is there."""
    if not remote:
        try:
            layout.resolve(reference)
        except NotFoundError:
            if reference.registry is None:
                raise
        else:
            return _side(layout, reference, "store")
    elif reference.registry is None:
        raise UsageError(
            f"{reference} has no registry host: it names an AImage in the local store",
            remedy="diff_remote",
        )
    with Repository(reference, connection) as repository:
        return _side(repository, reference, "registry")


def _side(source: Source, reference: Reference, where: str) -> Side:
    machine = os.uname()
    try:
        here = Platform.of(machine.sysname, machine.machine)
        _, manifest = select(source, source.resolve(reference), reference, ANY, here)
    except UsageError as error:
        error.remedy = ""
        error.hint = f"name one by its digest, {reference.name}@DIGEST, or pull it under a name"
        raise
    if not isinstance(manifest, Manifest):
        raise FormatError(f"{reference} is an index")
    raw = read_all(source.open(manifest.config), manifest.config, MAX_CONFIG_SIZE)
    dialect, aimage = _aimage(manifest, raw)
    layers = {layer.name: layer for layer in aimage.layers}
    properties = _object(raw) if dialect == FOREIGN else aimage.properties
    return Side(reference, where, manifest, dialect, layers, properties)


def _aimage(manifest: Manifest, config: bytes) -> tuple[str, AImage]:
    """Return the dialect and the AImage; for another artifact, one with its layers."""
    try:
        dialect = detect(manifest)
        return dialect.name, dialect.read(manifest, config)
    except FormatError:
        return FOREIGN, AImage(config, tuple(_foreign(manifest)))


def _foreign(manifest: Manifest) -> Iterator[Layer]:
    """Yield the layers by their titles, where these are unique; none of them is a tensor."""
    titles = Counter(layer.annotations.get(_TITLE, "") for layer in manifest.layers)
    for layer in manifest.layers:
        title = layer.annotations.get(_TITLE, "")
        plain = Descriptor(layer.media_type, layer.digest, layer.size)
        yield Layer(plain, title if title and titles[title] == 1 else str(layer.digest))


def _object(raw: bytes) -> dict[str, Any]:
    """Parse another tool's config; for one that is not a JSON object, return its digest."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(raw)
        if isinstance(value, dict):
            return value
    return {"digest": str(Digest.of(raw))}


def _fields(
    a: Mapping[str, Any], b: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[FieldChange]:
    """Yield the fields that differ between two objects, nested ones included."""
    for key in sorted(a.keys() | b.keys()):
        old, new = ((side[key],) if key in side else () for side in (a, b))
        if len(path) < _MAX_DEPTH and _has_fields(old) and _has_fields(new):
            yield from _fields(old[0] if old else {}, new[0] if new else {}, (*path, key))
        elif not _same(old, new):
            yield FieldChange((*path, key), old, new)


def _has_fields(value: tuple[Any, ...]) -> bool:
    """Return whether a value is a non-empty object, or missing."""
    return not value or (isinstance(value[0], dict) and bool(value[0]))


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Compare as JSON: unlike in Python, ``1`` equals neither ``true`` nor ``1.0``."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
