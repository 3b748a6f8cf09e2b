"""Planned layers of files and weights, and the chunks of their blobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clowder_aimage.dialect import Layer
from clowder_aimage.formats.model_tree import SourceFile
from clowder_aimage.importer.decision import WeightDecision, build_entries, get_value_dtype
from clowder_aimage.importer.recipe import find_expert_group
from clowder_aimage.oci import Descriptor, Digest, mediatype
from clowder_aimage.tensor import Quantization, compute_nbytes, encode_header
from clowder_aimage.tensor.weight import FileRange, TensorChunk, Weight, WeightReader

# Packing without a recipe must not need numpy.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class CopyChunk:
    """A range that is copied unchanged."""

    file_range: FileRange

    @property
    def nbytes(self) -> int:
        return self.file_range.nbytes


@dataclass(frozen=True, slots=True)
class CastChunk:
    """Values of ``source`` stored as ``target``; ``name`` is for errors."""

    file_range: FileRange
    name: str
    source: str
    target: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class QuantizeChunk:
    """A matrix of ``source`` values, cast to ``target``, then quantized: codes, scales, biases.

    Its rows have ``columns`` values.
    """

    file_range: FileRange
    name: str
    source: str
    target: str
    quantization: Quantization
    nbytes: int
    columns: int


@dataclass(frozen=True, slots=True)
class FactorChunk:
    """The float32 factors of a chunk, or the reciprocals of its divisors."""

    chunk: TensorChunk

    @property
    def file_range(self) -> FileRange:
        return self.chunk.tensor.file_range

    @property
    def nbytes(self) -> int:
        return compute_nbytes(self.chunk.dtype, self.chunk.shape)


@dataclass(frozen=True, slots=True)
class ComputedChunk:
    """Values that ``compute`` returns as float32, cast to ``target`` and optionally quantized.

    Rows have ``columns`` values.
    """

    compute: Callable[[], npt.NDArray[np.float32]]
    name: str
    target: str
    quantization: Quantization | None
    nbytes: int
    columns: int
    source: str = "F32"


Chunk = CopyChunk | CastChunk | QuantizeChunk | FactorChunk | ComputedChunk


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """A planned blob: ``prefix`` (a safetensors header, or empty), then ``chunks``.

    ``origins`` are the source blobs in the store. ``existing`` is the layer if it is in the store
    already. With a ``compression`` the whole blob is compressed.
    """

    name: str
    media_type: str
    prefix: bytes
    chunks: tuple[Chunk, ...]
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    origins: tuple[Descriptor, ...] = ()
    existing: Layer | None = None
    compression: str = ""

    @property
    def size(self) -> int:
        """Return the size in bytes before compression."""
        if self.existing is not None:
            return self.existing.descriptor.size
        return len(self.prefix) + sum(chunk.nbytes for chunk in self.chunks)

    @property
    def path(self) -> Path:
        """Return the file that contains the first bytes."""
        chunk = next(iter(self.chunks), None)
        if chunk is None or isinstance(chunk, ComputedChunk):
            return Path(self.name)
        return chunk.file_range.path

    @property
    def is_quantizing(self) -> bool:
        return bool(self.quantizations)

    @property
    def quantizations(self) -> tuple[Quantization, ...]:
        """Return those of the chunks that are quantized."""
        chunks = (c for c in self.chunks if isinstance(c, QuantizeChunk | ComputedChunk))
        return tuple(chunk.quantization for chunk in chunks if chunk.quantization is not None)

    @property
    def is_computed(self) -> bool:
        return any(
            isinstance(chunk, ComputedChunk) or chunk.file_range.decoded is not None
            for chunk in self.chunks
        )

    def build_layer(self, digest: Digest, size: int | None = None) -> Layer:
        """Return the layer with this digest, and this size if it is compressed."""
        if self.existing is not None:
            return self.existing
        media_type = "+".join(filter(None, (self.media_type, self.compression)))
        content = Descriptor(media_type, digest, self.size if size is None else size)
        return Layer(content, self.name, self.dtype, self.shape)


def _plan_chunks(component: str, decision: WeightDecision) -> list[Chunk]:
    weight = decision.weight
    name = join_name(component, weight.name)
    file_range, source, size = weight.tensor.file_range, weight.dtype, decision.nbytes
    if decision.quantization is not None:
        target = get_value_dtype(decision)
        columns = weight.shape[-1]
        return [
            QuantizeChunk(file_range, name, source, target, decision.quantization, size, columns)
        ]
    if decision.is_cast:
        return [CastChunk(file_range, name, source, decision.dtype, size)]
    return [
        CopyChunk(weight_chunk.tensor.file_range)
        if weight_chunk.reading is WeightReader.AS_IS
        else FactorChunk(weight_chunk)
        for weight_chunk in weight.parts
    ]


def join_name(component: str, name: str) -> str:
    """Return the name of a layer; a model of a single component has no prefix."""
    return f"{component}/{name}" if component else name


def plan_file_layer(file: SourceFile, compression: str = "") -> PlannedLayer:
    """Return the layer of a file, optionally compressed (one of mediatype.COMPRESSIONS)."""
    if file.data is not None:
        return PlannedLayer(file.name, file.media_type, file.data, (), compression=compression)
    chunk = CopyChunk(FileRange(file.path, 0, file.size, file.modified))
    return PlannedLayer(file.name, file.media_type, b"", (chunk,), compression=compression)


def plan_tensor_layers(component: str, decisions: Iterable[WeightDecision]) -> list[PlannedLayer]:
    """Return a layer for each tensor or group of experts."""
    groups: dict[str, list[WeightDecision]] = {}
    layers = []
    for decision in decisions:
        group = find_expert_group(decision.weight.name)
        if group is None:
            layers.append(plan_tensor_layer(component, decision))
        else:
            groups.setdefault(group, []).append(decision)
    return layers + [plan_group_layer(component, prefix, group) for prefix, group in groups.items()]


def plan_tensor_layer(
    component: str, decision: WeightDecision, *origins: Descriptor
) -> PlannedLayer:
    """Return the layer of a tensor, with its scales if it is quantized."""
    quantization = decision.result
    return PlannedLayer(
        join_name(component, decision.weight.name),
        mediatype.AIMAGE_SAFETENSORS,
        encode_header(build_entries(decision), quantization.metadata if quantization else None),
        tuple(_plan_chunks(component, decision)),
        decision.stored,
        decision.weight.shape,
        origins,
    )


def plan_computed_layer(
    name: str,
    shape: tuple[int, ...],
    target: str,
    quantization: Quantization | None,
    compute: Callable[[], npt.NDArray[np.float32]],
) -> PlannedLayer:
    """Return the layer of a tensor with values that are computed during the write.

    They are cast to ``target``, a safetensors dtype, and quantized to ``quantization``.
    """
    local_name = name.partition("/")[2] or name
    if quantization is None:
        header_entries = [(local_name, target, shape)]
        size = compute_nbytes(target, shape)
    else:
        decision = WeightDecision(Weight(local_name, target, shape, ()), target, quantization)
        header_entries, size = build_entries(decision), decision.nbytes
    return PlannedLayer(
        name,
        mediatype.AIMAGE_SAFETENSORS,
        encode_header(header_entries, quantization.metadata if quantization else None),
        (ComputedChunk(compute, name, target, quantization, size, shape[-1] if shape else 1),),
        quantization.type.name if quantization else target,
        shape,
    )


def plan_group_layer(
    component: str, prefix: str, members: Iterable[WeightDecision], *origins: Descriptor
) -> PlannedLayer:
    """Return the layer of several tensors, sorted by name, under their common name."""
    members = sorted(members, key=lambda decision: decision.weight.name)
    return PlannedLayer(
        join_name(component, prefix),
        mediatype.AIMAGE_SAFETENSORS,
        encode_header(
            [entry for decision in members for entry in build_entries(decision)],
            _build_metadata(members),
        ),
        tuple(chunk for decision in members for chunk in _plan_chunks(component, decision)),
        origins=origins,
    )


def _build_metadata(members: Sequence[WeightDecision]) -> dict[str, str]:
    # A single quantization is stated for the blob, different ones for each tensor.
    quantizations = {
        decision.weight.name: decision.result for decision in members if decision.result
    }
    kinds = set(quantizations.values())
    if len(kinds) == 1:
        return kinds.pop().metadata
    return {
        f"{name}.{key}": value
        for name, quantization in quantizations.items()
        for key, value in quantization.metadata.items()
    }
