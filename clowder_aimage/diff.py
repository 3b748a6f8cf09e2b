"""diff: compare two AImages by their manifests and configs only.

Layers are compared by name and digest, regardless of dialects. Other artifacts (a container image,
a chart) are also compared: their layers are named by title, or else by digest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from clowder_aimage.content.platform import ANY, select
from clowder_aimage.content.store import Source
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.dialect import AImage, Layer, detect
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import MAX_CONFIG_SIZE
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.registry import ClientOptions, Repository

# The dialect of an artifact that is not an AImage.
FOREIGN = "foreign"
# The kinds of layers, by what becomes of them.
KINDS = ("shared", "changed", "added", "removed")
# Levels of a config. Deeper values are compared as a whole.
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Side:
    """A side of the comparison, and its origin (``store`` or ``registry``)."""

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
        repeated = () if self.dialect == FOREIGN else (mediatype.CREATED, mediatype.LICENSES)
        items = self.manifest.annotations.items()
        return {key: value for key, value in items if key not in repeated}


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a named layer: ``a`` is None if it was added, ``b`` if it was removed."""

    name: str
    a: Layer | None
    b: Layer | None

    @property
    def is_tensor(self) -> bool:
        return any(layer.is_tensor for layer in (self.b or self.a,) if layer)

    @property
    def before(self) -> int:
        """The size in A in bytes."""
        return self.a.descriptor.size if self.a else 0

    @property
    def after(self) -> int:
        """The size in B in bytes."""
        return self.b.descriptor.size if self.b else 0


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field of config or annotations: its path, and its value on each side.

    ``a`` and ``b`` hold one value, or none if that side has no such field.
    """

    path: tuple[str, ...]
    a: tuple[Any, ...]
    b: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """All differences; ``fetch`` has the blobs, and their bytes, that B needs in addition to A."""

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
        """Return True if only the dialects may differ."""
        layers = (*self.changed, *self.added, *self.removed)
        return not (layers or self.config or self.annotations)

    def sum_changes(self, kind: str, *, is_tensor: bool) -> tuple[list[Change], int, int]:
        """Return the layers of a kind, and their bytes in A and in B."""
        changes: tuple[Change, ...] = getattr(self, kind)
        chosen = [change for change in changes if change.is_tensor == is_tensor]
        sizes = sum(change.before for change in chosen), sum(change.after for change in chosen)
        return chosen, *sizes

    def to_json(self) -> dict[str, Any]:
        """Return the differences for programs."""
        return {
            "a": _encode_side(self.a),
            "b": _encode_side(self.b),
            "differ": not self.is_empty,
            "tensors": _encode_layers(self, is_tensor=True),
            "files": _encode_layers(self, is_tensor=False),
            "config": [_encode_field(field) for field in self.config],
            "annotations": [_encode_field(field) for field in self.annotations],
            "fetch": {"blobs": len(self.fetch), "size": sum(self.fetch.values())},
        }


def _encode_side(side: Side) -> dict[str, Any]:
    return {
        "reference": str(side.reference),
        "digest": str(side.manifest.digest),
        "mediaType": side.manifest.media_type,
        "dialect": side.dialect,
        "where": side.where,
    }


def _encode_layers(difference: Difference, *, is_tensor: bool) -> dict[str, Any]:
    """Return counts and bytes: ``before`` in A, ``after`` in B. Shared layers are not listed."""
    value: dict[str, Any] = {}
    for kind in KINDS:
        changes, before, after = difference.sum_changes(kind, is_tensor=is_tensor)
        value[kind] = {"count": len(changes), "before": before, "after": after}
        if kind != "shared":
            value[kind]["layers"] = [_encode_change(change) for change in changes]
    return value


def _encode_change(change: Change) -> dict[str, Any]:
    value: dict[str, Any] = {"name": change.name}
    for key, layer in (("a", change.a), ("b", change.b)):
        if layer is not None:
            value[key] = {"digest": str(layer.descriptor.digest), "size": layer.descriptor.size}
            value[key] |= {"dtype": layer.dtype} if layer.dtype is not None else {}
            value[key] |= {"shape": list(layer.shape)} if layer.shape is not None else {}
    return value


def _encode_field(field: FieldChange) -> dict[str, Any]:
    sides = {key: held[0] for key, held in (("a", field.a), ("b", field.b)) if held}
    return {"path": list(field.path), **sides}


def diff(
    a: Reference,
    b: Reference,
    layout: ImageLayout,
    connection: ClientOptions,
    *,
    remote: bool = False,
) -> Difference:
    """Return the differences of ``b`` from ``a``.

    Each is read from ``layout``, or from its registry if ``layout`` lacks it, or with ``remote``.
    No layer is fetched. Of an index, the manifest for this machine's platform is compared.

    Raises:
        UsageError: with ``remote``, a name without a registry; or several manifests of an index
            match.
        NotFoundError: one of them is not found, or its config is missing in the store.
        UnauthorizedError, NetworkError, RegistryError, StoreError: it cannot be read.
        FormatError, VerificationError: it is malformed or damaged.
    """
    old, new = (_read(change, layout, connection, remote) for change in (a, b))
    names = sorted(old.layers.keys() | new.layers.keys())
    changes = [Change(name, old.layers.get(name), new.layers.get(name)) for name in names]
    pairs = [
        (change, change.a.descriptor, change.b.descriptor)
        for change in changes
        if change.a and change.b
    ]
    present = {layer.descriptor.digest for layer in old.layers.values()} | old.blobs.keys()
    return Difference(
        old,
        new,
        shared=tuple(change for change, before, after in pairs if before.digest == after.digest),
        changed=tuple(change for change, before, after in pairs if before.digest != after.digest),
        added=tuple(change for change in changes if change.a is None),
        removed=tuple(change for change in changes if change.b is None),
        config=tuple(_iter_field_changes(old.properties, new.properties)),
        annotations=tuple(_iter_field_changes(old.annotations, new.annotations)),
        fetch={digest: size for digest, size in new.blobs.items() if digest not in present},
    )


def _read(
    reference: Reference, layout: ImageLayout, connection: ClientOptions, remote: bool
) -> Side:
    has_registry = connection.expand(reference).registry is not None
    if remote and not has_registry:
        raise UsageError(
            f"{reference} has no registry host to read it from",
            remedy="diff_remote",
        )
    if not remote:
        try:
            layout.resolve(reference)
        except NotFoundError:
            remote = has_registry
    if not remote:
        return _read_side(layout, reference, "store")
    with Repository(reference, connection) as repository:
        return _read_side(repository, reference, "registry")


def _read_side(source: Source, reference: Reference, where: str) -> Side:
    try:
        _, manifest = select(source, source.resolve(reference), reference, ANY)
    # The remedy of select has options that this verb lacks.
    except UsageError as error:
        error.remedy = ""
        error.hint = f"select one by digest, {reference.name}@DIGEST, or pull one of them"
        raise
    if not isinstance(manifest, Manifest):
        raise FormatError(f"expected a manifest, but {reference} is an index")
    raw = read_all(source.open(manifest.config), manifest.config, MAX_CONFIG_SIZE)
    dialect, aimage = FOREIGN, AImage(raw, tuple(_iter_foreign_layers(manifest)))
    with suppress(FormatError):
        detected = detect(manifest)
        dialect, aimage = detected.name, detected.read(manifest, raw)
    try:
        properties = aimage.properties
    except FormatError:
        if dialect != FOREIGN:
            raise
        # Another tool's config may have any format: it is compared by its digest.
        properties = {"digest": str(Digest.of(raw))}
    layers = {layer.name: layer for layer in aimage.layers}
    return Side(reference, where, manifest, dialect, layers, properties)


def _iter_foreign_layers(manifest: Manifest) -> Iterator[Layer]:
    """Yield the layers by their titles, if these are unique; none of them is a tensor."""
    titles = Counter(layer.annotations.get(mediatype.TITLE, "") for layer in manifest.layers)
    for layer in manifest.layers:
        title = layer.annotations.get(mediatype.TITLE, "")
        plain = Descriptor(layer.media_type, layer.digest, layer.size)
        yield Layer(plain, title if title and titles[title] == 1 else str(layer.digest))


def _iter_field_changes(
    a: Mapping[str, Any], b: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[FieldChange]:
    """Yield the fields that differ between two objects, nested ones included."""
    for key in sorted(a.keys() | b.keys()):
        old, new = ((side[key],) if key in side else () for side in (a, b))
        if len(path) < _MAX_DEPTH and _has_fields(old) and _has_fields(new):
            yield from _iter_field_changes(
                old[0] if old else {}, new[0] if new else {}, (*path, key)
            )
        elif json.dumps(old, sort_keys=True) != json.dumps(new, sort_keys=True):
            # Compared as JSON: unlike in Python, 1 equals neither true nor 1.0.
            yield FieldChange((*path, key), old, new)


def _has_fields(value: tuple[Any, ...]) -> bool:
    """Return True if a value is a non-empty object, or missing."""
    return not value or (isinstance(value[0], dict) and bool(value[0]))
