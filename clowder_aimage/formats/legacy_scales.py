"""Quantized tensors whose codes, scales and biases are layers of their own.

So ollama's first generation has them (``x.weight``, ``x.weight_scale``, ``x.weight_qbias``), and
models of MLX that came a file a tensor (``x.scales``, ``x.biases``). They are joined to one weight,
which stays in its layers as it is: scales that were cast would no longer fit their codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from clowder_aimage.dialect import Layer
from clowder_aimage.errors import FormatError
from clowder_aimage.tensor import BlobTensor, Quantization, check_layer
from clowder_aimage.tensor.external_quantization import CODES, Said, group_size, own_layers
from clowder_aimage.tensor.tensor_blob import BIAS, SCALE
from clowder_aimage.tensor.weight import TensorPart, Weight

Stated = Callable[[str, str], Said]
"""(component, tensor) to the name of its quantization and its group size, as configs say them."""


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer and the weights in its blob; none in a file, and none in the scales of another."""

    layer: Layer
    weights: tuple[Weight, ...]
    is_group: bool = False


def join(layers: Sequence[StoredLayer], stated: Stated) -> list[StoredLayer]:
    """Return the same layers, with weights that span several of them in that of the codes.

    Codes without any statement of their quantization stay U32 values.

    Raises:
        FormatError: the layers do not fit what is said of them.
    """
    named = {stored.layer.name: stored for stored in layers}
    joined, taken = {}, set[str]()
    for stored in layers:
        parts = dict(_parts(stored, named))
        if SCALE in parts:
            joined[stored.layer.name] = replace(stored, weights=(_joined(stored, parts, stated),))
            taken |= {part.layer.name for part in parts.values()}
    for stored in layers:
        _check(joined.get(stored.layer.name, stored))
    return [
        replace(stored, weights=())
        if stored.layer.name in taken
        else joined.get(stored.layer.name, stored)
        for stored in layers
    ]


def _check(stored: StoredLayer) -> None:
    """Hold a tensor next to what its layer promises: codes are known when they are joined."""
    if stored.is_group:
        return
    layer = stored.layer
    for weight in stored.weights:
        tensor = BlobTensor(weight.name, weight.dtype, weight.shape, weight.quantization, {})
        check_layer(tensor, layer.name, layer.dtype, layer.shape)


def _parts(
    stored: StoredLayer, named: Mapping[str, StoredLayer]
) -> Iterator[tuple[str, StoredLayer]]:
    """Yield the layers of scales and biases for the codes in ``stored``."""
    if stored.is_group or [weight.dtype for weight in stored.weights] != [CODES]:
        return
    for part, name in own_layers(stored.layer.name, named).items():
        own = named[name]
        if len(own.weights) == 1 and not own.is_group:
            yield part, own


def _joined(stored: StoredLayer, parts: Mapping[str, StoredLayer], stated: Stated) -> Weight:
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
            f"{list(every[SCALE].shape)} are no {kind} in groups of {quantization.group_size}"
        )
    whole = [replace(codes.parts[0], suffix="")]
    whole += [_as_part(suffix, weight) for suffix, weight in every.items()]
    return Weight(codes.name, quantization.type.name, shape, tuple(whole), quantization)


def _as_part(suffix: str, weight: Weight) -> TensorPart:
    return replace(weight.parts[0], suffix=suffix)
