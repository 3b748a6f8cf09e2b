"""Plans of create and convert: all decisions, made before any weights are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from clowder_aimage.dialect import AImage, Dialect
from clowder_aimage.dialect.aimage import check_name
from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.formats.inventory import Component, Inventory
from clowder_aimage.formats.left_out import LeftOut
from clowder_aimage.formats.model_tree import build_whole_files_error
from clowder_aimage.formats.stored_weights import StoredLayer, group_weights, name_layer
from clowder_aimage.importer import planned_layer
from clowder_aimage.importer.decision import (
    WeightDecision,
    WeightReport,
    check_quantized,
    compute_totals,
    decide,
    describe_component,
    describe_model_quantization,
    report,
)
from clowder_aimage.importer.planned_layer import PlannedLayer
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.importer.request_default import derive_model_defaults
from clowder_aimage.oci import MAX_MANIFEST_SIZE, Descriptor, Digest, mediatype
from clowder_aimage.oci.manifest import encode

_UNKNOWN = {"sha256": Digest("sha256", "0" * 64), "sha512": Digest("sha512", "0" * 128)}
# Properties of a component that are recomputed if its weights change.
_RECOMPUTED = ("tensors", "parameters", "dtype", "quantization", "size")
AS_STORED = Recipe()


@dataclass(frozen=True, slots=True)
class Provenance:
    """Properties stated by the user.

    ``defaults`` of requests, such as ``steps``, replace those derived from the model.
    """

    license: str | None = None
    source: str | None = None
    created: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the annotations. Raises UsageError."""
        for key, value in self.annotations.items():
            if not key or not (key + value).isprintable() or " " in key:
                raise UsageError(f"invalid annotation {f'{key}={value}'[:100]!r}")
            if mediatype.is_own_key(key) or key in (mediatype.CREATED, mediatype.LICENSES):
                raise UsageError(f"the annotation {key[:100]} is written by the program itself")


@dataclass(frozen=True, slots=True)
class CreatePlan:
    """Ordered layers, the config's bytes, hash algorithm, report, subject and files left out."""

    layers: tuple[PlannedLayer, ...]
    config: bytes
    algorithm: str
    report: WeightReport = field(default_factory=WeightReport)
    subject: Descriptor | None = None
    left_out: tuple[LeftOut, ...] = ()

    @property
    def size(self) -> int:
        """Return the size of all layers in bytes."""
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
    """Return the plan of a create.

    ``exact`` is the result of a survey for ``recipe``. ``compression`` applies to whole files;
    ``subject`` is their model.

    Raises:
        ModelError: A name is not a valid layer name, or the manifest exceeds the limit of
            registries.
        UsageError: The recipe does not match the model.
    """
    decisions = _decide_all({c.name: c.weights for c in inventory.components}, recipe, exact)
    layers = [
        planned_layer.plan_file_layer(
            file, compression if mediatype.is_ours(file.media_type) else ""
        )
        for file in inventory.files
    ]
    for component in inventory.components:
        files = [planned_layer.plan_file_layer(file) for file in component.files]
        layers += [
            layer
            for layer in files
            if not _is_outdated(layer.media_type, decisions[component.name])
        ]
        layers += _plan_component(component, decisions[component.name])
    layers.sort(key=lambda layer: layer.name)
    config = _build_config(inventory, decisions, layers, provenance)
    ignored = sum(len(component.ignored) for component in inventory.components)
    summary = report(decisions, config, ignored)
    plan = CreatePlan(
        tuple(layers), encode(config), algorithm, summary, subject, inventory.left_out
    )
    _check(plan, dialect)
    return plan


def _is_outdated(media_type: str, decisions: Sequence[WeightDecision]) -> bool:
    """Return True for the header of a weight file with changed tensors."""
    plain, _ = mediatype.split_compression(media_type)
    return plain == mediatype.AIMAGE_HEADER and any(decision.changes for decision in decisions)


def _plan_component(
    component: Component, decisions: Sequence[WeightDecision]
) -> list[PlannedLayer]:
    stored = {weight.name for layer in component.stored for weight in layer.weights}
    packed = [decision for decision in decisions if decision.weight.name not in stored]
    by_weight = {(component.name, decision.weight.name): decision for decision in decisions}
    existing = [_plan(layer, by_weight) for layer in component.stored]
    return planned_layer.plan_tensor_layers(component.name, packed) + existing


def _decide_all(
    components: Mapping[str, Sequence[Any]], recipe: Recipe, exact: frozenset[tuple[str, str]]
) -> dict[str, list[WeightDecision]]:
    recipe.check_components(name for name, weights in components.items() if weights)
    decided = {name: decide(name, weights, recipe, exact) for name, weights in components.items()}
    for name, decisions in decided.items():
        if decisions and (requested := recipe.of(name)):
            check_quantized(name or "model", decisions, requested)
    return decided


def _check(plan: CreatePlan, dialect: Dialect) -> None:
    """Check that the layers fit into a manifest. Raises ModelError."""
    for layer in plan.layers:
        try:
            check_name(layer.name)
        except FormatError as error:
            raise ModelError(f"{layer.path}: {error}") from None
    for layer, following in pairwise(plan.layers):
        if layer.name == following.name:
            raise ModelError(
                f"duplicate layer {layer.name[:200]} from {layer.path} and {following.path}"
            )
    try:
        # The placeholder has the length of any digest, so the manifest has its final size.
        digest = _UNKNOWN[plan.algorithm]
        layers = tuple(layer.build_layer(digest) for layer in plan.layers)
        dialect.write(AImage(plan.config, layers, plan.subject))
    except FormatError:
        raise build_whole_files_error(
            f"the manifest of {len(plan.layers)} layers exceeds {MAX_MANIFEST_SIZE} bytes, the "
            "limit of registries",
            "models with many small tensors require packing them into fewer layers",
        ) from None


