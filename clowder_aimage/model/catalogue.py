"""The tensors of one component, by name. A blob's header is read when it is first asked for.

Reads both generations: a quantized tensor in one blob, and codes, scales and biases in layers of
their own (``x.weight``, ``x.weight_scale``, ``x.weight_qbias``; MLX: ``x.scales``, ``x.biases``). A
blob in which no tensor is called as its layer is a packed group: the layer's name is a prefix, and
the header tells what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from clowder_aimage.content.store import ContentStore
from clowder_aimage.dialect.aimage import Layer
from clowder_aimage.errors import FormatError, NotFoundError
from clowder_aimage.model.blob import Blob, Span, Tensor, blame
from clowder_aimage.model.stated import Stated
from clowder_aimage.tensor import BlobTensor, Header, Quantization, TensorInfo, read_tensors
from clowder_aimage.tensor.blob import (
    BIAS,
    GLOBAL_SCALE,
    LEGACY_KEY,
    SCALE,
    check_layer,
    find_group,
    find_tensor,
)
from clowder_aimage.tensor.quantization import GROUP_SIZE, QUANT_TYPE

_WEIGHT = ".weight"
_CODES = "U32"
_EXPERTS = ("experts", "shared_experts")
_OWN_LAYERS = {SCALE: "_scale", BIAS: "_qbias", GLOBAL_SCALE: "_global_scale"}
_MLX = {SCALE: ".scales", BIAS: ".biases"}


class Catalogue:
    """What ``component`` consists of: ``layers`` by their names without the component."""

    def __init__(
        self, store: ContentStore, component: str, layers: Mapping[str, Layer], stated: Stated
    ) -> None:
        self._store, self._component, self._stated = store, component, stated
        self._parts = {name: parts for name in layers if (parts := _own_layers(name, layers))}
        taken = {name for parts in self._parts.values() for name in parts.values()}
        self._part_layers = {name: layers[name] for name in taken}
        self._layers = {name: layer for name, layer in layers.items() if name not in taken}
        self._read: dict[str, dict[str, Tensor]] = {}

    def names(self) -> tuple[str, ...]:
        """All names. Only blobs that may be packed groups are opened.

        Raises:
            FormatError: two tensors have one name, or one of those blobs is broken.
        """
        names: dict[str, None] = {}
        for layer_name, layer in self._layers.items():
            inside = (layer_name,) if layer.dtype is not None else self._tensors(layer_name)
            for name in inside:
                if name in names:
                    raise FormatError(f"two tensors are called {name[:120]}")
                names[name] = None
        return tuple(names)

    def find(self, name: str) -> Tensor:
        """The tensor called ``name``.

        Raises:
            NotFoundError: there is none.
            FormatError: its blob is not what it claims to be.
        """
        for layer_name in self._candidates(name):
            tensor = self._tensors(layer_name).get(name)
            if tensor is not None:
                return tensor
        raise NotFoundError(f"the model has no tensor {self._component}/{name[:200]}")

    def _candidates(self, name: str) -> Iterator[str]:
        """The layer of that name, and the layers that may be groups with it."""
        if name in self._layers:
            yield name
        for prefix in _prefixes(name):
            for group in (prefix, *(f"{prefix}.{word}" for word in _EXPERTS)):
                if group in self._layers and self._layers[group].dtype is None:
                    yield group

    def _tensors(self, layer_name: str) -> dict[str, Tensor]:
        """What a layer's blob holds, from the header or from memory."""
        if layer_name not in self._read:
            layer = self._layers[layer_name]
            blob = Blob.read(self._store, layer)
            try:
                self._read[layer_name] = dict(self._inside(layer_name, blob))
            except FormatError as error:
                raise blame(layer, error) from None
        return self._read[layer_name]

    def _inside(self, layer_name: str, blob: Blob) -> Iterator[tuple[str, Tensor]]:
        if parts := self._parts.get(layer_name):
            yield layer_name, self._joined(layer_name, blob, parts)
            return
        found = read_tensors(self._completed(blob.header, layer_name))
        try:
            inside = find_tensor(found, layer_name, self._component)
        except FormatError:
            if blob.layer.dtype is not None or blob.layer.shape is not None:
                raise  # it promises one tensor, so it is no group
            for name, member in _group(found, layer_name, self._component).items():
                yield name, blob.tensor(name, member)
            return
        _check(blob.layer, inside)
        yield layer_name, blob.tensor(layer_name, inside)

    def _completed(self, header: Header, layer_name: str) -> Header:
        """The header with what it leaves out about codes: the type as the configuration says it,
        the group size as the shapes do. int4 comes in groups of 32 and of 64."""
        codes = [key for key, info in header.tensors.items() if info.dtype == _CODES]
        if not codes:
            return header
        metadata = dict(header.metadata)
        for key in codes:
            if scales := _scales(key, header.tensors):
                name = layer_name if key == LEGACY_KEY else key
                stated = self._stated.of(name.removeprefix(f"{self._component}/"))
                _complete(metadata, key, header.tensors[key], scales, stated)
        return replace(header, metadata=metadata)

    def _joined(self, name: str, blob: Blob, parts: Mapping[str, str]) -> Tensor:
        """A quantized tensor whose codes, scales and biases are layers of their own."""
        codes = blob.span(self._single(name, blob).key)
        spans = {part: self._part(layer_name) for part, layer_name in parts.items()}
        if codes.dtype != _CODES:
            raise FormatError(f"{codes.dtype} values with scales beside them cannot be read")
        infos = {
            name + part: TensorInfo(span.dtype, span.shape, 0, span.nbytes)
            for part, span in {"": codes, **spans}.items()
        }
        found = read_tensors(self._completed(Header(infos, {}, 0), name))[name]
        _check(blob.layer, found)
        return Tensor(name, found.dtype, found.shape, codes, found.quantization, spans)

    def _part(self, layer_name: str) -> Span:
        """The scales or biases that are a layer of their own."""
        layer = self._part_layers[layer_name]
        blob = Blob.read(self._store, layer)
        found = self._single(layer_name, blob)
        _check(layer, found)
        return blob.span(found.key)

    def _single(self, name: str, blob: Blob) -> BlobTensor:
        """The one array in the blob of a layer."""
        return find_tensor(read_tensors(blob.header), name, self._component)


