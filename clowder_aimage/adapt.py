"""Models with adapters: packed beside a base model, or fused into its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from clowder_aimage.content import ContentStore, Lease
from clowder_aimage.dialect import DIALECTS
from clowder_aimage.errors import FormatError, ModelError, NotFoundError, UsageError
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.stored_weights import StoredLayer, read_stored
from clowder_aimage.importer import CreatePlan, PackedModel, Recipe, check_config
from clowder_aimage.importer.blob_writer import OnWritten, pack
from clowder_aimage.importer.plan import plan_conversion
from clowder_aimage.importer.planned_layer import PlannedLayer, plan_computed_layer, plan_file_layer
from clowder_aimage.importer.row_scale import has_row_scales
from clowder_aimage.importer.stated_recipe import state
from clowder_aimage.layout.completeness import IncompleteError, open_complete, require_complete
from clowder_aimage.layout.stored_aimage import (
    StoredAImage,
    inflate,
    interpret,
    read_manifest,
)
from clowder_aimage.model.adapter_source import AdapterEntry
from clowder_aimage.oci import Reference, mediatype
from clowder_aimage.oci.manifest import encode
from clowder_aimage.tensor.blob import SCALE
from clowder_aimage.tensor.quantization import ROW_SCALED
from clowder_aimage.tensor.weight import FLOATS, Weight
from clowder_aimage.trust.lineage import Derivation, DerivationRecipe, Operation, UsedAdapter

if TYPE_CHECKING:
    from clowder_aimage.adapter.adapter import Adapter, Change, Floats

# The components that adapters change.
ADAPTED = ("text_encoder", "transformer")
FUSION_FILE = "lora_fusion_info.json"
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_ODD = re.compile(r"[^A-Za-z0-9._-]+")
Used = tuple[AdapterEntry, float]
OnPlan = Callable[[CreatePlan], None]


@dataclass(frozen=True, slots=True)
class FusedModel:
    """The new AImage, and a remark about quantized weights, if there were any."""

    packed: PackedModel
    remark: str = ""


def combine(
    store: ContentStore,
    base: Reference,
    target: Reference,
    uses: Sequence[Used],
    *,
    threads: int | None = None,
    on_plan: OnPlan = lambda _: None,
    on_written: OnWritten = lambda _: None,
) -> PackedModel:
    """Name ``target`` the AImage ``base`` with adapters that are used by default.

    The layers of ``base`` stay the same blobs; each adapter is ``adapters/NAME/`` beside them. The
    config has the properties of the adapters, and their strengths.

    Raises:
        NotFoundError: ``base`` is not in the store, or not all of it.
        FormatError: An adapter is damaged, or does not fit ``base``.
        StoreError, NoSpaceError: The store cannot be written; complete blobs stay.
    """
    with store.lease() as lease:
        stored = _open_base(store, base, lease)
        shapes = _collect_shapes(stored)
        for adapter, _ in uses:
            _read(adapter, shapes, str(base))
        plan = plan_combination(stored, uses)
        on_plan(plan)
        return pack(
            plan,
            store,
            lease,
            target,
            stored.dialect,
            threads=threads,
            on_written=on_written,
            derive=lambda _: _state(stored, Operation.ADAPT, uses),
        )


def plan_combination(stored: StoredAImage, uses: Sequence[Used]) -> CreatePlan:
    """Return the plan of an AImage with adapters beside its layers. Raises FormatError."""
    plan = _plan_unchanged(stored)
    config = dict(stored.aimage.properties)
    adapters, defaults = dict(config.get("adapters", {})), list(config.get("loras", []))
    layers = list(plan.layers)
    for adapter, strength in uses:
        name = _free_name(adapter.name, adapters)
        adapters[name] = {
            key: value for key, value in adapter.metadata.items() if value not in (None, [])
        }
        defaults.append({"adapter": name, "strength": strength})
        layers += _plan_files(adapter, f"adapters/{name}")
    layers.sort(key=lambda layer: layer.name)
    config |= {"adapters": dict(sorted(adapters.items())), "loras": defaults}
    return _replan(plan, layers, config)


def _state(
    stored: StoredAImage,
    operation: Operation,
    uses: Sequence[Used],
    values: StoredAImage | None = None,
) -> Derivation:
    adapters = (UsedAdapter(entry.name, entry.digest, strength) for entry, strength in uses)
    weights = values.descriptor.digest if values else None
    recipe = DerivationRecipe(operation, adapters=tuple(adapters), weights=weights)
    return state(stored.descriptor.digest, recipe)


def fuse(
    store: ContentStore,
    base: Reference,
    target: Reference,
    uses: Sequence[Used],
    *,
    threads: int | None = None,
    on_plan: OnPlan = lambda _: None,
    on_written: OnWritten = lambda _: None,
) -> FusedModel:
    """Add adapters to the weights of the AImage ``base``, and name the result ``target``.

    The changes of all adapters are summed in float32, added once and rounded once to the type of
    each tensor. A quantized tensor is computed from the full-precision AImage that ``base`` is a
    variant of, if the store has it, else from its dequantized values, and quantized in the same
    way. The result has the file FUSION_FILE with the names of the adapters.

    Raises:
        NotFoundError: ``base`` is not in the store, or not all of it.
        FormatError: An adapter is damaged, or does not fit ``base``.
        ModelError: A changed tensor is packed with others, or a value does not fit its type.
        StoreError, NoSpaceError: The store cannot be written; complete blobs stay.
    """
    Recipe(dtype="f32").check_tools()
    with store.lease() as lease:
        stored = _open_base(store, base, lease)
        parent = _find_parent(store, stored, lease)
        fusion = plan_fusion(store, stored, base, uses, parent)
        on_plan(fusion.plan)
        packed = pack(
            fusion.plan,
            store,
            lease,
            target,
            stored.dialect,
            threads=threads,
            on_written=on_written,
            derive=lambda _: _state(
                stored, Operation.FUSE, uses, parent if fusion.changes_quantized else None
            ),
        )
        is_remarkable = fusion.changes_quantized
        return FusedModel(packed, _describe_requantization(base, parent) if is_remarkable else "")


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """The plan of a fusion; ``changes_quantized`` is True if a changed weight is quantized."""

    plan: CreatePlan
    changes_quantized: bool


def plan_fusion(
    store: ContentStore,
    stored: StoredAImage,
    base: Reference,
    uses: Sequence[Used],
    values: StoredAImage | None,
) -> FusionPlan:
    """Return the plan of an AImage with adapters in its weights. Raises as ``fuse``.

    ``values`` has the values of quantized weights; None: they are dequantized.
    """
    shapes = _collect_shapes(stored)
    adapters = [
        (_read(adapter_source, shapes, str(base)), strength) for adapter_source, strength in uses
    ]
    plan = _plan_unchanged(stored)
    weights = _create_value_reader(store, stored)
    parent_weights = _create_value_reader(store, values) if values else weights
    changed: dict[str, PlannedLayer] = {}
    are_quantized = False
    for name, weight in _read_single_weights(store, stored).items():
        if changes := _list_changes(adapters, name):
            are_quantized |= weight.quantization is not None
            source = weights if weight.quantization is None else parent_weights
            changed[name] = _fuse_layer(name, weight, partial(_sum, source, name, changes))
    missing = {name for adapter, _ in adapters for name in adapter.changes} - changed.keys()
    if missing:
        raise ModelError(
            f"{base} has no blob for {min(missing)[:200]} alone, to which an adapter is added",
            hint="keep the adapters beside the model instead",
        )
    config = dict(stored.aimage.properties)
    added = [
        {
            "name": adapter_source.name,
            "digest": str(adapter_source.digest),
            "strength": strength,
        }
        for adapter_source, strength in uses
    ]
    config["fused"] = [*config.get("fused", []), *added]
    layers = [changed.get(layer.name, layer) for layer in plan.layers]
    layers = [layer for layer in layers if layer.name != FUSION_FILE]
    layers.append(_plan_fusion_file(stored, config["fused"]))
    layers.sort(key=lambda layer: layer.name)
    return FusionPlan(_replan(plan, layers, config), are_quantized)


def _open_base(store: ContentStore, reference: Reference, lease: Lease) -> StoredAImage:
    """Open the complete base AImage, and lease it."""
    stored = open_complete(store, reference, lease)
    if stored.dialect.name not in DIALECTS:
        raise UsageError(f"{reference} is packed by another tool, whose format has no adapters")
    return stored


def _collect_shapes(stored: StoredAImage) -> dict[str, tuple[int, ...]]:
    return {
        layer.name: layer.shape
        for layer in stored.aimage.layers
        if layer.shape is not None and layer.component in ADAPTED
    }


def _read(adapter: AdapterEntry, shapes: Mapping[str, tuple[int, ...]], base: str) -> Adapter:
    from clowder_aimage.adapter.reader import read_adapter

    return read_adapter(adapter.path, shapes, label=adapter.name, base=base, config=adapter.config)


def _plan_unchanged(stored: StoredAImage) -> CreatePlan:
    layers = [StoredLayer(layer, ()) for layer in stored.aimage.layers]
    plan = plan_conversion(stored.aimage, layers, stored.dialect, Recipe(), frozenset())
    tensors = sum(layer.is_tensor for layer in stored.aimage.layers)
    summary = replace(plan.report, tensors=tensors)
    return replace(plan, config=stored.aimage.config, subject=None, report=summary)


def _replan(plan: CreatePlan, layers: Sequence[PlannedLayer], config: dict[str, Any]) -> CreatePlan:
    config["size"] = sum(layer.size for layer in layers)
    config.pop("variant", None)
    replanned = replace(plan, layers=tuple(layers), config=encode(config))
    check_config(replanned)
    return replanned


def _free_name(name: str, names: Mapping[str, Any]) -> str:
    """Return a name for an adapter in a model: the last component of its name, without a tag."""
    base_name = name.rpartition("/")[2].partition("@")[0].partition(":")[0]
    stem = _ODD.sub("-", base_name.removesuffix(".safetensors")).strip(".-") or "adapter"
    free_name, count = stem, 1
    while free_name in names:
        count += 1
        free_name = f"{stem}-{count}"
    return free_name


def _plan_files(adapter: AdapterEntry, folder: str) -> list[PlannedLayer]:
    name = f"{folder}/{_WEIGHTS}"
    source = model_tree.build_source_file(None, adapter.path, name, mediatype.AIMAGE_LORA)
    layers = [plan_file_layer(source)]
    if adapter.config:
        data = json.dumps(adapter.config, indent=2, sort_keys=True).encode()
        layers.append(PlannedLayer(f"{folder}/{_CONFIG}", mediatype.AIMAGE_FILE, data, ()))
    return layers


def _read_single_weights(store: ContentStore, stored: StoredAImage) -> dict[str, Weight]:
    """Return the weights that are alone in their layer, by its name."""
    layers = read_stored(store, stored.aimage)
    return {
        stored_layer.layer.name: stored_layer.weights[0]
        for stored_layer in layers
        if len(stored_layer.weights) == 1
        and not stored_layer.is_group
        and stored_layer.layer.component in ADAPTED
    }


def _create_value_reader(store: ContentStore, stored: StoredAImage) -> Callable[[str], Floats]:
    """Return a function from the name of a layer to its values, dequantized."""
    from clowder_aimage.model.weights import ModelWeights

    @cache
    def open_component(name: str) -> ModelWeights:
        return ModelWeights.open(store, stored.aimage, name)

    def read_values(name: str) -> Floats:
        import numpy as np

        owner, _, tensor_name = name.partition("/")
        return np.asarray(open_component(owner).read_numpy(tensor_name), np.float32)

    return read_values


def _list_changes(
    adapters: Sequence[tuple[Adapter, float]], name: str
) -> list[tuple[Change, float]]:
    return [
        (change, strength)
        for adapter, strength in adapters
        for change in adapter.changes.get(name, ())
    ]


def _sum(
    values: Callable[[str], Floats], name: str, changes: Sequence[tuple[Change, float]]
) -> Floats:
    import numpy as np

    from clowder_aimage.adapter.dense import apply_changes

    total = apply_changes(values(name), changes)
    if not np.isfinite(total).all():
        raise ModelError(f"{name[:200]} with the adapters has values that are not finite")
    return total


def _fuse_layer(name: str, weight: Weight, compute: Callable[[], Floats]) -> PlannedLayer:
    """Return the layer of a changed weight, of the same type as the unchanged one."""
    target, quantization = weight.dtype, weight.quantization
    if quantization is not None:
        scales = next((chunk.dtype for chunk in weight.parts if chunk.suffix == SCALE), "F32")
        target = scales if quantization.type.has_bias and scales in FLOATS else "F32"
        if has_row_scales(weight):
            quantization = ROW_SCALED
    elif target not in FLOATS:
        raise ModelError(f"{name[:200]} is {target[:40]}, to which no adapter can be added")
    return plan_computed_layer(name, weight.shape, target, quantization, compute)


def _find_parent(store: ContentStore, stored: StoredAImage, lease: Lease) -> StoredAImage | None:
    """Return the AImage that this one is a variant of, if it is complete in the store."""
    subject = stored.aimage.subject
    if subject is None or "variant" not in stored.aimage.properties:
        return None
    lease.add(subject.digest)
    try:
        parent = interpret(store, subject, read_manifest(store, subject))
        lease.add(*(layer.descriptor.digest for layer in parent.aimage.layers))
        require_complete(store, Reference.parse(f"parent@{subject.digest}"), parent)
    except (NotFoundError, IncompleteError, FormatError):
        return None
    inflate(store, parent)
    return parent


def _plan_fusion_file(stored: StoredAImage, fused: Sequence[Mapping[str, Any]]) -> PlannedLayer:
    value = {"base": str(stored.descriptor.digest), "adapters": list(fused)}
    data = json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"
    return PlannedLayer(FUSION_FILE, mediatype.AIMAGE_FILE, data, ())


def _describe_requantization(base: Reference, parent: StoredAImage | None) -> str:
    if parent is None:
        return (
            f"{base} is quantized: the adapters were added to its dequantized values, which were "
            "then quantized again; fuse them into the unquantized model, and convert that, for "
            "more precision"
        )
    return (
        f"{base} is quantized: the adapters were added to the values of the AImage that it is a "
        f"variant of, {parent.descriptor.digest}, which were then quantized"
    )
