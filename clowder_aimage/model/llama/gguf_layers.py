"""The layers of an AImage that llama.cpp uses, as files that it can map.

The names are those of the dialects (dialect/ollama.py, dialect/docker.py), or of the files that the
AImage was created from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats.gguf import PART
from clowder_aimage.formats.gguf_header import GgufHeader, GgufTensor, read_header
from clowder_aimage.formats.model_tree import naming
from clowder_aimage.model.llama.temporary_directory import create_temporary_directory
from clowder_aimage.oci import mediatype, read_json

JINJA = ("chat_template.jinja", "model/chat_template.jinja")
PARAMS, SYSTEM, MESSAGES = "params.json", "system", "messages.json"
_MAX_TEXT = 1 << 20
_DRAFT = "draft"
_HINT = "use an AImage whose GGUF layers are not compressed"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A layer in the store, with its header."""

    layer: Layer
    path: Path
    header: GgufHeader

    @property
    def kind(self) -> object:
        return self.header.metadata.get("general.type")

    @property
    def tensors(self) -> Mapping[str, GgufTensor]:
        return {tensor.name: tensor for tensor in self.header.tensors}


@dataclass(frozen=True, slots=True)
class GgufLayers:
    """The files of a language model, and its texts.

    adapters: with their scales. left_out: names of layers that are not used: projectors of
    pictures, and draft models.
    """

    model: tuple[GgufFile, ...]
    adapters: tuple[tuple[GgufFile, float], ...] = ()
    left_out: tuple[str, ...] = ()
    template: str | None = None
    system: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.model[0].header.metadata

    @property
    def size(self) -> int:
        """The bytes of the model, without adapters."""
        return sum(file.layer.descriptor.size for file in self.model)

    @property
    def tensors(self) -> Mapping[str, GgufTensor]:
        return {name: tensor for file in self.model for name, tensor in file.tensors.items()}

    @contextmanager
    def link(self) -> Iterator[Path]:
        """Yield the path of the model, or of its first part.

        These are links in a directory until the end of the block, since llama.cpp derives the
        names of the others from the first.
        """
        if len(self.model) == 1:
            yield self.model[0].path
            return
        with create_temporary_directory() as directory:
            total = len(self.model)
            paths = [Path(directory, f"m-{n:05}-of-{total:05}.gguf") for n in range(1, total + 1)]
            for path, file in zip(paths, self.model, strict=True):
                path.symlink_to(file.path.resolve())
            yield paths[0]


def read_layers(files: BlobFiles, aimage: AImage) -> GgufLayers:
    """Find and read the layers.

    Raises:
        ModelError: There is not exactly one model, or a layer cannot be mapped.
        FormatError: A layer is invalid.
        AccessError: A blob is not in the store.
    """
    models: list[GgufFile] = []
    adapters: list[tuple[GgufFile, float]] = []
    left_out: list[str] = []
    for layer in sorted(aimage.layers, key=lambda layer: layer.name):
        kind, compression = mediatype.split_compression(layer.descriptor.media_type)
        if kind not in (mediatype.AIMAGE_GGUF, mediatype.AIMAGE_LORA):
            continue
        if compression:
            raise ModelError(f"{layer.name} is compressed and cannot be mapped", hint=_HINT)
        if kind == mediatype.AIMAGE_LORA and not layer.name.endswith(".gguf"):
            raise ModelError(f"the adapter {layer.name} is not GGUF, which llama.cpp requires")
        file = _read_file(files, layer)
        if file.kind == "adapter" or kind == mediatype.AIMAGE_LORA:
            adapters.append((file, _scale(aimage, layer.name)))
        elif _is_projector(file) or layer.name.rpartition("/")[2].startswith(_DRAFT):
            left_out.append(layer.name)
        else:
            models.append(file)
    _check_parts(models)
    text = _Texts(files, aimage)
    messages = text.load_json(MESSAGES, list, ())
    if not all(isinstance(message, dict) for message in messages):
        raise FormatError(f"{MESSAGES} has a message that is not an object")
    return GgufLayers(
        tuple(models),
        tuple(adapters),
        tuple(left_out),
        next((source for name in JINJA if (source := text.find(name)) is not None), None),
        text.find(SYSTEM),
        tuple(messages),
        text.load_json(PARAMS, dict, {}),
    )


def _read_file(files: BlobFiles, layer: Layer) -> GgufFile:
    path = files.find_path(layer.descriptor)
    with naming(Path(layer.name)), path.open("rb", buffering=1 << 16) as file:
        return GgufFile(layer, path, read_header(file, layer.descriptor.size, is_whole=True))


def _is_projector(file: GgufFile) -> bool:
    is_clip = file.header.metadata.get("general.architecture") == "clip"
    return is_clip or file.kind == "mmproj"


def _scale(aimage: AImage, name: str) -> float:
    """Return the strength of an adapter ``adapters/<name>/...`` by the config, 1 without one."""
    parts = name.split("/")
    chosen = aimage.properties.get("loras")
    if len(parts) < 3 or parts[0] != "adapters" or chosen is None:
        return 1.0
    strengths = {lora["adapter"]: float(lora["strength"]) for lora in chosen}
    return strengths.get(parts[1], 0.0)


def _check_parts(models: Sequence[GgufFile]) -> None:
    """Check that the files are one model, whole and in order. Raises ModelError, FormatError."""
    names = ", ".join(file.layer.name for file in models[:5])
    if not models:
        raise ModelError("the AImage contains no GGUF model")
    stems = {match["stem"] for file in models if (match := PART.fullmatch(file.layer.name))}
    counts = [file.header.metadata.get("split.count", 1) for file in models]
    if len(models) > 1 and (len(stems) != 1 or set(counts) == {1}):
        raise ModelError(f"the AImage contains several GGUF models: {names}")
    numbers = [file.header.metadata.get("split.no", 0) for file in models]
    if set(counts) - {len(models)} or numbers != list(range(len(models))):
        raise FormatError(f"the parts of the model do not belong together: {names}")
    tensors = [tensor.name for file in models for tensor in file.header.tensors]
    if len(set(tensors)) < len(tensors):
        raise FormatError("a tensor is in two parts of the model")


class _Texts:
    """The small layers of an AImage."""

    def __init__(self, files: BlobFiles, aimage: AImage) -> None:
        self._files, self._aimage = files, aimage

    def find(self, name: str) -> str | None:
        """Return the text of a layer, or None. Raises FormatError."""
        data = self._read(name)
        try:
            return None if data is None else data.decode()
        except UnicodeDecodeError:
            raise FormatError(f"{name} is not UTF-8") from None

    def load_json(self, name: str, kind: Callable[..., Any], default: Any) -> Any:
        """Return a layer in JSON, or the default. Raises FormatError."""
        data = self._read(name)
        value = default if data is None else read_json(data, name)
        if data is not None and not isinstance(value, type(kind())):
            raise FormatError(f"{name} is not a JSON {kind.__name__}")
        return value

    def _read(self, name: str) -> bytes | None:
        layer = self._aimage.find(name)
        if layer is None:
            return None
        if layer.descriptor.size > _MAX_TEXT:
            raise FormatError(f"{name} has {layer.descriptor.size} bytes; the limit is {_MAX_TEXT}")
        return self._files.find_path(layer.descriptor).read_bytes()
