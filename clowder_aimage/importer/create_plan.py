"""Every decision of a create or a convert, made before a byte of weights is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from clowder_aimage.dialect import AImage, Dialect
from clowder_aimage.dialect.aimage import check_name
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats.diffusers import Component, Inventory
from clowder_aimage.importer.decision import WeightDecision, check_quantized, decide
from clowder_aimage.importer.planned_layer import PlannedLayer, file_layer, tensor_layers
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.importer.weight_summary import (
    WeightReport,
    describe_component,
    report,
    totals,
    whole_model,
)
from clowder_aimage.oci import MAX_MANIFEST_SIZE, Descriptor, Digest, mediatype
from clowder_aimage.oci.manifest import encode

_UNKNOWN = {"sha256": Digest("sha256", "0" * 64), "sha512": Digest("sha512", "0" * 128)}
AS_STORED = Recipe()


@dataclass(frozen=True, slots=True)
class Provenance:
    """Properties that a directory does not state: given by the user, or absent."""

    license: str | None = None
    source: str | None = None
    created: str | None = None


@dataclass(frozen=True, slots=True)
class CreatePlan:
    """Layers in their order, the config's bytes, hash algorithm, report and subject."""

    layers: tuple[PlannedLayer, ...]
    config: bytes
    algorithm: str
    report: WeightReport = field(default_factory=WeightReport)
    subject: Descriptor | None = None

    @property
    def size(self) -> int:
        """Return the bytes of all layers."""
        return sum(layer.size for layer in self.layers)


def make_plan(
    inventory: Inventory,
    dialect: Dialect,
    provenance: Provenance,
    algorithm: str = "sha256",
    *,
    recipe: Recipe = AS_STORED,
    exact: frozenset[tuple[str, str]] = frozenset(),
    compression: str = "",
    subject: Descriptor | None = None,
) -> CreatePlan:
    """Decide everything.

    ``exact`` is what a survey for ``recipe`` found; ``compression`` is for whole files, of which
    ``subject`` may be the model that they belong to.

    Raises:
        ModelError: a name cannot be a layer's, or the manifest would be larger than registries
            take.
        UsageError: the recipe does not fit the model.
    """
    decided = decide_all({c.name: c.weights for c in inventory.components}, recipe, exact)
    layers = [
        file_layer(file, compression if mediatype.is_ours(file.media_type) else "")
        for file in inventory.files
    ]
    for component in inventory.components:
        layers += [file_layer(file) for file in component.files]
        layers += tensor_layers(component.name, decided[component.name])
    layers.sort(key=lambda layer: layer.name)
    config = _config(inventory, decided, layers, provenance)
    ignored = sum(len(component.ignored) for component in inventory.components)
    plan = CreatePlan(
        tuple(layers), encode(config), algorithm, report(decided, config, ignored), subject
    )
    check(plan, dialect)
    return plan


def decide_all(
    components: Mapping[str, Sequence[Any]], recipe: Recipe, exact: frozenset[tuple[str, str]]
) -> dict[str, list[WeightDecision]]:
    """Decide the type of the weights of each component. Raises UsageError."""
    recipe.check_components(name for name, weights in components.items() if weights)
    decided = {name: decide(name, weights, recipe, exact) for name, weights in components.items()}
    for name, decisions in decided.items():
        if decisions and (wanted := recipe.of(name)):
            check_quantized(name or "model", decisions, wanted)
    return decided


def check(plan: CreatePlan, dialect: Dialect) -> None:
    """Check that the layers fit into a manifest. Raises ModelError."""
    _check_names(plan.layers)
    _check_manifest(plan, dialect)


def _check_names(layers: Sequence[PlannedLayer]) -> None:
    for layer in layers:
        try:
            check_name(layer.name)
        except FormatError as error:
            raise ModelError(f"{layer.path}: {error}") from None
    for layer, following in pairwise(layers):
        if layer.name == following.name:
            raise ModelError(
                f"{layer.path} and {following.path} both have something called {layer.name[:200]}"
            )


def _check_manifest(plan: CreatePlan, dialect: Dialect) -> None:
    """Write the manifest with digests of the right length to see how large it gets."""
    try:
        digest = _UNKNOWN[plan.algorithm]
        layers = tuple(layer.layer(digest) for layer in plan.layers)
        dialect.write(AImage(plan.config, layers, plan.subject))
    except FormatError:
        raise ModelError(
            f"{len(plan.layers)} layers make a manifest of over {MAX_MANIFEST_SIZE} bytes, "
            "which no registry takes",
            hint="models of many small tensors need them packed into fewer layers",
        ) from None


def _config(
    inventory: Inventory,
    decided: Mapping[str, Sequence[WeightDecision]],
    layers: Sequence[PlannedLayer],
    provenance: Provenance,
) -> dict[str, Any]:
    """Return the AImage config (schemas/aimage-config.schema.json).

    What it is, not who packed it.
    """
    weighed = totals(decision for decisions in decided.values() for decision in decisions)
    config: dict[str, Any] = {
        "schemaVersion": 1,
        **({"family": inventory.family} if inventory.family else {}),
        **({"pipeline": inventory.pipeline} if inventory.pipeline else {}),
        **(weighed if inventory.components else {}),
        **inventory.facts,
        **whole_model(decided),
        "size": sum(layer.size for layer in layers),
        "components": {
            c.name: describe_component(
                {"library": c.library, "class": c.class_name}, c.name, decided[c.name], layers
            )
            for c in inventory.components
            if c.name
        },
    }
    size = _default_size(inventory.components)
    if size:
        config["defaults"] = {"width": size, "height": size}
    optional = {
        "license": provenance.license or inventory.license,
        "source": provenance.source,
        "created": provenance.created,
    }
    return config | {key: value for key, value in optional.items() if value}


def _default_size(components: Sequence[Component]) -> int | None:
    """Return the side of the square pictures that the VAE was trained on, in pixels."""
    for component in components:
        size = component.config.get("sample_size")
        if component.name == "vae" and isinstance(size, int) and size > 0 and size % 16 == 0:
            return size
    return None
