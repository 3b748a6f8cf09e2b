"""The weights of an AImage in a store, as a source of another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clowder_aimage.content import ContentStore
from clowder_aimage.dialect import AImage, Dialect, Layer
from clowder_aimage.errors import FormatError
from clowder_aimage.importer.create_plan import CreatePlan, check, decide_all
from clowder_aimage.importer.decision import WeightDecision
from clowder_aimage.importer.legacy_scales import Stated, StoredLayer, join
from clowder_aimage.importer.planned_layer import PlannedLayer, group_layer, tensor_layer
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.importer.shard_index import SourceTensor
from clowder_aimage.importer.weight_summary import describe_component, report, totals, whole_model
from clowder_aimage.oci.manifest import encode
from clowder_aimage.tensor import (
    BlobTensor,
    Header,
    find_group,
    find_tensor,
    read_header,
    read_tensors,
)
from clowder_aimage.tensor.external_quantization import Said, complete
from clowder_aimage.tensor.tensor_blob import LEGACY_KEY
from clowder_aimage.tensor.weight import TensorPart, Weight

_EXPERTS = ("experts", "shared_experts")
_TOLD = ("tensors", "parameters", "dtype", "quantization", "size")  # anew, of weights that change


def read_stored(
    store: ContentStore, aimage: AImage, stated: Stated = lambda *_: (None, None)
) -> list[StoredLayer]:
    """The layers of an AImage; of tensors, the headers are read. ``stated`` is asked about codes
    that do not say themselves how they are quantized.

    Raises:
        NotFoundError: a blob is not in the store.
        FormatError: a blob is not what its layer says.
    """
    layers = [
        _read(store, layer, stated) if layer.is_tensor else StoredLayer(layer, ())
        for layer in aimage.layers
    ]
    return join(layers, stated)


def weights_of(layers: Sequence[StoredLayer]) -> dict[str, list[Weight]]:
    """The weights of each component."""
    components: dict[str, list[Weight]] = {}
    for stored in layers:
        if stored.weights:
            components.setdefault(stored.layer.component, []).extend(stored.weights)
    return components


def _read(store: ContentStore, layer: Layer, stated: Stated) -> StoredLayer:
    path = store.path(layer.descriptor)
    prefix = f"{layer.component}/"
    own = layer.name.removeprefix(prefix)

    def said(key: str) -> Said:
        name = own if key == LEGACY_KEY else key
        return stated(layer.component, name.removeprefix(prefix))

    try:
        with store.open(layer.descriptor) as file:
            header = read_header(file, layer.descriptor.size)
        tensors = read_tensors(complete(header, said))
        group = _group(tensors, own, layer)
    except FormatError as error:
        raise _blame(layer, error) from None
    if own in group:
        return StoredLayer(layer, (_weight(own, group[own], header, path),))
    members = tuple(_weight(name, member, header, path) for name, member in group.items())
    return StoredLayer(layer, members, is_group=True)


def _blame(layer: Layer, error: FormatError) -> FormatError:
    """The error, with the layer that it is about, named once."""
    said = error.message.removeprefix(f"{layer.name}: ")
    return FormatError(f"{layer.name}: {said}", hint=error.hint)


def _group(tensors: Mapping[str, BlobTensor], own: str, layer: Layer) -> dict[str, BlobTensor]:
    """The tensor that the layer is called like, or those of a packed group, by name. Stacked
    experts may stand beside it: ``mlp.switch_mlp`` in the group ``mlp.experts``.

    Raises:
        FormatError: they are of another place, or not what the layer promises.
    """
    try:
        return {own: find_tensor(tensors, own, layer.component)}
    except FormatError:
        names = [key.removeprefix(f"{layer.component}/") for key in tensors]
        is_stacked = own.rpartition(".")[2] in _EXPERTS
        promises_one = layer.dtype is not None or layer.shape is not None
        if promises_one or not (is_stacked or all(name.startswith(f"{own}.") for name in names)):
            raise
        return find_group(tensors, own, layer.component)


def _weight(name: str, tensor: BlobTensor, header: Header, path: Path) -> Weight:
    modified = path.stat().st_mtime_ns
    parts = []
    for suffix, key in {"": tensor.key, **tensor.parts}.items():
        info = header.tensors[key]
        source = SourceTensor(
            key,
            info.dtype,
            info.shape,
            path,
            header.data_offset + info.start,
            info.nbytes,
            modified,
        )
        parts.append(TensorPart(suffix, info.dtype, info.shape, source))
    return Weight(name, tensor.dtype, tensor.shape, tuple(parts), tensor.quantization)


def plan_conversion(
    aimage: AImage,
    layers: Sequence[StoredLayer],
    dialect: Dialect,
    recipe: Recipe,
    exact: frozenset[tuple[str, str]],
) -> CreatePlan:
    """Decide everything: as ``make_plan``, from ``layers`` of ``aimage``. A layer in which nothing
    changes stays as it is.

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
        raise _blame(layer, error) from None


def _config(
    old: Mapping[str, Any],
    decided: Mapping[str, Sequence[WeightDecision]],
    layers: Sequence[PlannedLayer],
) -> dict[str, Any]:
    """The old config with what is true now of the weights that change."""
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
    """``old`` with what is ``told``; what is new stands where ``create`` has it, before what it
    tells next."""
    keys = list(old)
    place = len(keys)
    for key in reversed(told):
        if key not in old:
            keys.insert(place, key)
        place = keys.index(key)
    return {key: told.get(key, old.get(key)) for key in keys}
