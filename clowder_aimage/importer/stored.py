"""The weights of an AImage in a store, as a source of another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.content import ContentStore
from clowder_aimage.dialect import AImage, Dialect, Layer
from clowder_aimage.errors import FormatError
from clowder_aimage.importer.decision import Decision
from clowder_aimage.importer.describe import describe_component, report, totals
from clowder_aimage.importer.layer import PlannedLayer, group_layer, tensor_layer
from clowder_aimage.importer.plan import Plan, check, decide_all
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.importer.shards import SourceTensor
from clowder_aimage.importer.weight import Part, Weight
from clowder_aimage.oci.manifest import encode
from clowder_aimage.tensor import BlobTensor, Header, read_header, read_tensors
from clowder_aimage.tensor.blob import LEGACY_KEY

_TOLD = ("tensors", "parameters", "dtype", "quantization", "size")  # anew, of weights that change


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer and the weights in its blob; none in a file."""

    layer: Layer
    weights: tuple[Weight, ...]
    is_group: bool = False


def read_stored(store: ContentStore, aimage: AImage) -> list[StoredLayer]:
    """The layers of an AImage; of tensors, the headers are read.

    Raises:
        NotFoundError: a blob is not in the store.
        FormatError: a blob is not what its layer says.
    """
    return [
        _read(store, layer) if layer.is_tensor else StoredLayer(layer, ())
        for layer in aimage.layers
    ]


def weights_of(layers: Sequence[StoredLayer]) -> dict[str, list[Weight]]:
    """The weights of each component."""
    components: dict[str, list[Weight]] = {}
    for stored in layers:
        if stored.weights:
            components.setdefault(stored.layer.component, []).extend(stored.weights)
    return components


def _read(store: ContentStore, layer: Layer) -> StoredLayer:
    path = store.path(layer.descriptor)
    own = layer.name.removeprefix(f"{layer.component}/")
    try:
        with store.open(layer.descriptor) as file:
            header = read_header(file, layer.descriptor.size)
        tensors = read_tensors(header)
        keys = {_plain_key(key, layer, own): key for key in tensors}
        if own in keys and len(tensors) == 1:
            weight = _weight(own, tensors[keys[own]], header, path)
            _check(weight, layer)
            return StoredLayer(layer, (weight,))
        if not tensors or not all(name.startswith(f"{own}.") for name in keys):
            held = ", ".join(sorted(keys)[:4]) or "nothing"
            raise FormatError(f"its blob holds {held[:300]} instead")
    except FormatError as error:
        raise FormatError(f"{layer.name}: {error}") from None
    members = tuple(_weight(name, tensors[key], header, path) for name, key in keys.items())
    return StoredLayer(layer, members, is_group=True)


def _plain_key(key: str, layer: Layer, own: str) -> str:
    """The name of a tensor, whichever way a packer wrote it."""
    return own if key == LEGACY_KEY else key.removeprefix(f"{layer.component}/")


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
        parts.append(Part(suffix, info.dtype, info.shape, source))
    return Weight(name, tensor.dtype, tensor.shape, tuple(parts), tensor.quantization)


def _check(weight: Weight, layer: Layer) -> None:
    if layer.dtype not in (None, weight.dtype, weight.parts[0].dtype) or layer.shape not in (
        *(None, weight.shape, weight.parts[0].shape),
    ):
        raise FormatError(
            f"its blob holds {weight.dtype} {list(weight.shape)}, its layer promises "
            f"{layer.dtype} {list(layer.shape or ())}"
        )


def plan_conversion(
    aimage: AImage,
    layers: Sequence[StoredLayer],
    dialect: Dialect,
    recipe: Recipe,
    exact: frozenset[tuple[str, str]],
) -> Plan:
    """Decide everything: as ``make_plan``, from ``layers`` of ``aimage``. A layer in which nothing
    changes stays as it is.

    Raises:
        ModelError: the manifest would be larger than registries take.
        UsageError: the recipe does not fit the model.
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
    plan = Plan(tuple(planned), encode(config), aimage.algorithm, report(decided, config))
    check(plan, dialect)
    return plan


def _plan(stored: StoredLayer, decided: Mapping[tuple[str, str], Decision]) -> PlannedLayer:
    layer, component = stored.layer, stored.layer.component
    decisions = [decided[component, weight.name] for weight in stored.weights]
    if not any(decision.changes for decision in decisions):
        kept = layer.descriptor
        return PlannedLayer(
            layer.name, kept.media_type, b"", (), layer.dtype, layer.shape, kept=layer
        )
    if stored.is_group:
        prefix = layer.name.removeprefix(f"{component}/")
        return group_layer(component, prefix, decisions, layer.descriptor)
    return tensor_layer(component, decisions[0], layer.descriptor)


def _config(
    old: Mapping[str, Any],
    decided: Mapping[str, Sequence[Decision]],
    layers: Sequence[PlannedLayer],
) -> dict[str, Any]:
    """The old config with what is true now of the weights that change."""
    components = old.get("components")
    described = dict(components) if isinstance(components, dict) else {}
    for name, decisions in decided.items():
        entry = described.get(name)
        known = dict(entry) if isinstance(entry, dict) else {}
        if any(decision.changes for decision in decisions) or not known:
            rest = {key: value for key, value in known.items() if key not in _TOLD}
            new = describe_component(rest, name, decisions, layers)
            if "quantization" in known and not any(d.quantization for d in decisions):
                new["quantization"] = known["quantization"]  # it knows why some were kept
            described[name] = new
    return {
        **old,
        **totals(decision for decisions in decided.values() for decision in decisions),
        "size": sum(layer.size for layer in layers),
        "components": described,
    }
