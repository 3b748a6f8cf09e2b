"""Weights of an AImage in a store, read from the headers of their blobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect import AImage, Layer
from clowder_aimage.errors import FormatError
from clowder_aimage.tensor import Header, Quantization, read_header
from clowder_aimage.tensor import blob as tensor_blob
from clowder_aimage.tensor.blob import BIAS, CODES, LEGACY_KEY, SCALE, BlobTensor
from clowder_aimage.tensor.quantization_config import (
    StatedType,
    complete,
    compute_group_size,
    find_part_layers,
)
from clowder_aimage.tensor.weight import SourceTensor, TensorChunk, Weight

EXPERTS = ("experts", "shared_experts")


def read_stored(
    store: BlobFiles, aimage: AImage, stated: QuantizationLookup = lambda *_: (None, None)
) -> list[StoredLayer]:
    """Return the layers of an AImage; the headers of tensor layers are read.

    ``stated`` returns the quantization of codes if their blob does not state it.

    Raises:
        NotFoundError: A blob is not in the store.
        FormatError: A blob does not match its layer.
    """
    layers = [
        _read(store, layer, stated) if layer.is_tensor else StoredLayer(layer, ())
        for layer in aimage.layers
    ]
    return join(layers, stated)


def group_weights(layers: Sequence[StoredLayer]) -> dict[str, list[Weight]]:
    """Return the weights of each component."""
    components: dict[str, list[Weight]] = {}
    for stored in layers:
        if stored.weights:
            components.setdefault(stored.layer.component, []).extend(stored.weights)
    return components


def _read(store: BlobFiles, layer: Layer, stated: QuantizationLookup) -> StoredLayer:
    path = store.find_path(layer.descriptor)
    prefix = f"{layer.component}/"
    local_name = layer.name.removeprefix(prefix)

    def find_stated_type(key: str) -> StatedType:
        name = local_name if key == LEGACY_KEY else key
        return stated(layer.component, name.removeprefix(prefix))

    try:
        with store.open(layer.descriptor) as file:
            header = read_header(file, layer.descriptor.size)
        tensors = tensor_blob.read_tensors(complete(header, find_stated_type))
        group = find_tensors(layer, local_name, tensors)
    except FormatError as error:
        raise name_layer(layer, error) from None
    if local_name in group:
        return StoredLayer(layer, (_build_weight(local_name, group[local_name], header, path),))
    members = tuple(_build_weight(name, member, header, path) for name, member in group.items())
    return StoredLayer(layer, members, is_group=True)


def name_layer(layer: Layer, error: FormatError) -> FormatError:
    """Return the error, prefixed once with the name of its layer."""
    text = error.message
    for name in (layer.name, layer.name.removeprefix(f"{layer.component}/")):
        text = text.removeprefix(f"{name}: ")
    return FormatError(f"{layer.name}: {text}", hint=error.hint)


def find_tensors(
    layer: Layer, local_name: str, tensors: Mapping[str, BlobTensor]
) -> dict[str, BlobTensor]:
    """Return the tensor of a layer, or those of a packed group, by name.

    ``local_name`` is the layer's name without its component.
    """
    try:
        return {local_name: tensor_blob.find_tensor(tensors, local_name, layer.component)}
    except FormatError:
        names = [key.removeprefix(f"{layer.component}/") for key in tensors]
        # Stacked experts need not be below their group: ``mlp.switch_mlp`` in ``mlp.experts``.
        is_stacked = local_name.rpartition(".")[2] in EXPERTS
        is_single = layer.dtype is not None or layer.shape is not None
        if is_single or not (
            is_stacked or all(name.startswith(f"{local_name}.") for name in names)
        ):
            raise
        return tensor_blob.find_group(tensors, local_name, layer.component)


def _build_weight(name: str, tensor: BlobTensor, header: Header, path: Path) -> Weight:
    keys = {"": tensor.key, **tensor.parts}
    sources = SourceTensor.of(path, header, keys.values(), is_blob=True)
    chunks = tuple(
        TensorChunk(suffix, source.dtype, source.shape, source)
        for suffix, source in zip(keys, sources, strict=True)
    )
    return Weight(name, tensor.dtype, tensor.shape, chunks, tensor.quantization)


QuantizationLookup = Callable[[str, str], StatedType]
"""(component, tensor) to the name of its quantization and its group size in the configs."""


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer and the weights in its blob; none for a file and for the scales of another layer."""

    layer: Layer
    weights: tuple[Weight, ...]
    is_group: bool = False


def join(layers: Sequence[StoredLayer], stated: QuantizationLookup) -> list[StoredLayer]:
    """Return the layers; scales in separate layers move to the weight of their codes.

    Codes without a stated quantization remain U32 values.

    Raises:
        FormatError: The layers do not match their stated quantization.
    """
    layers_by_name = {stored.layer.name: stored for stored in layers}
    joined, merged = {}, set[str]()
    for stored in layers:
        parts = dict(_iter_parts(stored, layers_by_name))
        if SCALE in parts:
            joined[stored.layer.name] = replace(
                stored, weights=(_join_weight(stored, parts, stated),)
            )
            merged |= {scale_layer.layer.name for scale_layer in parts.values()}
    updated = [joined.get(stored.layer.name, stored) for stored in layers]
    for stored in updated:
        _check(stored)
    return [
        replace(stored, weights=()) if stored.layer.name in merged else stored for stored in updated
    ]


def _check(stored: StoredLayer) -> None:
    """Compare a tensor with its layer."""
    layer = stored.layer
    for weight in stored.weights if not stored.is_group else ():
        tensor = BlobTensor(weight.name, weight.dtype, weight.shape, weight.quantization, {})
        tensor_blob.check_layer(tensor, layer.name, layer.dtype, layer.shape)


def _iter_parts(
    stored: StoredLayer, layers_by_name: Mapping[str, StoredLayer]
) -> Iterator[tuple[str, StoredLayer]]:
    if stored.is_group or [weight.dtype for weight in stored.weights] != [CODES]:
        return
    for suffix, name in find_part_layers(stored.layer.name, layers_by_name).items():
        scale_layer = layers_by_name[name]
        if len(scale_layer.weights) == 1 and not scale_layer.is_group:
            yield suffix, scale_layer


def _join_weight(
    stored: StoredLayer, parts: Mapping[str, StoredLayer], stated: QuantizationLookup
) -> Weight:
    (codes,) = stored.weights
    kind, size = stated(stored.layer.component, codes.name)
    if kind is None:
        return codes
    scales_by_suffix = {key: scale_layer.weights[0] for key, scale_layer in parts.items()}
    try:
        size = size or compute_group_size(kind, codes.shape, scales_by_suffix[SCALE].shape)
        quantization = Quantization.parse(kind, size)
    except FormatError as error:
        raise FormatError(f"{stored.layer.name}: {error}") from None
    shape = quantization.compute_shape(codes.shape) if codes.shape else ()
    scales = quantization.compute_scales_shape(shape) if quantization.fits(shape) else None
    if (
        scales_by_suffix[SCALE].shape != scales
        or scales_by_suffix.get(BIAS, scales_by_suffix[SCALE]).shape != scales
    ):
        raise FormatError(
            f"{stored.layer.name}: {CODES} {list(codes.shape)} and scales "
            f"{list(scales_by_suffix[SCALE].shape)} do not match {kind} in groups of "
            f"{quantization.group_size}"
        )
    chunks = tuple(
        replace(weight.parts[0], suffix=suffix)
        for suffix, weight in {"": codes, **scales_by_suffix}.items()
    )
    return Weight(codes.name, quantization.type.name, shape, chunks, quantization)
