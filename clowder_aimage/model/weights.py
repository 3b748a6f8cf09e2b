"""The weights of one component, from blobs into a module.

Every blob's header is checked against its layer and the module before the first weight is read.
Then ``mx.load`` reads 64 blobs at a time: it keeps a file open for every array until that array
is evaluated, and a process may have as few as 256 open files. Casting happens inside the chunk,
so the peak is the model plus one chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from clowder_aimage.content.store import ContentStore
from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.model.backend import mx, tree_flatten
from clowder_aimage.model.file import read_object
from clowder_aimage.tensor import TensorInfo, read_header

CHUNK = 64  # blobs
FLOATS = ("F32", "F16", "BF16")
T = TypeVar("T")


class Module(Protocol):
    """A network that takes weights: an ``nn.Module`` that knows the names of its checkpoint."""

    def parameters(self) -> Any: ...

    def load_weights(self, file_or_weights: Any, strict: bool = True) -> Any: ...

    def sanitize(self, name: str) -> str:
        """A tensor name as the name of a parameter here."""
        ...


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor to be read: whose parameter, from which file, under which key."""

    name: str
    parameter: str
    path: Path
    key: str


class ModelWeights:
    """The tensors and the configuration of one component of an AImage, in a store."""

    def __init__(
        self,
        store: ContentStore,
        component: str,
        layers: Mapping[str, Layer],
        config: Mapping[str, Any],
    ) -> None:
        self._store = store
        self._layers = layers
        self.component = component
        self.config = config

    @classmethod
    def open(cls, store: ContentStore, aimage: AImage, component: str) -> ModelWeights:
        """Find the tensors of ``component`` and read its ``config.json``; no weight is read.

        Raises:
            ModelError: when the component has no configuration or no tensors.
        """
        config = read_object(store, aimage, f"{component}/config.json")
        prefix = f"{component}/"
        layers = {
            layer.name.removeprefix(prefix): layer
            for layer in aimage.component(component)
            if layer.is_tensor
        }
        if not layers:
            raise ModelError(f"the model has no tensors for {component}")
        return cls(store, component, layers, config)

    def keys(self) -> tuple[str, ...]:
        """The names of the tensors, without the component."""
        return tuple(self._layers)

    def quantization(self, name: str) -> None:
        """How the tensor ``name`` is quantised: today none is."""

    def apply(
        self,
        module: Module,
        *,
        skip: Callable[[str], bool] = lambda _: False,
        dtype: mx.Dtype | None = None,
    ) -> tuple[str, ...]:
        """Load every tensor but the skipped ones into ``module``, strictly, and evaluate.

        ``dtype`` is the type to compute in; None keeps what is stored. Returns the names of the
        tensors that were skipped on purpose. Convolutions turn from torch's layout (out, in,
        height, width) to MLX's (out, height, width, in).

        Raises:
            ModelError: for a missing or unexpected tensor, a wrong shape or dtype, or a blob
                that is not what its layer says. Nothing has been loaded then.
        """
        parameters = dict(tree_flatten(module.parameters()))
        shapes = {name: value.shape for name, value in parameters.items()}
        skipped = tuple(name for name in self._layers if skip(name))
        wanted = {name: module.sanitize(name) for name in self._layers if name not in skipped}
        self._match_names(wanted, set(shapes))
        tensors = [self._check(name, own, shapes[own]) for name, own in wanted.items()]
        weights: list[tuple[str, mx.array]] = []
        for chunk in _chunks(tensors, CHUNK):
            loaded = [(tensor.parameter, _load(tensor, dtype)) for tensor in chunk]
            mx.eval([value for _, value in loaded])
            weights += loaded
        module.load_weights(weights, strict=True)
        return skipped

    def _match_names(self, wanted: Mapping[str, str], parameters: set[str]) -> None:
        given = Counter(wanted.values())
        if twice := sorted(own for own, count in given.items() if count > 1):
            raise ModelError(f"{self.component}: two tensors for {_some(twice)}")
        if missing := sorted(parameters - set(given)):
            raise ModelError(f"{self.component}: missing tensors {_some(missing)}")
        if extra := sorted(name for name, own in wanted.items() if own not in parameters):
            raise ModelError(
                f"{self.component}: unexpected tensors {_some(extra)}",
                hint="the weights are of another model than the configuration",
            )

    def _check(self, name: str, parameter: str, shape: tuple[int, ...]) -> _Tensor:
        """Hold the blob's header next to the layer and the module."""
        layer = self._layers[name]
        path = self._store.path(layer.descriptor)
        try:
            with self._store.open(layer.descriptor) as file:
                header = read_header(file, layer.descriptor.size)
        except FormatError as error:
            raise ModelError(f"{layer.name}: {error}") from error
        key = self._key(name, header.tensors)
        info = header.tensors[key]
        if layer.dtype not in (None, info.dtype) or layer.shape not in (None, info.shape):
            raise ModelError(
                f"{layer.name}: the blob holds {info.dtype} {list(info.shape)}, "
                f"its layer promises {layer.dtype} {list(layer.shape or ())}"
            )
        if info.dtype not in FLOATS:
            raise ModelError(f"{layer.name}: weights of type {info.dtype} are not supported")
        if (expected := _torch_shape(shape)) != info.shape:
            raise ModelError(
                f"{layer.name}: the configuration asks for shape {list(expected)}, "
                f"the tensor has {list(info.shape)}"
            )
        return _Tensor(name, parameter, path, key)

    def _key(self, name: str, tensors: Mapping[str, TensorInfo]) -> str:
        for key in (name, f"{self.component}/{name}", "data"):
            if key in tensors:
                return key
        raise ModelError(
            f"{self.component}/{name}: the blob holds {_some(sorted(tensors))} instead"
        )


def _load(tensor: _Tensor, dtype: mx.Dtype | None) -> mx.array:
    """A lazy array in MLX's layout and the wanted type."""
    try:
        arrays: Any = mx.load(str(tensor.path), format="safetensors")
    except RuntimeError as error:
        raise ModelError(f"{tensor.name}: cannot be loaded: {error}") from error
    value: mx.array = arrays[tensor.key]
    if value.ndim == 4:
        value = value.transpose(0, 2, 3, 1)
    return value if dtype is None else value.astype(dtype)


def _torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an MLX parameter as a checkpoint has it."""
    if len(shape) != 4:
        return tuple(shape)
    out_channels, height, width, in_channels = shape
    return (out_channels, in_channels, height, width)


def _chunks(items: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _some(names: list[str], limit: int = 8) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(name[:120] for name in names[:limit]) + more
