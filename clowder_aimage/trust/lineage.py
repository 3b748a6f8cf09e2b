"""Derivations: from which AImage, and by which recipe, another AImage was computed.

The statement is an in-toto statement of version 1, in an artifact whose subject is the derived
manifest, which does not change. It has no time: the same derivation by the same version is the same
artifact. Anybody can write one. It is a claim, which computing the AImage again proves
(``clowder_aimage.rederive``).
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from clowder_aimage import __version__
from clowder_aimage.content.gate import unchecked
from clowder_aimage.content.store import ContentStore, Lease, Source, build_bytes_body
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.errors import AccessError, ContentError, FormatError, NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.attachment import attach, list_attachments
from clowder_aimage.oci import Descriptor, Digest, Index, Manifest, mediatype
from clowder_aimage.oci.artifact import EMPTY, EMPTY_CONFIG, build_artifact
from clowder_aimage.trust.dsse import IN_TOTO, read_object
from clowder_aimage.trust.statement import Statement, build_statement

PREDICATE = "https://clowder.dev/aimage/derivation/v1"
# The artifact type of a statement
TYPE = mediatype.AIMAGE_DERIVATION
# Of the manifest and of its layer, as BuildKit annotates attestations
PREDICATE_TYPE = "in-toto.io/predicate-type"
TOOL = "clowder-aimage"
# Bytes of a statement and of its manifest, and statements about one manifest
MAX_STATEMENT, MAX_STATEMENTS = 128 * 1024, 16
# Entries in the list of a registry
MAX_REFERRERS = 1000
_MAX_ADAPTERS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


class Operation(StrEnum):
    """The change of the parent."""

    CAST = "cast"
    QUANTIZE = "quantize"
    # Adapters added to weights, and packed beside them
    FUSE = "fuse"
    ADAPT = "adapt"
    # The language model in an image model
    EXTRACT = "extract"


@dataclass(frozen=True, slots=True)
class ComponentType:
    """The quantization of a component, by its name in options; ``group_size`` None is of that."""

    type: str
    group_size: int | None = None


@dataclass(frozen=True, slots=True)
class UsedAdapter:
    """An adapter: its name, the digest of its manifest or of its file, and its strength."""

    name: str
    digest: Digest
    strength: float


@dataclass(frozen=True, slots=True)
class DerivationRecipe:
    """An operation and what it depends on.

    ``dtype`` is that of casts; ``components`` are the quantized ones. ``weights`` is an AImage with
    weights in place of those of the parent: the unquantized values of a fused model, or tensors of
    an extracted one. ``is_variant``: the parent is the subject of the derived manifest.
    """

    operation: Operation
    dtype: str | None = None
    components: Mapping[str, ComponentType] = field(default_factory=dict)
    adapters: tuple[UsedAdapter, ...] = ()
    weights: Digest | None = None
    is_variant: bool = False

    @property
    def summary(self) -> str:
        """Return the operation in a few words, such as ``quantize (transformer int8)``."""
        parts = [f"{name} {chosen.type}" for name, chosen in sorted(self.components.items())]
        parts += [self.dtype] if self.dtype else []
        parts += [f"{used.name}:{used.strength:g}" for used in self.adapters]
        return f"{self.operation} ({', '.join(parts)})" if parts else str(self.operation)


@dataclass(frozen=True, slots=True)
class Derivation:
    """The manifest that was derived from, the recipe, the version of the tool that did it.

    ``specification`` names the arithmetic: the same one gives the same bytes on every machine.
    """

    parent: Digest
    recipe: DerivationRecipe
    specification: str
    tool: str = __version__

    @classmethod
    def parse(cls, payload: bytes, subject: Digest) -> Derivation:
        """Parse a statement about the manifest ``subject``. Raises FormatError."""
        statement = Statement.parse(IN_TOTO, payload, "the statement of a derivation")
        if statement.predicate_type != PREDICATE:
            raise FormatError(f"it states no derivation: {statement.predicate_type[:100]!r}")
        if not statement.covers(subject):
            raise FormatError("it is a statement about another manifest")
        value = read_object(statement.predicate.get("derivation"), "the derivation")
        tool = read_object(value.get("tool", {}), "the tool").get("version", "")
        return cls(
            _parse_content(value.get("parent"), "the parent"),
            _parse_recipe(read_object(value.get("recipe"), "the recipe")),
            _parse_name(value.get("spec"), "the specification"),
            _parse_name(tool, "the version of the tool"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the derivation as it is in the predicate."""
        return {
            "parent": _encode_content(self.parent),
            "recipe": _encode_recipe(self.recipe),
            "tool": {"name": TOOL, "version": self.tool},
            "spec": self.specification,
        }

    def encode(self, subject: Digest) -> bytes:
        """Return the statement about the manifest ``subject``."""
        content = {"name": "", **_encode_content(subject)}
        return build_statement(PREDICATE, content, {"derivation": self.to_json()})

    def is_same(self, other: Derivation) -> bool:
        """Return True if both state the same, by any version of the tool."""
        mine = (self.parent, self.recipe, self.specification)
        return mine == (other.parent, other.recipe, other.specification)


