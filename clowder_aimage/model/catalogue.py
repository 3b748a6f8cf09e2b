"""The tensors of one component, by name. A blob's header is read on first use.

Both generations are supported: a quantized tensor in one blob, and codes, scales and biases in
separate layers (``x.weight``, ``x.weight_scale``, ``x.weight_qbias``; MLX: ``x.scales``,
``x.biases``). A blob without a tensor of its layer's name is a packed group: the layer's name is a
prefix, and the header lists its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from clowder_aimage.content.arriving_files import ArrivingFiles
from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import Layer
from clowder_aimage.errors import AImageError, FormatError, NotFoundError
from clowder_aimage.formats.stored_weights import EXPERTS, find_tensors, name_layer
from clowder_aimage.model.stored_tensor import (
    StoredTensor,
    TensorRange,
    WeightBlob,
    read_plain,
)
from clowder_aimage.tensor import (
    BlobTensor,
    Header,
    TensorInfo,
    check_layer,
    find_tensor,
    read_tensors,
)
from clowder_aimage.tensor.blob import CODES, LEGACY_KEY
from clowder_aimage.tensor.quantization_config import (
    QuantizationConfig,
    StatedType,
    complete,
    find_part_layers,
)

# Always values, also beside layers with names of scales
_FLOATS = ("F64", "F32", "F16", "BF16")


class Catalogue:
    """The tensors of ``component``; ``layers`` are by their names without the component."""

    def __init__(
        self,
        store: BlobFiles,
        component: str,
        layers: Mapping[str, Layer],
        stated: QuantizationConfig,
    ) -> None:
        self._store, self._component, self._stated = store, component, stated
        self._all = layers
        self._read: dict[str, dict[str, StoredTensor]] = {}

    @cached_property
    def _parts(self) -> dict[str, dict[str, str]]:
        """Map layers of codes to the separate layers of their scales and biases."""
        return {
            name: parts
            for name in self._all
            if (parts := find_part_layers(name, self._all)) and self._is_codes(name)
        }

    @cached_property
    def _layers(self) -> dict[str, Layer]:
        part_names = {name for parts in self._parts.values() for name in parts.values()}
        return {name: layer for name, layer in self._all.items() if name not in part_names}

    def _is_codes(self, name: str) -> bool:
        """Return True if the blob of a layer holds only codes, whose scales are other layers.

        A layer of floats may have siblings with such names too, and codes may include scales.
        """
        layer = self._all[name]
        if layer.dtype in _FLOATS:
            return False
        try:
            tensors = WeightBlob.read(self._store, layer).header.tensors
        except AImageError:
            # Not an answer here: reading the tensor raises the error
            return True
        return len(tensors) == 1 and not any(info.dtype in _FLOATS for info in tensors.values())

    def list_names(self) -> tuple[str, ...]:
        """Return all names.

        Only blobs that may be packed groups, or codes with separate scales, are opened.

        Raises:
            FormatError: Two tensors have the same name, or one of those blobs is invalid.
        """
        # A dict as an ordered set: weights are read in the order of the layers
        names: dict[str, None] = {}
        for layer_name, layer in self._layers.items():
            inside = (layer_name,) if layer.dtype is not None else self._read_tensors(layer_name)
            for name in inside:
                if name in names:
                    raise FormatError(f"duplicate tensor name: {name[:120]}")
                names[name] = None
        return tuple(names)

    def find_arriving(self, name: str) -> Layer | None:
        """Return the layer of a tensor that is still being fetched; None if it must be read.

        Layers of other tools do not state the tensor, or state the shape of codes.
        """
        layer = self._layers.get(name)
        if layer is None or layer.dtype in (None, CODES) or layer.shape is None:
            return None
        files = self._store
        is_here = not isinstance(files, ArrivingFiles) or files.exists(layer.descriptor)
        return None if is_here else layer

    def find(self, name: str) -> StoredTensor:
        """Return the tensor ``name``.

        Raises:
            NotFoundError: It does not exist.
            FormatError: Its blob is invalid.
        """
        for layer_name in self._iter_candidates(name):
            tensor = self._read_tensors(layer_name).get(name)
            if tensor is not None:
                return tensor
        full_name = f"{self._component}/{name}" if self._component else name
        raise NotFoundError(f"tensor {full_name[:200]} not found in the model")

    def _iter_candidates(self, name: str) -> Iterator[str]:
        """Yield the layer of that name, and the layers that may be groups containing it."""
        if name in self._layers:
            yield name
        for prefix in _iter_prefixes(name):
            for group in (prefix, *(f"{prefix}.{word}" for word in EXPERTS)):
                if group in self._layers and self._layers[group].dtype is None:
                    yield group
        yield from (shard for shard, layer in self._layers.items() if layer.is_shard)

    def _read_tensors(self, layer_name: str) -> dict[str, StoredTensor]:
        """Return the tensors of a layer's blob; headers are cached."""
        if layer_name not in self._read:
            layer = self._layers[layer_name]
            is_single = layer_name not in self._parts
            if is_single and (plain := read_plain(self._store, layer, layer_name)) is not None:
                self._read[layer_name] = {layer_name: plain}
                return self._read[layer_name]
            blob = WeightBlob.read(self._store, layer)
            try:
                self._read[layer_name] = dict(self._iter_tensors(layer_name, blob))
            except FormatError as error:
                raise name_layer(layer, error) from None
        return self._read[layer_name]

    def _iter_tensors(
        self, layer_name: str, blob: WeightBlob
    ) -> Iterator[tuple[str, StoredTensor]]:
        if parts := self._parts.get(layer_name):
            yield layer_name, self._join(layer_name, blob, parts)
            return
        tensors = read_tensors(self._complete_header(blob.header, layer_name))
        if blob.layer.is_shard:
            for name, tensor in tensors.items():
                yield name, blob.build_tensor(name, tensor)
            return
        for name, inside in find_tensors(blob.layer, layer_name, tensors).items():
            if name == layer_name:
                _check(blob.layer, inside)
            yield name, blob.build_tensor(name, inside)

    def _complete_header(self, header: Header, layer_name: str) -> Header:
        def get_stated_type(key: str) -> StatedType:
            name = layer_name if key == LEGACY_KEY else key
            return self._stated.of(name.removeprefix(f"{self._component}/"))

        return complete(header, get_stated_type)

    def _join(self, name: str, blob: WeightBlob, parts: Mapping[str, str]) -> StoredTensor:
        """Return a quantized tensor whose codes, scales and biases are separate layers."""
        codes = blob.get_range(self._find_single(name, blob).key)
        ranges = {suffix: self._locate_part(layer_name) for suffix, layer_name in parts.items()}
        if codes.dtype != CODES:
            raise FormatError(f"values with separate scales must be {CODES}, not {codes.dtype}")
        infos = {
            name + suffix: TensorInfo(
                tensor_range.dtype, tensor_range.shape, 0, tensor_range.nbytes
            )
            for suffix, tensor_range in {"": codes, **ranges}.items()
        }
        joined = read_tensors(self._complete_header(Header(infos, {}, 0), name))[name]
        _check(blob.layer, joined)
        return StoredTensor(name, joined.dtype, joined.shape, codes, joined.quantization, ranges)

    def _locate_part(self, layer_name: str) -> TensorRange:
        layer = self._all[layer_name]
        blob = WeightBlob.read(self._store, layer)
        tensor = self._find_single(layer_name, blob)
        _check(layer, tensor)
        return blob.get_range(tensor.key)

    def _find_single(self, name: str, blob: WeightBlob) -> BlobTensor:
        return find_tensor(read_tensors(blob.header), name, self._component)


def _check(layer: Layer, tensor: BlobTensor) -> None:
    """Check a tensor against the annotations of its layer. Raises FormatError."""
    check_layer(tensor, layer.name, layer.dtype, layer.shape)


def _iter_prefixes(name: str) -> Iterator[str]:
    """Yield the names of groups that may contain a tensor, the longest first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
