"""Quantization that blobs leave out: kinds stated by configurations, scales in other layers.

Models that came a file a tensor say of their codes neither type nor group size: the type is in a
configuration, and the shapes tell the size. ollama's first generation has codes, scales and biases
in layers of their own (``x.weight``, ``x.weight_scale``, ``x.weight_qbias``), MLX's checkpoints
too, packed as they are (``x.scales``, ``x.biases``). Format: ollama, x/imagegen/manifest; MLX-LM.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace

from clowder_aimage.tensor.header import Header, TensorInfo
from clowder_aimage.tensor.quantization import GROUP_SIZE, QUANT_TYPE, Quantization
from clowder_aimage.tensor.tensor_blob import BIAS, GLOBAL_SCALE, SCALE

CODES = "U32"
Said = tuple[str | None, int | None]  # the name of a quantization and its group size
_WEIGHT = ".weight"
_OWN = {SCALE: "_scale", BIAS: "_qbias", GLOBAL_SCALE: "_global_scale"}
_MLX = {SCALE: ".scales", BIAS: ".biases"}


def own_layers(name: str, layers: Container[str]) -> dict[str, str]:
    """Return the layers of the scales and biases of the codes in the layer ``name``.

    The keys are SCALE, BIAS and GLOBAL_SCALE; the result is empty where there are no scales.

    By SCALE, BIAS, GLOBAL_SCALE; nothing where there are no scales.
    """
    if name.endswith(_WEIGHT):
        for stem, words in ((name, _OWN), (name.removesuffix(_WEIGHT), _MLX)):
            if stem + words[SCALE] in layers:
                parts = {part: stem + word for part, word in words.items()}
                return {part: own for part, own in parts.items() if own in layers}
    return {}


def complete(header: Header, stated: Callable[[str], Said]) -> Header:
    """Return the header with what it leaves out about codes.

    The type as ``stated`` says it of a key, the group size as the shapes do. int4 comes in groups
    of 32 and of 64.

    Raises:
        FormatError: an unknown type.
    """
    codes = [key for key, info in header.tensors.items() if info.dtype == CODES]
    if not codes:
        return header
    metadata = dict(header.metadata)
    for key in codes:
        if scales := _scales(key, header.tensors):
            _complete(metadata, key, header.tensors[key], scales, stated)
    return replace(header, metadata=metadata)


def group_size(kind: str, codes: tuple[int, ...], scales: tuple[int, ...]) -> int | None:
    """Return the values of a row for each of its scales, where that is a size of ``kind``.

    Raises:
        FormatError: an unknown type.
    """
    quantization = Quantization.parse(kind)
    values = quantization.shape(codes)[-1] if codes else 0
    groups = scales[-1] if scales else 0
    if groups and values % groups == 0 and values // groups in quantization.type.group_sizes:
        return values // groups
    return None


def _scales(key: str, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    scales = tensors.get(key + SCALE)
    if scales is None and key.endswith(_WEIGHT):
        scales = tensors.get(key.removesuffix(_WEIGHT) + _MLX[SCALE])
    return scales


def _complete(
    metadata: dict[str, str],
    key: str,
    codes: TensorInfo,
    scales: TensorInfo,
    stated: Callable[[str], Said],
) -> None:
    """Add type and group size of ``key`` where ``metadata`` does not say them."""
    own_kind, own_size = f"{key}.{QUANT_TYPE}", f"{key}.{GROUP_SIZE}"
    said = metadata.get(own_kind, metadata.get(QUANT_TYPE))
    if said is None:
        said, size = stated(key)
        if said is None:
            return
        metadata[own_kind] = said
        if size is not None:
            metadata.setdefault(own_size, str(size))
    if own_size in metadata or GROUP_SIZE in metadata:
        return
    if found := group_size(said, codes.shape, scales.shape):
        metadata[own_size] = str(found)
