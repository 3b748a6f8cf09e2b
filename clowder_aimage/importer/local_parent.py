"""The AImage in the store that a quantized one could have been converted from.

``create`` with a recipe reads files. If the store has the AImage that it makes of them without the
recipe, that is the parent: the same config, and the same blobs. The blobs that the recipe changes
are hashed to know that, and only if the store has the config.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from clowder_aimage.content.gate import unchecked
from clowder_aimage.dialect import AImage, Dialect
from clowder_aimage.errors import AImageError
from clowder_aimage.formats.stored_weights import read_stored
from clowder_aimage.importer.blob_comparison import (
    find_blob_difference,
    find_structural_difference,
)
from clowder_aimage.importer.plan import CreatePlan, plan_conversion
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import StoredAImage, interpret, read_manifest
from clowder_aimage.oci import Descriptor, Digest, mediatype

# Manifests with one config whose blobs are compared
_MAX_CANDIDATES = 4


@dataclass(frozen=True, slots=True)
class ParentSearch:
    """Two plans of ``create``: without a recipe, and with it.

    ``exact`` is the result of the survey for the recipe.
    """

    plain: CreatePlan
    plan: CreatePlan
    recipe: Recipe
    exact: frozenset[tuple[str, str]]

    def find(
        self, store: ImageLayout, dialect: Dialect, made: AImage, threads: int | None
    ) -> Digest | None:
        """Return the manifest in ``store`` of which a conversion would make ``made``, or None."""
        size, algorithm = len(self.plain.config), self.plan.algorithm
        config = Descriptor(mediatype.AIMAGE_CONFIG, Digest.of(self.plain.config, algorithm), size)
        candidates = _iter_candidates(store, config, dialect) if store.exists(config) else ()
        for candidate in islice(candidates, _MAX_CANDIDATES):
            # A damaged or incomplete one is none
            with contextlib.suppress(AImageError):
                if self._is_parent(store, candidate, made, threads):
                    return candidate.descriptor.digest
        return None

    def _is_parent(
        self, store: ImageLayout, candidate: StoredAImage, made: AImage, threads: int | None
    ) -> bool:
        aimage, plain = candidate.aimage, self.plain
        if (aimage.subject, aimage.algorithm) != (plain.subject, self.plan.algorithm):
            return False
        if find_structural_difference(plain.layers, aimage) is not None:
            return False
        layers = read_stored(store, aimage)
        converted = plan_conversion(aimage, layers, candidate.dialect, self.recipe, self.exact)
        blobs = {layer.name: layer.descriptor for layer in made.layers}
        if converted.config != made.config or [*blobs] != [each.name for each in converted.layers]:
            return False
        reused = [layer.existing for layer in converted.layers if layer.existing is not None]
        if any(blobs[layer.name].digest != layer.descriptor.digest for layer in reused):
            return False
        names = {layer.name for layer in reused}
        changed = [layer for layer in plain.layers if layer.name not in names]
        difference = find_blob_difference(
            changed, aimage, store, {}, threads=threads, reads_stored=False
        )
        return difference is None


def _iter_candidates(
    store: ImageLayout, config: Descriptor, dialect: Dialect
) -> Iterator[StoredAImage]:
    """Yield the AImages in a dialect with this config."""
    visited = set[Digest]()
    for _, entry in store.iter_entries():
        if entry.media_type not in mediatype.MANIFESTS or entry.digest in visited:
            continue
        visited.add(entry.digest)
        if (stored := _read(store, entry, config.digest)) and stored.dialect.name == dialect.name:
            yield stored


def _read(store: ImageLayout, entry: Descriptor, config: Digest) -> StoredAImage | None:
    """Return an AImage with this config; None for another, or a damaged one."""
    # It is named in a statement, and nothing of it is used.
    with unchecked(), contextlib.suppress(AImageError):
        manifest = read_manifest(store, entry)
        if manifest.config.digest == config:
            return interpret(store, entry, manifest)
    return None
