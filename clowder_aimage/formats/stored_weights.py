"""Weights of an AImage in a store, as described by the headers of their blobs."""

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
from clowder_aimage.tensor.quantization_config import StatedType, complete, group_size, part_layers
from clowder_aimage.tensor.weight import SourceTensor, TensorChunk, Weight

EXPERTS = ("experts", "shared_experts")


def read_stored(
    store: BlobFiles, aimage: AImage, stated: QuantizationLookup = lambda *_: (None, None)
) -> list[StoredLayer]:
    """Return the layers of an AImage; the headers of tensor layers are read.

    ``stated`` is called for codes whose blob does not state their quantization.

    Raises:
        NotFoundError: A blob is not in the store.
        FormatError: A blob does not match its layer.
    """
    layers = [
        _read(store, layer, stated) if layer.is_tensor else StoredLayer(layer, ())
        for layer in aimage.layers
    ]
    return join(layers, stated)


def weights_of(layers: Sequence[StoredLayer]) -> dict[str, list[Weight]]:
    """Return the weights of each component."""
    components: dict[str, list[Weight]] = {}
    for stored in layers:
        if stored.weights:
            components.setdefault(stored.layer.component, []).extend(stored.weights)
    return components


def _read(store: BlobFiles, layer: Layer, stated: QuantizationLookup) -> StoredLayer:
    path = store.path(layer.descriptor)
    prefix = f"{layer.component}/"
    own = layer.name.removeprefix(prefix)

    def stated_by_key(key: str) -> StatedType:
        name = own if key == LEGACY_KEY else key
        return stated(layer.component, name.removeprefix(prefix))

    try:
        with store.open(layer.descriptor) as file:
            header = read_header(file, layer.descriptor.size)
        tensors = tensor_blob.read_tensors(complete(header, stated_by_key))
        group = tensors_of(layer, own, tensors)
    except FormatError as error:
        raise name_layer(layer, error) from None
    if own in group:
        return StoredLayer(layer, (_weight(own, group[own], header, path),))
    members = tuple(_weight(name, member, header, path) for name, member in group.items())
    return StoredLayer(layer, members, is_group=True)


def name_layer(layer: Layer, error: FormatError) -> FormatError:
    """Return the error, prefixed once with the name of its layer."""
    text = error.message
    for name in (layer.name, layer.name.removeprefix(f"{layer.component}/")):
        text = text.removeprefix(f"{name}: ")
    return FormatError(f"{layer.name}: {text}", hint=error.hint)


def tensors_of(layer: Layer, own: str, tensors: Mapping[str, BlobTensor]) -> dict[str, BlobTensor]:
    """Return the tensor that a layer is named after, or those of a packed group, by name.

    ``own`` is the name of the layer without its component. Stacked experts may be named beside the
    group: ``mlp.switch_mlp`` in ``mlp.experts``.
    """
    try:
        return {own: tensor_blob.find_tensor(tensors, own, layer.component)}
    except FormatError:
        names = [key.removeprefix(f"{layer.component}/") for key in tensors]
        is_stacked = own.rpartition(".")[2] in EXPERTS
        promises_one = layer.dtype is not None or layer.shape is not None
        if promises_one or not (is_stacked or all(name.startswith(f"{own}.") for name in names)):
            raise
        return tensor_blob.find_group(tensors, own, layer.component)


def _weight(name: str, tensor: BlobTensor, header: Header, path: Path) -> Weight:
    keys = {"": tensor.key, **tensor.parts}
    parts = tuple(
        TensorChunk(suffix, found.dtype, found.shape, found)
        for suffix, found in zip(keys, SourceTensor.of(path, header, keys.values()), strict=True)
    )
    return Weight(name, tensor.dtype, tensor.shape, parts, tensor.quantization)


QuantizationLookup = Callable[[str, str], StatedType]
"""(component, tensor) to the name of its quantization and its group size, as configs state them."""


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer and the weights in its blob; empty for a file, or for the scales of another layer."""

    layer: Layer
    weights: tuple[Weight, ...]
    is_group: bool = False


def join(layers: Sequence[StoredLayer], stated: QuantizationLookup) -> list[StoredLayer]:
    """Return the same layers, with each weight that spans several layers moved to its codes.

    Codes whose quantization is not stated anywhere remain U32 values.

    Raises:
        FormatError: The layers do not match their stated quantization.
    """
    named = {stored.layer.name: stored for stored in layers}
    joined, taken = {}, set[str]()
    for stored in layers:
        parts = dict(_parts(stored, named))
        if SCALE in parts:
            joined[stored.layer.name] = replace(stored, weights=(_joined(stored, parts, stated),))
            taken |= {part.layer.name for part in parts.values()}
    whole = [joined.get(stored.layer.name, stored) for stored in layers]
    for stored in whole:
        _check(stored)
    return [replace(one, weights=()) if one.layer.name in taken else one for one in whole]


def _check(stored: StoredLayer) -> None:
    """Compare a tensor with its layer; codes are checked when they are joined."""
    layer = stored.layer
    for weight in stored.weights if not stored.is_group else ():
        tensor = BlobTensor(weight.name, weight.dtype, weight.shape, weight.quantization, {})
        tensor_blob.check_layer(tensor, layer.name, layer.dtype, layer.shape)


def _parts(
    stored: StoredLayer, named: Mapping[str, StoredLayer]
) -> Iterator[tuple[str, StoredLayer]]:
    if stored.is_group or [weight.dtype for weight in stored.weights] != [CODES]:
        return
    for part, name in part_layers(stored.layer.name, named).items():
        own = named[name]
        if len(own.weights) == 1 and not own.is_group:
            yield part, own


def _joined(
    stored: StoredLayer, parts: Mapping[str, StoredLayer], stated: QuantizationLookup
) -> Weight:
    (codes,) = stored.weights
    kind, size = stated(stored.layer.component, codes.name)
    if kind is None:
        return codes
    every = {part: own.weights[0] for part, own in parts.items()}
    try:
        size = size or group_size(kind, codes.shape, every[SCALE].shape)
        quantization = Quantization.parse(kind, size)
    except FormatError as error:
        raise FormatError(f"{stored.layer.name}: {error}") from None
    shape = quantization.shape(codes.shape) if codes.shape else ()
    scales = quantization.scales_shape(shape) if quantization.fits(shape) else None
    if every[SCALE].shape != scales or every.get(BIAS, every[SCALE]).shape != scales:
        raise FormatError(
            f"{stored.layer.name}: {CODES} {list(codes.shape)} and scales "
            f"{list(every[SCALE].shape)} do not match {kind} in groups of {quantization.group_size}"
        )
    whole = tuple(
        replace(weight.parts[0], suffix=suffix) for suffix, weight in {"": codes, **every}.items()
    )
    return Weight(codes.name, quantization.type.name, shape, whole, quantization)
