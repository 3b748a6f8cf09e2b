"""The artifact itself, independent of its manifests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from clowder_aimage.document.schema import validate
from clowder_aimage.errors import FormatError, NotFoundError
from clowder_aimage.oci import Descriptor, Digest, mediatype, read_json
from clowder_aimage.oci.descriptor import MAX_SIZE

# Characters of a cached shape: a stranger's text must not fill the cache.
_SHORT = 64
# Segments of a name: extracting it makes as many directories.
_MAX_SEGMENTS = 32
# The component of adapters that are packed with a model, and what may differ beside them.
_ADAPTERS = "adapters"
_OF_VARIANT = frozenset(
    (
        *("adapters", "loras", "defaults", "triggerWords", "size", "variant"),
        *("name", "description", "license", "permissions", "created", "annotations"),
    )
)
_T = TypeVar("_T")
_FILE_TYPES = (mediatype.AIMAGE_FILE, mediatype.AIMAGE_TRANSFORMERS)


@dataclass(frozen=True, slots=True)
class Layer:
    """One blob of an AImage.

    ``descriptor`` has Clowder's media type and no other fields; ``name`` is a path
    (``text_encoder/model.norm.weight``, ``vae/config.json``); ``dtype`` (as in safetensors) and
    ``shape`` are set for a tensor. ``content`` is the decompressed content of a compressed layer
    (with a media type that ends in ``+gzip`` or ``+zstd``), if the manifest has it.
    """

    descriptor: Descriptor
    name: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    content: Descriptor | None = None

    @property
    def component(self) -> str:
        """The first part of the name, or an empty string for a top-level file."""
        head, slash, _ = self.name.partition("/")
        return head if slash else ""

    @property
    def is_tensor(self) -> bool:
        return self.descriptor.media_type == mediatype.AIMAGE_SAFETENSORS

    @property
    def is_shard(self) -> bool:
        """True for a complete file of tensors, as other tools pack them."""
        return self.name.endswith(".safetensors") and self.descriptor.media_type in _FILE_TYPES


@dataclass(frozen=True, slots=True)
class AImage:
    """A model: its AImage config as bytes (schemas/aimage-config.schema.json), and its layers.

    ``subject`` is the manifest that it refers to: for an adapter, its base model.
    """

    config: bytes
    layers: tuple[Layer, ...]
    subject: Descriptor | None = None
    _derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def algorithm(self) -> str:
        """The algorithm of the layers' digests, and of the config's."""
        return self.layers[0].descriptor.digest.algorithm if self.layers else "sha256"

    def get_layer(self, name: str) -> Layer:
        """Return the layer called ``name``. Raises NotFoundError."""
        match = self.find(name)
        if match is None:
            raise NotFoundError(f"{name} not found in the AImage")
        return match

    def find(self, name: str) -> Layer | None:
        """Return the layer called ``name``, or None."""
        by_name = self._derive_once(
            "names", lambda: {layer.name: layer for layer in reversed(self.layers)}
        )
        return by_name.get(name)

    def list_layers(self, name: str) -> tuple[Layer, ...]:
        """Return the layers of a component, in the manifest's order."""
        return tuple(self._derive_once("components", self._group_by_component).get(name, ()))

    def _group_by_component(self) -> dict[str, list[Layer]]:
        components: dict[str, list[Layer]] = {}
        for layer in self.layers:
            components.setdefault(layer.component, []).append(layer)
        return components

    @property
    def config_text(self) -> str:
        """The config as text inside another document. Raises FormatError."""
        try:
            return self.config.decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"the AImage config is not UTF-8: {error}") from None

    @property
    def properties(self) -> Mapping[str, Any]:
        """The config, parsed once; do not change it. Raises FormatError."""
        return self._derive_once("properties", lambda: parse_config(self.config))

    @property
    def base_digest(self) -> Digest:
        """The digest of the model without the adapters that are packed with it.

        AImages of one digest have the same networks: they differ in adapters, defaults of requests
        and texts for readers. Raises FormatError.
        """
        return self._derive_once("base", self._compute_base_digest)

    def _compute_base_digest(self) -> Digest:
        layers = sorted(
            (layer.name, layer.descriptor.media_type, str(layer.descriptor.digest))
            for layer in self.layers
            if layer.component != _ADAPTERS and (layer.component or layer.name.endswith(".json"))
        )
        properties = {
            name: value for name, value in self.properties.items() if name not in _OF_VARIANT
        }
        return Digest.of(json.dumps([layers, properties], sort_keys=True).encode())

    def validate(self) -> None:
        """Check the config, once if it is valid. Raises FormatError."""
        self._derive_once("valid", lambda: validate("aimage-config", self.properties))

    def _derive_once(self, key: str, derive: Callable[[], _T]) -> _T:
        if key not in self._derived:
            self._derived[key] = derive()
        value: _T = self._derived[key]
        return value