def _build_config(
    inventory: Inventory,
    decided: Mapping[str, Sequence[WeightDecision]],
    layers: Sequence[PlannedLayer],
    provenance: Provenance,
) -> dict[str, Any]:
    model_totals = compute_totals(
        decision for decisions in decided.values() for decision in decisions
    )
    config: dict[str, Any] = {
        "schemaVersion": 1,
        **({"family": inventory.family} if inventory.family else {}),
        **({"pipeline": inventory.pipeline} if inventory.pipeline else {}),
        **(model_totals if inventory.components else {}),
        **inventory.facts,
        **describe_model_quantization(decided),
        "size": sum(layer.size for layer in layers),
        "components": {
            c.name: describe_component(
                {"library": c.library, "class": c.class_name}, decided[c.name]
            )
            | {"size": _compute_size(c.name, layers)}
            for c in inventory.components
            if c.name and c.class_name
        },
    }
    if provenance.defaults and not inventory.family:
        names = " and ".join(provenance.defaults)
        raise UsageError(f"{names}: only a model that makes pictures has such defaults")
    if defaults := derive_model_defaults(inventory) | dict(provenance.defaults):
        config["defaults"] = defaults
    optional = {
        "license": provenance.license or inventory.license,
        "source": provenance.source,
        "created": provenance.created,
        "annotations": dict(sorted(provenance.annotations.items())),
    }
    return config | {key: value for key, value in optional.items() if value}


def _compute_size(component: str, layers: Sequence[PlannedLayer]) -> int:
    return sum(layer.size for layer in layers if layer.name.startswith(f"{component}/"))


def plan_conversion(
    aimage: AImage,
    layers: Sequence[StoredLayer],
    dialect: Dialect,
    recipe: Recipe,
    exact: frozenset[tuple[str, str]],
    base: Descriptor | None = None,
) -> CreatePlan:
    """Return the plan of a conversion from ``layers`` of ``aimage``, as a variant of ``base``.

    A layer without changes is reused.

    Raises:
        ModelError: The manifest would exceed the limit of registries.
        UsageError: The recipe does not match the model.
        FormatError: Tensors of a group would have duplicate names.
    """
    components = group_weights(layers)
    decided = _decide_all(components, recipe, exact)
    by_weight = {
        (name, decision.weight.name): decision
        for name, decisions in decided.items()
        for decision in decisions
    }
    planned = [
        _plan(stored, by_weight)
        for stored in layers
        if not _is_outdated(
            stored.layer.descriptor.media_type, decided.get(stored.layer.component, [])
        )
    ]
    config = _convert_config(aimage.properties, decided, planned)
    if base is not None:
        config["variant"] = recipe.precision
    subject, summary = base or aimage.subject, report(decided, config)
    plan = CreatePlan(tuple(planned), encode(config), aimage.algorithm, summary, subject)
    _check(plan, dialect)
    return plan


def _plan(stored: StoredLayer, decided: Mapping[tuple[str, str], WeightDecision]) -> PlannedLayer:
    layer, component = stored.layer, stored.layer.component
    decisions = [decided[component, weight.name] for weight in stored.weights]
    if not any(decision.changes for decision in decisions):
        media_type = layer.descriptor.media_type
        return PlannedLayer(
            layer.name, media_type, b"", (), layer.dtype, layer.shape, existing=layer
        )
    try:
        if stored.is_group:
            prefix = layer.name.removeprefix(f"{component}/")
            return planned_layer.plan_group_layer(component, prefix, decisions, layer.descriptor)
        return planned_layer.plan_tensor_layer(component, decisions[0], layer.descriptor)
    except FormatError as error:
        # A tensor has the same name as the scales of another.
        raise name_layer(layer, error) from None


def _convert_config(
    old: Mapping[str, Any],
    decided: Mapping[str, Sequence[WeightDecision]],
    layers: Sequence[PlannedLayer],
) -> dict[str, Any]:
    components = old.get("components")
    entries = dict(components) if isinstance(components, dict) else {}
    for name, decisions in decided.items():
        if not name:
            continue
        entry = entries.get(name)
        properties = dict(entry) if isinstance(entry, dict) else {}
        if any(decision.changes for decision in decisions) or not properties:
            unchanged = {key: value for key, value in properties.items() if key not in _RECOMPUTED}
            new = describe_component(unchanged, decisions) | {"size": _compute_size(name, layers)}
            if "quantization" in properties and not any(d.quantization for d in decisions):
                # The stated one has the reasons for unquantized tensors, which are not in blobs.
                new["quantization"] = properties["quantization"]
            entries[name] = new
    changes = {
        **compute_totals(decision for decisions in decided.values() for decision in decisions),
        **describe_model_quantization(decided),
        "size": sum(layer.size for layer in layers),
        "components": entries,
    }
    return _merge_in_order(old, changes)


def _merge_in_order(old: Mapping[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``old`` updated with ``changes``; new keys are inserted in their order."""
    keys = list(old)
    position = len(keys)
    for key in reversed(changes):
        if key not in old:
            keys.insert(position, key)
        position = keys.index(key)
    return {key: changes.get(key, old.get(key)) for key in keys}
