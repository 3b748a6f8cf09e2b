"""Loading of weights into a module, after a check of all names, shapes and kinds.

Convolutions: from torch's layout (out, in, height, width) to MLX's (out, height, width, in).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.model.array import read_arrays
from clowder_aimage.model.backend import Embedding, Linear, mx, tree_flatten
from clowder_aimage.model.parameter_names import FLOATS, check_shape, match_tensors
from clowder_aimage.model.quantized import QuantizedArray, build_quantized_layer
from clowder_aimage.model.stored_tensor import StoredTensor

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class ModuleParameter:
    """The parameters of a module: the shape of each, by name."""

    component: str
    module: Any
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, component: str, module: Any) -> ModuleParameter:
        parameters = dict(tree_flatten(module.parameters()))
        return cls(component, module, {name: value.shape for name, value in parameters.items()})

    def match(self, names: Iterable[str]) -> dict[str, str]:
        """Map the names of all tensors to those of parameters, one to one.

        Raises:
            ModelError: A tensor is missing, unexpected, or duplicated.
        """
        return match_tensors(self.component, self.module.sanitize, self.shapes, names)

    def check_shape(self, name: str, shape: tuple[int, ...], parameter: str) -> None:
        """Check the shape of the tensor ``name`` against its parameter. Raises ModelError."""
        check_shape(self.component, name, shape, _to_torch_shape(self.shapes[parameter]))

    def check(self, tensor: StoredTensor, parameter: str) -> None:
        """Check a tensor against its parameter.

        Raises:
            FormatError: It is quantized, and its layer is neither linear nor an embedding.
            ModelError: Its dtype or shape is unsupported.
        """
        name = f"{self.component}/{tensor.name}"
        if tensor.quantization is not None:
            owner = self.find_owner(parameter)
            if not parameter.endswith(_WEIGHT) or not isinstance(owner, (Linear, Embedding)):
                raise FormatError(
                    f"{name}: {type(owner).__name__} does not support {tensor.dtype} weights",
                    hint="only linear layers and embeddings can be quantized",
                )
        elif tensor.dtype not in FLOATS:
            raise ModelError(f"{name}: weights of type {tensor.dtype} are not supported")
        self.check_shape(tensor.name, tensor.shape, parameter)

    def find_owner(self, parameter: str) -> Any:
        """Return the layer of a parameter."""
        layer = self.module
        for step in parameter.split(".")[:-1]:
            layer = layer[int(step)] if isinstance(layer, (list, tuple)) else layer[step]
        return layer

    def replace(self, parameter: str, layer: Any) -> None:
        """Replace the layer of a parameter by ``layer``."""
        path = parameter.rpartition(".")[0]
        parent, step = self.find_owner(path), path.rpartition(".")[2]
        parent[int(step) if isinstance(parent, list) else step] = layer


def load_into(
    target: ModuleParameter,
    parameters: Mapping[str, str],
    find: Callable[[str], StoredTensor],
    dtype: mx.Dtype | None,
    *,
    keep_quantized: bool,
) -> None:
    """Read the tensors of ``parameters``, the names of parameters by tensor, strictly.

    Each is checked once ``find`` returns it; ``find`` may wait for its blob.

    Raises:
        ModelError: A blob cannot be loaded. The module is unchanged then. Also as ``check``.
    """
    # Collected first: an error in any tensor must leave the module unchanged
    weights: list[tuple[str, mx.array]] = []
    layers: dict[str, QuantizedArray] = {}

    def find_checked(name: str) -> StoredTensor:
        target.check(tensor := find(name), parameters[name])
        return tensor

    arrays = read_arrays(map(find_checked, parameters), dtype, keep_quantized=keep_quantized)
    for parameter, (_, value) in zip(parameters.values(), arrays, strict=True):
        if isinstance(value, QuantizedArray):
            layers[parameter] = value
        else:
            weights.append((parameter, _to_channels_last(value)))
    for parameter, value in layers.items():
        layer = build_quantized_layer(target.find_owner(parameter), value, dtype)
        target.replace(parameter, layer)
        path = parameter.removesuffix(_WEIGHT)
        weights += [(f"{path}.{name}", array) for name, array in value.parts.items()]
    # Layers were replaced before: strict loading compares with the parameters of the new ones
    target.module.load_weights(weights, strict=True)
    mx.eval(target.module.parameters())


def _to_channels_last(value: mx.array) -> mx.array:
    return value.transpose(0, 2, 3, 1) if value.ndim == 4 else value


def _to_torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) != 4:
        return tuple(shape)
    return (shape[0], shape[3], *shape[1:3])