def parse_config(config: bytes) -> dict[str, Any]:
    """Return the properties in an AImage config. Raises FormatError."""
    value = read_json(config, "the AImage config")
    if not isinstance(value, dict):
        raise FormatError("the AImage config must be a JSON object")
    return value


def check_name(name: str) -> str:
    """Return a layer's name if it is a safe file name. Raises FormatError.

    A safe name is relative, not empty, printable (no control characters or marks that change the
    direction of text), has no ``..``, and has at most 1024 characters in 32 parts.
    """
    segments = name.split("/")
    if (
        not name
        or len(name) > 1024
        or len(segments) > _MAX_SEGMENTS
        or any(segment in ("", ".", "..") for segment in segments)
        or "\\" in name
        or not name.isprintable()
    ):
        raise FormatError(f"invalid layer name: {name[:100]!r}")
    return name


def check_names(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return the layers, if all names are valid and different. Raises FormatError."""
    names: set[str] = set()
    for layer in layers:
        if check_name(layer.name) in names:
            raise FormatError(f"duplicate layer name: {layer.name[:100]!r}")
        names.add(layer.name)
    return layers


def parse_shape(value: object) -> tuple[int, ...] | None:
    """Parse a shape from JSON (a list of numbers) or an annotation (that list as text)."""
    if value is None:
        return None
    if isinstance(value, str):
        return (_cached_shape if len(value) <= _SHORT else _read_shape)(value)
    return _check_shape(value)


def _read_shape(text: str) -> tuple[int, ...]:
    try:
        return _check_shape(read_json(text.encode(), "the shape"))
    except (FormatError, UnicodeEncodeError):
        raise FormatError(f"invalid shape: {text[:100]!r}") from None


# The layers of a model repeat a few shapes.
_cached_shape = lru_cache(256)(_read_shape)


def _check_shape(shape: object) -> tuple[int, ...]:
    if isinstance(shape, list) and all(type(n) is int and 0 <= n <= MAX_SIZE for n in shape):
        return tuple(shape)
    raise FormatError(f"invalid shape: {shape!r:.100}")


def parse_dtype(value: object) -> str | None:
    """Parse a dtype's name from JSON or an annotation."""
    if value is None or isinstance(value, str):
        return value
    raise FormatError(f"invalid dtype: {value!r:.100}")


def to_named(layer: Layer, media_type: str) -> dict[str, Any]:
    """Return a descriptor with the fields ``name``, ``dtype`` and ``shape``, as ollama's."""
    plain = layer.descriptor
    value = Descriptor(media_type, plain.digest, plain.size).to_json()
    value["name"] = layer.name
    if layer.dtype is not None:
        value["dtype"] = layer.dtype
    if layer.shape is not None:
        value["shape"] = list(layer.shape)
    if layer.content is not None:
        value["content"] = {"digest": str(layer.content.digest), "size": layer.content.size}
    return value


def from_named(descriptor: Descriptor, media_type: str) -> Layer:
    """Return the layer of a descriptor with the fields of ``to_named``. Raises FormatError."""
    extra = descriptor.extra
    name = extra.get("name")
    if not isinstance(name, str):
        raise FormatError(f"layer {descriptor.digest} has no name")
    plain = Descriptor(media_type, descriptor.digest, descriptor.size)
    content = extra.get("content")
    if content is not None and not isinstance(content, dict):
        raise FormatError(f"invalid content of a compressed layer: {content!r:.100}")
    return Layer(
        plain,
        name,
        parse_dtype(extra.get("dtype")),
        parse_shape(extra.get("shape")),
        parse_content(media_type, content.get("digest"), content.get("size")) if content else None,
    )


def parse_content(media_type: str, digest: object, size: object) -> Descriptor | None:
    """Return the descriptor of a compressed layer's content, or None. Raises FormatError."""
    if digest is None and size is None:
        return None
    plain, compression = mediatype.split_compression(media_type)
    text = str(size) if type(size) in (int, str) else ""
    is_size = text.isascii() and text.isdecimal() and len(text) < 18 and int(text) <= MAX_SIZE
    if not (compression and isinstance(digest, str) and is_size):
        raise FormatError(f"invalid content of a {media_type[:100]} layer: {digest!r:.100}")
    return Descriptor(plain, Digest.parse(digest), int(text))
