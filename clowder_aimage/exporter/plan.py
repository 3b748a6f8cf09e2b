"""Plan of an export, from the manifest, the headers of tensors and the configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

from clowder_aimage.content.decompress import open_decompressed
from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect import AImage, Layer
from clowder_aimage.dialect.packing import is_packed, is_tar
from clowder_aimage.document.strict_json import MAX_DOCUMENT_SIZE
from clowder_aimage.errors import FormatError
from clowder_aimage.exporter.component_config import merge_quantization
from clowder_aimage.exporter.file_name import FileNames
from clowder_aimage.exporter.layer_store import LayerStore, is_gathered
from clowder_aimage.formats.family_model import EXTRA, SOURCE
from clowder_aimage.formats.inventory import clean_text
from clowder_aimage.formats.license_text import MAX_TEXT, identify_license, is_license
from clowder_aimage.formats.model_tree import CARD, build_card, name_license, naming
from clowder_aimage.formats.stored_weights import group_weights, read_stored
from clowder_aimage.formats.weight_file import (
    STEMS,
    WeightEntry,
    WeightFile,
    build_entries,
    build_index_file,
    is_modelopt,
    plan_weight_files,
)
from clowder_aimage.oci import Descriptor, mediatype, read_json
from clowder_aimage.tensor.header import MAX_HEADER_SIZE, parse_header
from clowder_aimage.tensor.quantization_config import QuantizationConfig
from clowder_aimage.tensor.weight import Weight

MLX, MODELOPT = "MLX", "ModelOpt"
# Adapters may be GGUF files too.
_GGUFS = (mediatype.AIMAGE_GGUF, mediatype.AIMAGE_LORA)
# Bytes of a config.
_MAX_CONFIG = MAX_DOCUMENT_SIZE
_CONFIG, _INDEX = "config.json", "model_index.json"
_CARDED = ("transformers", "lora", "onnx", "torchscript", "savedmodel", "gguf")


@dataclass(frozen=True, slots=True)
class FileChunk:
    """``nbytes`` bytes of a blob from ``start``, written at ``offset`` of the file ``name``.

    A convolution with a ``dtype`` and ``shape`` is written with its channels last.
    """

    start: int
    nbytes: int
    name: str
    offset: int
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A plan: ``generated`` maps files to their first bytes and final sizes.

    ``chunks`` are the other bytes of these files, by source blob. ``whole_layers`` are written
    unchanged, ``packed`` layers are decompressed to a file, ``tars`` are unpacked. ``quantized``
    has the form of the weights of quantized components.
    """

    names: FileNames
    generated: Mapping[str, tuple[bytes, int]]
    chunks: Mapping[Descriptor, Sequence[FileChunk]]
    whole_layers: Sequence[Layer]
    packed: Sequence[Layer]
    tars: Sequence[Layer]
    tensors: int = 0
    quantized: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Return the bytes to read from the store, before decompression."""
        layers = [*self.whole_layers, *self.packed, *self.tars]
        return sum(content.size for content in (*self.chunks, *(x.descriptor for x in layers)))

    @property
    def needed(self) -> int:
        """Return the minimal size of the directory in bytes."""
        packed = [layer.content or layer.descriptor for layer in (*self.packed, *self.tars)]
        return (
            sum(size for _, size in self.generated.values())
            + sum(layer.descriptor.size for layer in self.whole_layers)
            + sum(content.size for content in packed)
        )


class ExportPlanner:
    """The planner of an export; files of weights have at most ``shard`` bytes of tensors.

    No files are added unless ``is_ours``: another tool packed the AImage.
    """

    def __init__(self, blobs: LayerStore, aimage: AImage, shard: int, is_ours: bool) -> None:
        # Tensors and headers of other layouts are not part of the diffusers layout.
        if aimage.properties.get("family"):
            layers = tuple(x for x in aimage.layers if x.component not in (EXTRA, SOURCE))
            aimage = replace(aimage, layers=layers)
        self._store = blobs
        self._aimage = aimage
        self._shard = shard
        self._is_ours = is_ours
        self._objects: dict[str, dict[str, Any]] = {}
        self._tensors = tuple(layer for layer in aimage.layers if is_gathered(layer))
        self._generated: dict[str, tuple[bytes, int]] = {}
        self._chunks: dict[Descriptor, list[FileChunk]] = {}
        self._blobs: dict[Path, Descriptor] = {}
        self._quantized: dict[str, str] = {}

    def plan(self) -> ExportPlan:
        """Return the plan.

        Raises:
            NotFoundError: A blob is not in the store.
            FormatError, VerificationError: A blob is damaged or does not match its layer, or two
                files would have the same name.
            ModelError: The name of a quantized weight is valid in no supported form.
        """
        weights = self._read()
        replaced = set[str]()
        headers: dict[str, list[Layer]] = {}
        for layer in filter(_is_header, self._aimage.layers):
            headers.setdefault(layer.component, []).append(layer)
        for component, members in weights.items():
            component_headers = headers.get(component, [])
            if self._rebuild(component_headers, members):
                replaced.update(x.name for x in component_headers if not x.name.endswith(".json"))
            else:
                replaced.update(layer.name for layer in component_headers)
                self._gather(component, members)
            if (
                config := merge_quantization(
                    self._read_object(_join_name(component, _CONFIG)), members
                )
            ) is not None:
                name = _join_name(component, _CONFIG)
                self._generated[name] = (config, len(config))
                replaced.add(name)
        gathered = {layer.name for layer in self._tensors} | replaced
        files = [layer for layer in self._aimage.layers if layer.name not in gathered]
        tars = [layer for layer in files if is_tar(layer)]
        packed = [layer for layer in files if is_packed(layer)]
        whole_layers = [layer for layer in files if not is_tar(layer) and not is_packed(layer)]
        names = FileNames()
        for name in (*self._generated, *(layer.name for layer in (*whole_layers, *packed))):
            names.add_file(name)
        if self._is_ours and not tars and names.is_free(CARD):
            self._add_card(names, has_weights=bool(weights))
        count = sum(map(len, weights.values()))
        return ExportPlan(
            names, self._generated, self._chunks, whole_layers, packed, tars, count, self._quantized
        )

    def _read(self) -> dict[str, list[Weight]]:
        """Return the weights of each component, and record the blobs of their files."""
        for layer in self._tensors:
            self._blobs[self._store.find_path(layer.descriptor)] = layer.descriptor
        gathered = replace(self._aimage, layers=self._tensors)
        return group_weights(read_stored(self._store, gathered, self._find_quantization))

    def _gather(self, component: str, weights: Sequence[Weight]) -> None:
        stem = self._find_stem(component)
        tensors = [entry for weight in weights for entry in build_entries(component, weight)]
        files = plan_weight_files(stem, tensors, self._shard)
        for file in files:
            name = _join_name(component, file.name)
            self._generated[name] = (file.header, file.size)
            self._place(name, file)
        if (index := build_index_file(stem, files)) is not None:
            self._generated[_join_name(component, index[0])] = (index[1], len(index[1]))
        if any(weight.quantization for weight in weights):
            self._quantized[component] = MODELOPT if any(map(is_modelopt, weights)) else MLX

    def _rebuild(self, headers: Sequence[Layer], weights: Sequence[Weight]) -> bool:
        """Plan the weight files of these headers; return False if their tensors differ."""
        sources = {w.name: w.parts[0].tensor for w in weights if w.quantization is None}
        files = []
        for layer in headers:
            if layer.name.endswith(".json"):
                # An index is written unchanged.
                continue
            data = self._store.read(layer, MAX_HEADER_SIZE)
            entries = []
            with naming(Path(layer.name)):
                tensors = parse_header(data[8:], None).tensors
            for name, info in sorted(tensors.items(), key=lambda pair: pair[1].start):
                source = sources.pop(name, None)
                if source is None or (source.dtype, source.shape) != (info.dtype, info.shape):
                    return False
                entries.append(WeightEntry(name, info.dtype, info.shape, source))
            files.append(WeightFile(layer.name, data, tuple(entries)))
        if not files or sources or any(weight.quantization for weight in weights):
            return False
        for file in files:
            self._generated[file.name] = (file.header, file.size)
            self._place(file.name, file)
        return True

    def _place(self, name: str, file: WeightFile) -> None:
        offset = len(file.header)
        for entry in file.entries:
            source = entry.source
            chunk = FileChunk(source.offset, source.nbytes, name, offset)
            self._chunks.setdefault(self._blobs[source.path], []).append(chunk)
            offset += entry.nbytes

    def _add_card(self, names: FileNames, *, has_weights: bool) -> None:
        """Add a model card with the licence, if ``create`` reads cards and no file states it."""
        properties = self._aimage.properties
        content = build_card(properties.get("license"))
        if content is None or not (has_weights or properties.get("format") in _CARDED):
            return
        ggufs = (x.descriptor for x in self._aimage.layers if x.descriptor.media_type in _GGUFS)
        is_gguf, license_ = properties.get("format") == "gguf", properties["license"]
        if any(self._is_license(layer, license_) for layer in self._aimage.layers):
            return
        if not is_gguf or not any(_has_license(self._store, gguf, license_) for gguf in ggufs):
            self._generated[CARD] = (content, len(content))
            names.add_file(CARD)

    def _is_license(self, layer: Layer, license_: str) -> bool:
        """Return True for the text of this licence."""
        if not is_license(layer.name):
            return False
        with open_decompressed(self._store, layer.descriptor, layer.content) as file:
            return identify_license(BufferedReader(file).read(MAX_TEXT)) == license_

    def _find_stem(self, component: str) -> str:
        """Return the stem of weight files of a component's library.

        The library is that in the AImage config, the pipeline's index, or the component's config.
        """
        if not component:
            is_diffusers = "_class_name" in self._read_object(_CONFIG)
            return STEMS["diffusers" if is_diffusers else "transformers"]
        components = self._aimage.properties.get("components")
        entry = components.get(component) if isinstance(components, dict) else None
        library = entry.get("library") if isinstance(entry, dict) else None
        if not library:
            class_entry = self._read_object(_INDEX).get(component)
            library = class_entry[0] if isinstance(class_entry, list) and class_entry else None
        if not library and "_class_name" in self._read_object(_join_name(component, _CONFIG)):
            library = "diffusers"
        return STEMS.get(str(library), STEMS["transformers"])

    def _find_quantization(self, component: str, name: str) -> tuple[str | None, int | None]:
        config = self._read_object(_join_name(component, _CONFIG))
        return QuantizationConfig(config, self._read_object(_INDEX)).of(name)

    def _read_object(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the AImage; an empty object if it is missing or too large."""
        if name not in self._objects:
            layer = self._aimage.find(name)
            is_small = layer is not None and layer.descriptor.size <= _MAX_CONFIG
            self._objects[name] = self._parse(layer) if layer and is_small else {}
        return self._objects[name]

    def _parse(self, layer: Layer) -> dict[str, Any]:
        value = read_json(self._store.read(layer, _MAX_CONFIG), layer.name)
        if not isinstance(value, dict):
            raise FormatError(f"{layer.name} is not a JSON object")
        return value


def _is_header(layer: Layer) -> bool:
    plain, _ = mediatype.split_compression(layer.descriptor.media_type)
    return plain == mediatype.AIMAGE_HEADER


def _has_license(store: BlobFiles, content: Descriptor, license_: str) -> bool:
    from clowder_aimage.formats.gguf_header import read_header

    try:
        with store.find_path(content).open("rb") as file:
            metadata = read_header(file, content.size).metadata
    except (FormatError, OSError):
        # It is not a GGUF file: its readers report that.
        return False
    stated, name = (clean_text(metadata.get(f"general.license{key}")) for key in ("", ".name"))
    return name_license(stated, name) == license_


def _join_name(component: str, name: str) -> str:
    return f"{component}/{name}" if component else name