def _check(layer: Layer, tensor: BlobTensor) -> None:
    """Hold a tensor next to what its layer promises. Raises FormatError."""
    check_layer(tensor, layer.name, layer.dtype, layer.shape)


def _own_layers(name: str, layers: Mapping[str, Layer]) -> dict[str, str]:
    """The layers of scales and biases for the codes in layer ``name``, if it has them."""
    if name.endswith(_WEIGHT):
        for stem, words in ((name, _OWN_LAYERS), (name.removesuffix(_WEIGHT), _MLX)):
            if stem + words[SCALE] in layers:
                parts = {part: stem + word for part, word in words.items()}
                return {part: own for part, own in parts.items() if own in layers}
    return {}


def _group(found: Mapping[str, BlobTensor], prefix: str, component: str) -> dict[str, BlobTensor]:
    """The tensors of a packed group, by their names without the component.

    Stacked experts may stand beside it: ``mlp.switch_mlp`` in the group ``mlp.experts``.

    Raises:
        FormatError: they are of another group.
    """
    group = find_group(found, prefix, component)
    stacked = prefix.rpartition(".")[2] in _EXPERTS
    if not stacked and not all(name.startswith(f"{prefix}.") for name in group):
        find_tensor(found, prefix, component)  # which says what is there instead
    return group


def _prefixes(name: str) -> Iterator[str]:
    """The names of groups that a tensor may be in, the longest first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


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
    stated: tuple[str | None, int | None],
) -> None:
    """Add type and group size of ``key`` where ``metadata`` does not say them."""
    own_kind, own_size = f"{key}.{QUANT_TYPE}", f"{key}.{GROUP_SIZE}"
    said = metadata.get(own_kind, metadata.get(QUANT_TYPE))
    kind, size = stated
    if said is None and kind is not None:
        said = metadata[own_kind] = kind
        if size is not None:
            metadata.setdefault(own_size, str(size))
    if said is None or own_size in metadata or GROUP_SIZE in metadata:
        return
    quantization = Quantization.parse(said)
    values = quantization.shape(codes.shape)[-1] if codes.shape else 0
    groups = scales.shape[-1] if scales.shape else 0
    if groups and values % groups == 0 and values // groups in quantization.type.group_sizes:
        metadata[own_size] = str(values // groups)
