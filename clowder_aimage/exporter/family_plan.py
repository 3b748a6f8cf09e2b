"""Plan of an export of an image model in the layout of another tool.

An imported file is restored byte for byte, with its order and padding, if the tensors match its
header. The tensors of other files have the order of safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clowder_aimage.dialect import AImage, Layer
from clowder_aimage.document.strict_json import MAX_DOCUMENT_SIZE
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.exporter.family_file import FamilyTensor, build_tensors
from clowder_aimage.exporter.file_name import FileNames
from clowder_aimage.exporter.layer_store import LayerStore, is_gathered
from clowder_aimage.exporter.plan import MLX, ExportPlan, FileChunk
from clowder_aimage.family.image_family import QUANTIZED, TRANSFORMER, ImageFamily, LayoutFile
from clowder_aimage.formats.diffusers import MODEL_INDEX
from clowder_aimage.formats.family_model import SOURCE
from clowder_aimage.formats.model_tree import naming
from clowder_aimage.formats.stored_weights import group_weights, read_stored
from clowder_aimage.oci import Descriptor, mediatype, read_json
from clowder_aimage.tensor import DTYPE_BITS, Header, encode_header
from clowder_aimage.tensor.header import MAX_HEADER_SIZE, parse_header
from clowder_aimage.tensor.quantization_config import QuantizationConfig
from clowder_aimage.tensor.weight import Weight

_INDEX = "model.safetensors.index.json"
_FOLDERS = {"mlx": ("tokenizer/", "scheduler/"), "mflux": ("tokenizer/",)}
# Names of Z-Image-Turbo-MLX; its FP8 is int8.
_PRECISIONS = {"F16": "FP16"}
Tensors = Mapping[str, FamilyTensor]


class FamilyPlanner:
    """The planner of an export in ``layout``, one of LAYOUTS except diffusers."""

    def __init__(self, blobs: LayerStore, aimage: AImage, layout: str, family: ImageFamily) -> None:
        self._store = blobs
        self._aimage = aimage
        self._layout = layout
        self._family = family
        self._tensors = tuple(layer for layer in aimage.layers if is_gathered(layer))
        self._blobs: dict[Path, Descriptor] = {}
        self._generated: dict[str, tuple[bytes, int]] = {}
        self._chunks: dict[Descriptor, list[FileChunk]] = {}
        self._count = 0

    def plan(self) -> ExportPlan:
        """Return the plan.

        Raises:
            NotFoundError: A blob is not in the store.
            UsageError: The layout cannot express the model.
            FormatError, VerificationError: A blob is damaged or does not match its layer.
        """
        for layer in self._tensors:
            self._blobs[self._store.find_path(layer.descriptor)] = layer.descriptor
        gathered = replace(self._aimage, layers=self._tensors)
        weights = group_weights(read_stored(self._store, gathered, self._find_quantization))
        kinds = {
            w.quantization
            for component_weights in weights.values()
            for w in component_weights
            if w.quantization
        }
        if len(kinds) > 1:
            raise UsageError("the layout cannot express weights of several quantizations")
        bits = next((kind.type.bits for kind in kinds), None)
        whole_layers: list[Layer] = []
        for file in self._family.layouts[self._layout]:
            tensors = build_tensors(self._family, file, weights, self._layout in QUANTIZED)
            if not self._plan_restored(tensors, whole_layers):
                self._plan_files(file, tensors, bits)
        self._add_configs(weights, bits)
        folders = _FOLDERS.get(self._layout, ())
        whole_layers += [
            layer for layer in self._aimage.layers if layer.name.startswith(folders or "//")
        ]
        whole_layers += filter(self._is_document, self._aimage.layers)
        names = FileNames()
        for name in (*self._generated, *(layer.name for layer in whole_layers)):
            names.add_file(name)
        quantized = {TRANSFORMER: MLX} if bits else {}
        return ExportPlan(
            names, self._generated, self._chunks, whole_layers, (), (), self._count, quantized
        )

    def _is_document(self, layer: Layer) -> bool:
        """Return True for a licence, a card or another file beside the components."""
        is_file = layer.descriptor.media_type == mediatype.AIMAGE_FILE and not layer.component
        return is_file and layer.name not in (MODEL_INDEX, *self._generated)

    def _plan_restored(self, tensors: Tensors, whole_layers: list[Layer]) -> bool:
        """Plan the imported files with these tensors; return False if they are incomplete."""
        headers = [(layer, data, head) for layer, data, head in self._iter_headers(tensors)]
        names = [name for _, _, header in headers for name in header.tensors]
        needed = {name for name, tensor in tensors.items() if not tensor.is_extra}
        if len(names) != len(set(names)) or not needed <= set(names):
            return False
        for layer, data, header in headers:
            ordered = sorted(
                header.tensors, key=lambda tensor_name: header.tensors[tensor_name].start
            )
            self._place(_strip_source(layer), data, [tensors[name] for name in ordered])
        directories = {layer.name.rpartition("/")[0] for layer, _, _ in headers}
        for layer in self._aimage.list_layers(SOURCE):
            if layer.name.endswith(".json") and layer.name.rpartition("/")[0] in directories:
                whole_layers.append(replace(layer, name=_strip_source(layer)))
        return True

    def _iter_headers(self, tensors: Tensors) -> Iterator[tuple[Layer, bytes, Header]]:
        """Yield the headers of imported files with only tensors in ``tensors``."""
        for layer in self._aimage.list_layers(SOURCE):
            if layer.name.endswith(".json"):
                continue
            data = self._store.read(layer, MAX_HEADER_SIZE + 8)
            with naming(Path(layer.name)):
                header = parse_header(data[8:], None)
            matches = (
                name in tensors and (info.dtype, info.shape) == _get_kind(tensors[name])
                for name, info in header.tensors.items()
            )
            if all(matches):
                yield layer, data, header

    def _plan_files(self, file: LayoutFile, tensors: Tensors, bits: int | None) -> None:
        """Plan files of the tensors in the order of safetensors, without extras."""
        ordered = [tensor for tensor in tensors.values() if not tensor.is_extra]
        ordered.sort(key=lambda tensor: (-DTYPE_BITS[tensor.dtype], tensor.name))
        metadata = {"format": "mlx" if self._layout == "mlx" else "pt"}
        if not file.shard:
            self._place(file.name, _build_header(ordered, metadata), ordered)
            return
        metadata = {"quantization_level": str(bits)}
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(_iter_shards(ordered, file.shard)):
            name = f"{number}.safetensors"
            self._place(f"{file.name}/{name}", _build_header(shard, metadata), shard)
            weight_map |= dict.fromkeys((tensor.name for tensor in shard), name)
        self._add(f"{file.name}/{_INDEX}", {"metadata": metadata, "weight_map": weight_map})

    def _place(self, name: str, header: bytes, tensors: Sequence[FamilyTensor]) -> None:
        offset = len(header)
        for tensor in tensors:
            for chunk in tensor.chunks:
                source, size = chunk.source, chunk.stop - chunk.start
                order = (source.dtype, source.shape) if chunk.is_last else ("", ())
                file_chunk = FileChunk(source.offset + chunk.start, size, name, offset, *order)
                self._chunks.setdefault(self._blobs[source.path], []).append(file_chunk)
                offset += size
        self._generated[name] = (header, offset)
        self._count += len(tensors)

    def _add(self, name: str, value: Mapping[str, Any]) -> None:
        data = (json.dumps(value, indent=2) + "\n").encode()
        self._generated[name] = (data, len(data))

    def _add_configs(self, weights: Mapping[str, Sequence[Weight]], bits: int | None) -> None:
        pattern = self._family.configs.get(self._layout)
        if pattern is None:
            return
        for component in self._family.components:
            layer = self._aimage.get_layer(f"{component.name}/config.json")
            data = self._store.read(layer, MAX_DOCUMENT_SIZE)
            self._generated[pattern.format(component.name)] = (data, len(data))
        if self._layout == "mlx":
            config = self._read_object(f"{TRANSFORMER}/config.json")
            dtypes = {weight.dtype for weight in weights[TRANSFORMER]}
            precision = _PRECISIONS.get(next(iter(dtypes)), "Original")
            try:
                mlx_config = self._family.mlx_config(config, "FP8" if bits else precision)
            except (KeyError, TypeError) as error:
                raise FormatError(f"{TRANSFORMER}/config.json is invalid: {error}") from None
            self._add("config.json", mlx_config)

    def _find_quantization(self, component: str, name: str) -> tuple[str | None, int | None]:
        return QuantizationConfig(self._read_object(f"{component}/config.json"), {}).of(name)

    def _read_object(self, name: str) -> dict[str, Any]:
        layer = self._aimage.find(name)
        value = read_json(self._store.read(layer, MAX_DOCUMENT_SIZE), name) if layer else {}
        return value if isinstance(value, dict) else {}


def _strip_source(layer: Layer) -> str:
    return layer.name.removeprefix(f"{SOURCE}/")


def _get_kind(tensor: FamilyTensor) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def _build_header(tensors: Sequence[FamilyTensor], metadata: Mapping[str, str]) -> bytes:
    return encode_header(
        [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors], metadata
    )


def _iter_shards(tensors: Sequence[FamilyTensor], limit: int) -> Iterator[list[FamilyTensor]]:
    shard: list[FamilyTensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    yield shard