def build_referrer(derivation: Derivation, subject: Descriptor) -> tuple[Manifest, bytes]:
    """Return the artifact with the statement, whose subject is the derived manifest, and that."""
    payload = derivation.encode(subject.digest)
    annotations = {PREDICATE_TYPE: PREDICATE}
    layer = Descriptor(IN_TOTO, Digest.of(payload), len(payload), annotations)
    return build_artifact(TYPE, [layer], subject, annotations), payload


def keep_derivation(
    store: ContentStore, lease: Lease, subject: Descriptor, derivation: Derivation
) -> None:
    """Attach the statement to a manifest in a store, unless it has one that states the same.

    Raises StoreError, NoSpaceError.
    """
    is_itself = derivation.parent == subject.digest
    if is_itself or not isinstance(store, ImageLayout):
        return
    if any(derivation.is_same(known) for known in _iter_kept(store, subject.digest)):
        return
    manifest, payload = build_referrer(derivation, subject)
    contents = [
        (manifest.layers[0], payload),
        (manifest.config, EMPTY),
        (manifest.descriptor, manifest.raw),
    ]
    lease.add(*(content.digest for content, _ in contents))
    with store.begin_batch():
        for content, data in contents:
            store.push(content, build_bytes_body(data))
    attach(store, subject.digest, manifest.descriptor)


def _iter_kept(store: ImageLayout, subject: Digest) -> Iterator[Derivation]:
    for entry in list_attachments(store.roots, subject):
        # One that is damaged is written again
        with contextlib.suppress(ContentError, AccessError):
            yield read_statement(store, entry, subject)


def is_statement(document: Manifest | Index) -> bool:
    """Return True for an artifact with nothing but a statement: no policy decides about it.

    No dialect reads it as an AImage (``dialect.detect``).
    """
    if not isinstance(document, Manifest) or document.artifact_type != TYPE:
        return False
    if document.config.digest != EMPTY_CONFIG.digest:
        return False
    kinds = [child.media_type for child in document.children]
    is_small = all(child.size <= MAX_STATEMENT for child in document.children)
    return is_small and kinds == [mediatype.OCI_EMPTY, IN_TOTO]


def adopt_statement(store: ImageLayout, content: Descriptor) -> None:
    """Attach a stored statement to its subject.

    Raises NotFoundError, ContentError: it is not complete, or is none; StoreError, NoSpaceError.
    """
    with unchecked():
        manifest = Manifest.parse(
            read_all(store.open(content), content, MAX_STATEMENT), content.media_type
        )
    if manifest.artifact_type != TYPE or manifest.subject is None:
        raise FormatError(f"{content.digest} is not a statement of a derivation")
    # One of a later version is kept, too: it is parsed where it is used.
    if len(manifest.layers) != 1 or manifest.layers[0].size > MAX_STATEMENT:
        raise FormatError(f"{content.digest} has not exactly one statement of a valid size")
    for child in manifest.children:
        store.find_path(child)
    attach(store, manifest.subject.digest, manifest.descriptor)


def read_derivation(source: Source, subject: Descriptor) -> Derivation | None:
    """Return what the first readable statement about a manifest states; None without one.

    ``source`` is a store or a repository. Raises AccessError; FormatError: there are too many.
    """
    for entry in list_statements(source, subject.digest):
        try:
            return read_statement(source, entry, subject.digest)
        except (ContentError, NotFoundError):
            continue
    return None


def list_statements(source: Source, subject: Digest) -> Sequence[Descriptor]:
    """Return the artifacts with statements about a manifest.

    Raises AccessError; FormatError: there are more than MAX_STATEMENTS.
    """
    if isinstance(source, ImageLayout):
        entries = [*list_attachments(source.roots, subject), *_iter_named(source, subject)]
    else:
        # Packing does not need the registry client.
        from clowder_aimage.registry import Repository

        assert isinstance(source, Repository)  # noqa: S101 - the sources with referrers
        entries = source.list_referrers(subject, TYPE, MAX_REFERRERS)
    found = {entry.digest: entry for entry in entries}
    if len(found) > MAX_STATEMENTS:
        raise FormatError(f"{subject} has over {MAX_STATEMENTS} statements of derivations")
    return list(found.values())


