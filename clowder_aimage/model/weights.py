"""The weights of one component, from blobs: in a module, as arrays, or for another runtime.

    weights = ModelWeights.open(store, aimage, "text_encoder")
    weights.load(mx.bfloat16)
    array = weights["model.layers.0.mlp.down_proj.weight"]

A blob's header is checked against its layer before its weights are read; ``check`` checks all
headers and the module's shapes. The store may still be fetching the blobs: ``apply`` reads them in
the order of the layers, as they arrive. MLX is imported only by methods that use it, on one
thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.model import tensor_view
from clowder_aimage.model.catalogue import Catalogue
from clowder_aimage.model.model_file import find_object, read_object
from clowder_aimage.model.parameter_names import FLOATS
from clowder_aimage.model.stored_tensor import StoredTensor
from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.quantization_config import QuantizationConfig

if TYPE_CHECKING:
    from clowder_aimage.model.apply import ModuleParameter
    from clowder_aimage.model.array import Value
    from clowder_aimage.model.backend import mx


class ModelWeights:
    """The tensors and the configuration of one component of an AImage, in a store."""

    def __init__(
        self,
        store: BlobFiles,
        component: str,
        layers: Mapping[str, Layer],
        config: Mapping[str, Any],
        index: Mapping[str, Any],
    ) -> None:
        self._catalogue = Catalogue(store, component, layers, QuantizationConfig(config, index))
        self._loaded: dict[str, Value] = {}
        self._dtype: mx.Dtype | None = None
        self.component = component
        self.config = config

    @classmethod
    def open(
        cls, store: BlobFiles, aimage: AImage, component: str = "", *, has_config: bool = True
    ) -> ModelWeights:
        """Find the tensors of ``component`` and read its ``config.json``; no weight is read.

        Language models have no components: their files are at the top level, with the component "".
        Files of whole safetensors from other packaging tools are read as well. ``has_config``
        requires a configuration; without one it is empty.

        Raises:
            ModelError: The component has no configuration or no tensors.
        """
        prefix = f"{component}/" if component else ""
        read = read_object if has_config else find_object
        config = read(store, aimage, f"{prefix}config.json") or {}
        layers = {
            layer.name.removeprefix(prefix): layer
            for layer in aimage.list_layers(component)
            if layer.is_tensor or layer.is_shard
        }
        if not layers:
            raise ModelError(f"no tensors found for {component or 'the model'}")
        index = find_object(store, aimage, "model_index.json") or {}
        return cls(store, component, layers, config, index)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the tensors, without the component. Raises FormatError.

        Only blobs that may be groups, or codes with separate scales, are opened.
        """
        return self._catalogue.list_names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def get_quantization(self, name: str) -> Quantization | None:
        """Return the quantization of a tensor, or None. Raises NotFoundError, FormatError."""
        return self._catalogue.find(name).quantization

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor ``name``, dequantized. Raises as ``quantization`` does."""
        return self._catalogue.find(name).shape

    def get_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors. Raises as ``get_shape_and_dtype``."""
        return {name: self.get_shape_and_dtype(name)[0] for name in self.keys()}

    def get_shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], str | None]:
        """Return the shape of a tensor, dequantized, and its type, None if it is quantized.

        For an arriving blob, both are from its layer's metadata. Raises as ``quantization``.
        """
        if (layer := self._catalogue.find_arriving(name)) is not None:
            return layer.shape or (), layer.dtype if layer.dtype in FLOATS else None
        tensor = self._catalogue.find(name)
        return tensor.shape, None if tensor.quantization is not None else tensor.dtype

    def get_code_type(self, name: str) -> str | None:
        """Return the type of a tensor's codes by name, None if it has none.

        Raises as ``get_shape_and_dtype``.
        """
        if (layer := self._catalogue.find_arriving(name)) is not None:
            return None if layer.dtype in FLOATS else layer.dtype
        quantization = self._catalogue.find(name).quantization
        return None if quantization is None else quantization.type.name

    # -- MLX

    def load(self, dtype: mx.Dtype | None = None, *, keep_quantized: bool | None = None) -> None:
        """Read all tensors, for access by ``weights[name]``, with floats in ``dtype``.

        ``dtype`` None leaves them unchanged. ``keep_quantized`` None selects the faster form:
        codes on a GPU, values on a CPU.

        Raises:
            FormatError: A blob does not match its layer; nothing is loaded then.
            ModelError: MLX does not support a type.
        """
        self._loaded = dict(self.read(dtype, keep_quantized=keep_quantized))
        self._dtype = dtype

    def read(
        self, dtype: mx.Dtype | None = None, *, keep_quantized: bool | None = None
    ) -> Iterator[tuple[str, Value]]:
        """Yield all tensors by name, as ``load`` reads them. Raises as ``load`` does."""
        from clowder_aimage.model.array import read_arrays

        tensors = (self._catalogue.find(name) for name in self._catalogue.list_names())
        values = read_arrays(tensors, dtype, keep_quantized=_keeps(keep_quantized))
        yield from ((tensor.name, value) for tensor, value in values)

    def __getitem__(self, name: str) -> mx.array:
        """Return the tensor ``name``, loaded or read now. Raises as ``load``, and NotFoundError.

        Quantized tensors are dequantized at each call.
        """
        from clowder_aimage.model.array import read_arrays
        from clowder_aimage.model.backend import mx

        value = self._loaded.get(name)
        if value is None:
            tensor = self._catalogue.find(name)
            ((_, value),) = read_arrays([tensor], None, keep_quantized=False)
        return value if isinstance(value, mx.array) else value.dequantize(self._dtype)

    def release(self) -> None:
        """Release the tensors that ``load`` has read."""
        self._loaded = {}

    def apply(
        self,
        module: Any,
        *,
        skip: Callable[[str], bool] = lambda _: False,
        dtype: mx.Dtype | None = None,
        keep_quantized: bool | None = None,
    ) -> tuple[str, ...]:
        """Load every tensor except the skipped ones into ``module``, strictly, and evaluate it.

        ``module`` is an ``nn.Module`` with ``sanitize``: from a tensor's name to its parameter's.

        ``dtype`` is the compute type; None leaves weights unchanged. With ``keep_quantized``
        layers with codes are replaced by quantized ones; None does so only on a GPU, because a CPU
        computes slowly and inexactly with codes. Returns the names of the tensors that were
        skipped.

        Raises:
            ModelError: A tensor is missing or unexpected, or has the wrong shape or dtype.
            FormatError: A blob does not match its layer, or is quantized but not supported by the
                module. Nothing is loaded in either case.
        """
        from clowder_aimage.model.apply import load_into

        target, parameters, skipped = self._match(module, skip)
        find, keeps = self._catalogue.find, _keeps(keep_quantized)
        load_into(target, parameters, find, dtype, keep_quantized=keeps)
        return skipped

    def check(
        self,
        module: Any,
        *,
        skip: Callable[[str], bool] = lambda _: False,
        dtype: mx.Dtype | None = None,
        keep_quantized: bool | None = None,
    ) -> tuple[int, tuple[str, ...]]:
        """Check all that ``apply`` checks, except values, and raise the same errors.

        A blob that is still being fetched is represented by its layer's metadata. Returns the
        bytes that the module would take, and the names of skipped tensors.
        """
        target, parameters, skipped = self._match(module, skip)
        has_codes = _keeps(keep_quantized)
        size = 0
        for name, parameter in parameters.items():
            if (layer := self._catalogue.find_arriving(name)) is not None:
                shape, nbytes = layer.shape or (), layer.descriptor.size
                is_quantized = layer.dtype not in FLOATS
                target.check_shape(name, shape, parameter)
            else:
                target.check(tensor := self._catalogue.find(name), parameter)
                shape, nbytes = tensor.shape, tensor.nbytes
                is_quantized = tensor.quantization is not None
            if dtype is None or (has_codes and is_quantized):
                size += nbytes
            else:
                size += math.prod(shape) * dtype.size
        return size, skipped

    def _match(
        self, module: Any, skip: Callable[[str], bool]
    ) -> tuple[ModuleParameter, dict[str, str], tuple[str, ...]]:
        from clowder_aimage.model.apply import ModuleParameter

        names = self._catalogue.list_names()
        skipped = tuple(name for name in names if skip(name))
        target = ModuleParameter.of(self.component, module)
        left_out = set(skipped)
        return target, target.match(name for name in names if name not in left_out), skipped

    # -- other runtimes

    def find(self, name: str) -> StoredTensor:
        """Return the location of the tensor ``name``, once its blob is there.

        Raises NotFoundError: it does not exist; FormatError: its blob is invalid.
        """
        return self._catalogue.find(name)

    def read_numpy(self, name: str) -> tensor_view.Array:
        """Return the tensor ``name``, read-only: a view of the blob, or float32.

        Quantized tensors, and types that numpy lacks (BF16, 8-bit floats), are float32.

        Raises:
            NotFoundError: It does not exist.
            FormatError: Its blob does not match its layer.
            ModelError: Its type is unsupported.
        """
        return tensor_view.read_numpy_tensor(self._catalogue.find(name))

    def read_torch(self, name: str) -> Any:
        """Return the tensor ``name`` as a ``torch.Tensor`` over the blob; float32 if quantized.

        Raises as ``read_numpy`` does, and ModelError without PyTorch.
        """
        return tensor_view.read_torch_tensor(self._catalogue.find(name))

    def read_parts(self, name: str) -> dict[str, tensor_view.Array]:
        """Return the stored arrays of the quantized tensor ``name``, by part.

        Codes have the key "", the others ".scale", ".bias" and ".global_scale" if they exist.

        Raises:
            FormatError: It is not quantized; and as ``read_numpy`` does.
        """
        tensor = self._catalogue.find(name)
        if tensor.quantization is None:
            raise FormatError(f"{name[:200]} is not quantized: it is {tensor.dtype}")
        ranges = {"": tensor.values, **tensor.parts}
        return {
            suffix: tensor_view.read_numpy_range(tensor_range)
            for suffix, tensor_range in ranges.items()
        }


def _keeps(requested: bool | None) -> bool:
    from clowder_aimage.model.backend import is_on_gpu

    return is_on_gpu() if requested is None else requested
