"""Every decision of a conversion: which layers of an AImage change, and what they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clowder_aimage.dialect import AImage, Dialect
from clowder_aimage.errors import FormatError
from clowder_aimage.formats.stored_weights import StoredLayer, name_layer, weights_of
from clowder_aimage.importer.create_plan import CreatePlan, check, decide_all
from clowder_aimage.importer.decision import WeightDecision
from clowder_aimage.importer.planned_layer import PlannedLayer, group_layer, tensor_layer
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.importer.weight_summary import describe_component, report, totals, whole_model
from clowder_aimage.oci.manifest import encode

_TOLD = ("tensors", "parameters", "dtype", "quantization", "size")  # anew, of weights that change


def plan_conversion(
    aimage: AImage,
    layers: Sequence[StoredLayer],
    dialect: Dialect,
    recipe: Recipe,
    exact: frozenset[tuple[str, str]],
) -> CreatePlan:
    """Decide everything: as ``make_plan``, from ``layers`` of ``aimage``.

    A layer in which nothing changes stays as it is.

    Raises:
        ModelError: the manifest would be larger than registries take.
        UsageError: the recipe does not fit the model.
        FormatError: tensors of a group would get names that others have.
    """
    components = weights_of(layers)
    decided = decide_all(components, recipe, exact)
    by_weight = {
        (name, decision.weight.name): decision
        for name, decisions in decided.items()
        for decision in decisions
    }
    planned = [_plan(stored, by_weight) for stored in layers]
    config = _config(aimage.properties, decided, planned)
    plan = CreatePlan(
        tuple(planned),
        encode(config),
        aimage.algorithm,
        report(decided, config),
        aimage.subject,
    )
    check(plan, dialect)
    return plan


def _plan(stored: StoredLayer, decided: Mapping[tuple[str, str], WeightDecision]) -> PlannedLayer:
    layer, component = stored.layer, stored.layer.component
    decisions = [decided[component, weight.name] for weight in stored.weights]
    if not any(decision.changes for decision in decisions):
        kept = layer.descriptor
        return PlannedLayer(
            layer.name, kept.media_type, b"", (), layer.dtype, layer.shape, kept=layer
        )
    try:
        if stored.is_group:
            prefix = layer.name.removeprefix(f"{component}/")
            return group_layer(component, prefix, decisions, layer.descriptor)
        return tensor_layer(component, decisions[0], layer.descriptor)
    except FormatError as error:  # a tensor has the name of another's scales
        raise name_layer(layer, error) from None


def _config(
    old: Mapping[str, Any],
    decided: Mapping[str, Sequence[WeightDecision]],
    layers: Sequence[PlannedLayer],
) -> dict[str, Any]:
    """Return the old config with what is true now of the weights that change."""
    components = old.get("components")
    described = dict(components) if isinstance(components, dict) else {}
    for name, decisions in decided.items():
        if not name:
            continue
        entry = described.get(name)
        known = dict(entry) if isinstance(entry, dict) else {}
        if any(decision.changes for decision in decisions) or not known:
            rest = {key: value for key, value in known.items() if key not in _TOLD}
            new = describe_component(rest, name, decisions, layers)
            if "quantization" in known and not any(d.quantization for d in decisions):
                new["quantization"] = known["quantization"]  # it knows why some were kept
            described[name] = new
    told = {
        **totals(decision for decisions in decided.values() for decision in decisions),
        **whole_model(decided),
        "size": sum(layer.size for layer in layers),
        "components": described,
    }
    return _in_order(old, told)


def _in_order(old: Mapping[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """``old`` with what is ``told``.

    What is new stands where ``create`` has it, before what it tells next.
    """
    keys = list(old)
    place = len(keys)
    for key in reversed(told):
        if key not in old:
            keys.insert(place, key)
        place = keys.index(key)
    return {key: told.get(key, old.get(key)) for key in keys}