def _iter_named(layout: ImageLayout, subject: Digest) -> list[Descriptor]:
    """Return the statements that another program has given a name in the store."""
    named = []
    for _, entry in layout.iter_entries():
        if entry.extra.get("artifactType") == TYPE:
            try:
                if _read_manifest(layout, entry, subject) is not None:
                    named.append(entry)
            except (ContentError, NotFoundError):
                # It may be of another manifest
                continue
    return named


def read_statement(source: Source, entry: Descriptor, subject: Digest) -> Derivation:
    """Read the statement in an artifact. Raises AccessError, ContentError.

    No policy decides about it: it is not believed, and its parent is decided about as any AImage.
    """
    manifest = _read_manifest(source, entry, subject)
    if manifest is None:
        raise FormatError("its manifest has another subject")
    if len(manifest.layers) != 1:
        raise FormatError("its manifest has not exactly one statement")
    with unchecked():
        payload = read_all(source.open(manifest.layers[0]), manifest.layers[0], MAX_STATEMENT)
    return Derivation.parse(payload, subject)


def _read_manifest(source: Source, entry: Descriptor, subject: Digest) -> Manifest | None:
    """Return the manifest of a statement; None if it has another subject."""
    with unchecked():
        raw = read_all(source.open(entry), entry, MAX_STATEMENT)
    manifest = Manifest.parse(raw, entry.media_type)
    is_of = manifest.subject is not None and manifest.subject.digest == subject
    return manifest if is_of else None


def _encode_content(digest: Digest) -> dict[str, Any]:
    """Return content as in-toto describes it (spec/v1, resource_descriptor.md)."""
    return {"digest": {digest.algorithm: digest.encoded}}


def _encode_recipe(recipe: DerivationRecipe) -> dict[str, Any]:
    value: dict[str, Any] = {"op": str(recipe.operation)}
    if recipe.dtype is not None:
        value["dtype"] = recipe.dtype
    if recipe.components:
        value["components"] = {
            name: {"type": chosen.type}
            | ({} if chosen.group_size is None else {"groupSize": chosen.group_size})
            for name, chosen in sorted(recipe.components.items())
        }
    if recipe.adapters:
        value["adapters"] = [
            {"name": used.name, **_encode_content(used.digest), "strength": used.strength}
            for used in recipe.adapters
        ]
    if recipe.weights is not None:
        value["weights"] = _encode_content(recipe.weights)
    return value | ({"variant": True} if recipe.is_variant else {})


def _parse_recipe(value: Mapping[str, Any]) -> DerivationRecipe:
    operation = value.get("op")
    if not isinstance(operation, str) or operation not in [*Operation]:
        raise FormatError(
            f"the operation {operation!r:.60} is unknown",
            hint="a later version of the program may know it",
        )
    dtype, weights = value.get("dtype"), value.get("weights")
    components = read_object(value.get("components", {}), "components")
    adapters = value.get("adapters", [])
    if not isinstance(adapters, list) or len(adapters) > _MAX_ADAPTERS:
        raise FormatError(f"adapters is not a list of at most {_MAX_ADAPTERS}")
    return DerivationRecipe(
        Operation(operation),
        None if dtype is None else _parse_name(dtype, "the dtype"),
        {
            _parse_name(name, "a component"): _parse_component(chosen)
            for name, chosen in components.items()
        },
        tuple(map(_parse_adapter, adapters)),
        None if weights is None else _parse_content(weights, "weights"),
        value.get("variant") is True,
    )


def _parse_component(value: object) -> ComponentType:
    chosen = read_object(value, "a component")
    size = chosen.get("groupSize")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
        raise FormatError(f"the groupSize {size!r:.40} is not an integer")
    return ComponentType(_parse_name(chosen.get("type"), "a type"), size)


def _parse_adapter(value: object) -> UsedAdapter:
    used = read_object(value, "an adapter")
    name, strength = used.get("name", ""), used.get("strength")
    if not isinstance(name, str) or len(name) > 1000:
        raise FormatError("the name of an adapter is malformed")
    is_number = isinstance(strength, int | float) and not isinstance(strength, bool)
    if strength is None or not is_number or not math.isfinite(strength):
        raise FormatError(f"the strength {strength!r:.40} of an adapter is not a number")
    return UsedAdapter(name, _parse_content(used, "an adapter"), float(strength))


def _parse_content(value: object, label: str) -> Digest:
    """Return the digest of content; that of several is the one that registries use."""
    digests = read_object(read_object(value, label).get("digest"), f"the digest of {label}")
    for algorithm in ("sha256", "sha512"):
        if isinstance(encoded := digests.get(algorithm), str):
            return Digest(algorithm, encoded)
    raise FormatError(f"{label} has no digest by sha256 or sha512")


def _parse_name(value: object, label: str) -> str:
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        raise FormatError(f"{label} {value!r:.80} is malformed")
    return value
