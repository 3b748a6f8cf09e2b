"""Planned layers of files and weights, and the pieces of their blobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clowder_aimage.dialect import Layer
from clowder_aimage.formats.model_tree import SourceFile
from clowder_aimage.importer.decision import WeightDecision, entries, values_of
from clowder_aimage.importer.recipe import expert_group
from clowder_aimage.oci import Descriptor, Digest, mediatype
from clowder_aimage.tensor import Quantization, encode_header, nbytes
from clowder_aimage.tensor.weight import FileRange, TensorChunk, Weight, WeightReader

if TYPE_CHECKING:  # packing needs no numpy
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """Bytes that are copied unchanged."""

    span: FileRange

    @property
    def nbytes(self) -> int:
        return self.span.nbytes


@dataclass(frozen=True, slots=True)
class CastPiece:
    """Values of ``source`` stored as ``target``; ``name`` is for errors."""

    span: FileRange
    name: str
    source: str
    target: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class QuantizePiece:
    """A matrix of ``source`` values, cast to ``target``, then quantized: codes, scales, biases."""

    span: FileRange
    name: str
    source: str
    target: str
    quantization: Quantization
    nbytes: int


@dataclass(frozen=True, slots=True)
class FactorPiece:
    """The float32 factors of a part, or the reciprocals of its divisors."""

    part: TensorChunk

    @property
    def span(self) -> FileRange:
        return self.part.tensor.file_range

    @property
    def nbytes(self) -> int:
        return nbytes(self.part.dtype, self.part.shape)


@dataclass(frozen=True, slots=True)
class ComputedPiece:
    """Values that ``compute`` returns as float32, cast to ``target``, then perhaps quantized."""

    compute: Callable[[], npt.NDArray[np.float32]]
    name: str
    target: str
    quantization: Quantization | None
    nbytes: int
    source: str = "F32"


Piece = CopyPiece | CastPiece | QuantizePiece | FactorPiece | ComputedPiece


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """A planned blob: ``prefix`` (a safetensors header, or empty), then ``pieces``.

    ``origins`` are the source blobs in the store. A ``kept`` layer already exists.
    With a ``compression`` the whole blob is compressed.
    """

    name: str
    media_type: str
    prefix: bytes
    pieces: tuple[Piece, ...]
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    origins: tuple[Descriptor, ...] = ()
    kept: Layer | None = None
    compression: str = ""

    @property
    def size(self) -> int:
        """Return the size in bytes before compression."""
        if self.kept is not None:
            return self.kept.descriptor.size
        return len(self.prefix) + sum(piece.nbytes for piece in self.pieces)

    @property
    def path(self) -> Path:
        """Return the file that contains the first bytes."""
        first = next(iter(self.pieces), None)
        if first is None or isinstance(first, ComputedPiece):
            return Path(self.name)
        return first.span.path

    @property
    def is_quantizing(self) -> bool:
        return any(
            isinstance(piece, QuantizePiece)
            or (isinstance(piece, ComputedPiece) and piece.quantization is not None)
            for piece in self.pieces
        )

    @property
    def is_computed(self) -> bool:
        return any(
            isinstance(piece, ComputedPiece) or piece.span.decoded is not None
            for piece in self.pieces
        )

    def layer(self, digest: Digest, size: int | None = None) -> Layer:
        """Return the layer with this digest, and this size if it is compressed."""
        if self.kept is not None:
            return self.kept
        media_type = "+".join(filter(None, (self.media_type, self.compression)))
        content = Descriptor(media_type, digest, self.size if size is None else size)
        return Layer(content, self.name, self.dtype, self.shape)


def _pieces(component: str, decision: WeightDecision) -> list[Piece]:
    weight = decision.weight
    name = layer_name(component, weight.name)
    span, source, size = weight.tensor.file_range, weight.dtype, decision.nbytes
    if decision.quantization is not None:
        target = values_of(decision)
        return [QuantizePiece(span, name, source, target, decision.quantization, size)]
    if decision.is_cast:
        return [CastPiece(span, name, source, decision.dtype, size)]
    return [
        CopyPiece(part.tensor.file_range)
        if part.reading is WeightReader.AS_IS
        else FactorPiece(part)
        for part in weight.parts
    ]


def layer_name(component: str, name: str) -> str:
    """Return the name of a layer; a model with a single part has no component."""
    return f"{component}/{name}" if component else name


def file_layer(file: SourceFile, compression: str = "") -> PlannedLayer:
    """Return the layer of a file, optionally compressed (one of mediatype.COMPRESSIONS)."""
    if file.data is not None:
        return PlannedLayer(file.name, file.media_type, file.data, (), compression=compression)
    piece = CopyPiece(FileRange(file.path, 0, file.size, file.modified))
    return PlannedLayer(file.name, file.media_type, b"", (piece,), compression=compression)


def tensor_layers(component: str, decisions: Iterable[WeightDecision]) -> list[PlannedLayer]:
    """Return one layer per tensor, or per group of experts."""
    groups: dict[str, list[WeightDecision]] = {}
    layers = []
    for decision in decisions:
        group = expert_group(decision.weight.name)
        if group is None:
            layers.append(tensor_layer(component, decision))
        else:
            groups.setdefault(group, []).append(decision)
    return layers + [group_layer(component, prefix, group) for prefix, group in groups.items()]


def tensor_layer(component: str, decision: WeightDecision, *origins: Descriptor) -> PlannedLayer:
    """Return the layer of a tensor, or of the parts of a quantized one."""
    quantization = decision.result
    return PlannedLayer(
        layer_name(component, decision.weight.name),
        mediatype.AIMAGE_SAFETENSORS,
        encode_header(entries(decision), quantization.metadata() if quantization else None),
        tuple(_pieces(component, decision)),
        decision.stored,
        decision.weight.shape,
        origins,
    )


def computed_layer(
    name: str,
    shape: tuple[int, ...],
    target: str,
    quantization: Quantization | None,
    compute: Callable[[], npt.NDArray[np.float32]],
) -> PlannedLayer:
    """Return the layer of a tensor whose values are computed when they are written.

    They are cast to ``target``, a safetensors dtype, and quantized if ``quantization`` is given.
    """
    own = name.partition("/")[2] or name
    if quantization is None:
        described = [(own, target, shape)]
        size = nbytes(target, shape)
    else:
        decision = WeightDecision(Weight(own, target, shape, ()), target, quantization)
        described, size = entries(decision), decision.nbytes
    return PlannedLayer(
        name,
        mediatype.AIMAGE_SAFETENSORS,
        encode_header(described, quantization.metadata() if quantization else None),
        (ComputedPiece(compute, name, target, quantization, size),),
        quantization.type.name if quantization else target,
        shape,
    )


def group_layer(
    component: str, prefix: str, members: Iterable[WeightDecision], *origins: Descriptor
) -> PlannedLayer:
    """Return the layer of several tensors, sorted by name, under their common name."""
    members = sorted(members, key=lambda decision: decision.weight.name)
    return PlannedLayer(
        layer_name(component, prefix),
        mediatype.AIMAGE_SAFETENSORS,
        encode_header(
            [entry for decision in members for entry in entries(decision)], _metadata(members)
        ),
        tuple(piece for decision in members for piece in _pieces(component, decision)),
        origins=origins,
    )


def _metadata(members: Sequence[WeightDecision]) -> dict[str, str]:
    # stated for the blob if there is one kind, else for each tensor
    found = {decision.weight.name: decision.result for decision in members if decision.result}
    kinds = set(found.values())
    if len(kinds) == 1:
        return kinds.pop().metadata()
    return {
        f"{name}.{key}": value
        for name, quantization in found.items()
        for key, value in quantization.metadata().items()
    }
