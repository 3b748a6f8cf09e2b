"""The weights of a network of mlx-lm, from blobs, strictly.

mlx-lm maps Hugging Face's names to its own with arrays in hand (``sanitize``), because some
networks stack or split tensors. So all arrays are read first, quantized ones as MLX stores them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from clowder_aimage.errors import FormatError, ModelError, NoMemoryError
from clowder_aimage.model.backend import choose_dtype, is_on_gpu, mx, quantize_layers, tree_flatten
from clowder_aimage.model.mlxlm.cpu_network import accelerate
from clowder_aimage.model.mlxlm.cuda_network import adapt_to_cuda
from clowder_aimage.model.quantized import QuantizedArray
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.wrapper_name import strip_common_wrappers

_WEIGHT = ".weight"
# Before the names of a model without a head, such as Qwen3Model, which begin so
_INNER, _HEADLESS = "model.", ("layers.", "embed_tokens.")
Arrays = dict[str, mx.array]


def load_network(
    weights: ModelWeights, network: Any, dtype: mx.Dtype, *, keep_quantized: bool
) -> None:
    """Load all tensors into ``network`` and evaluate it.

    Raises:
        ModelError: A tensor is missing or unexpected, or has the wrong shape.
        FormatError: A blob does not match its layer.
    """
    arrays, quantized = _read(weights, dtype, keep_quantized=keep_quantized)
    plain = strip_common_wrappers(arrays)
    arrays = {plain[name]: value for name, value in arrays.items()}
    quantized = {
        plain[f"{path}{_WEIGHT}"].removesuffix(_WEIGHT): value for path, value in quantized.items()
    }
    if any(name.startswith(_HEADLESS) for name in arrays) and hasattr(network, "model"):
        arrays = {_INNER + name: value for name, value in arrays.items()}
        quantized = {_INNER + name: value for name, value in quantized.items()}
    arrays = _LAYOUTS.get(str(weights.config.get("model_type")), dict)(arrays)
    try:
        sanitize = getattr(network, "sanitize", None)
        sanitized: Arrays = arrays if sanitize is None else sanitize(arrays)
        _quantize(network, sanitized, quantized)
        network.load_weights([*sanitized.items()], strict=True)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())
        raise ModelError(
            f"the weights do not fit config.json: {text[:500]}",
            hint="the weights and the configuration are those of different models",
        ) from None
    mx.eval(network.parameters())
    network.eval()
    accelerate(network)


def _name_gpt2(arrays: Arrays) -> Arrays:
    """Return arrays without the prefix of transformers' class, as mlx-lm expects them."""
    return {name.removeprefix("transformer."): value for name, value in arrays.items()}


def _split_experts(arrays: Arrays) -> Arrays:
    """Return the float experts of GPT-OSS as layers: transposed, gate and up apart."""
    result: Arrays = {}
    for name, value in arrays.items():
        stem, _, word = name.rpartition(".experts.")
        path, kind = f"{stem}.experts.", "bias" if word.endswith("_bias") else "weight"
        turned = value.swapaxes(1, 2) if value.ndim == 3 and word in _EXPERTS else value
        if word in ("gate_up_proj", "gate_up_proj_bias"):
            result[f"{path}gate_proj.{kind}"] = mx.contiguous(turned[:, ::2])
            result[f"{path}up_proj.{kind}"] = mx.contiguous(turned[:, 1::2])
        elif word in ("down_proj", "down_proj_bias"):
            result[f"{path}down_proj.{kind}"] = mx.contiguous(turned)
        else:
            result[name] = value
    # The experts of MXFP4 files are named by mlx-lm, with their biases
    return result if any(name.endswith(f".experts.{_EXPERTS[0]}") for name in arrays) else arrays


# What transformers' files have otherwise than mlx-lm expects, by the model type
_EXPERTS = ("gate_up_proj", "down_proj")
_LAYOUTS: dict[str, Callable[[Arrays], Arrays]] = {"gpt2": _name_gpt2, "gpt_oss": _split_experts}


def choose_form(weights: ModelWeights, dtype: str | None, limit: int) -> tuple[mx.Dtype, bool]:
    """Return the type of the computation, and True if quantized matrices stay quantized.

    They do on a GPU. On a CPU, quantized matrices are slow and less exact, and bfloat16 is slow, so
    both are used only for weights that exceed ``limit`` bytes in float32.

    Raises:
        NoMemoryError: The weights exceed the limit in each type, and none is quantized.
    """
    chosen = choose_dtype(dtype)
    if is_on_gpu():
        return chosen, True
    count = sum(math.prod(shape) for shape in weights.get_shapes().values())
    types = (chosen,) if dtype is not None else (chosen, mx.bfloat16)
    for candidate in types:
        if count * candidate.size <= limit:
            return candidate, False
    if any(weights.get_quantization(name) for name in weights):
        return types[-1], True
    raise NoMemoryError(
        f"the weights take {count * types[-1].size >> 20} MiB in {format_dtype(types[-1])};"
        f" the limit is {limit >> 20} MiB",
        hint="use a quantized variant of the model",
    )


def format_dtype(dtype: mx.Dtype) -> str:
    """Return the name of a type, such as "float32"."""
    return str(dtype).removeprefix("mlx.core.")


def _read(
    weights: ModelWeights, dtype: mx.Dtype, *, keep_quantized: bool
) -> tuple[Arrays, dict[str, Quantization]]:
    """Return the arrays by their names in the files, and the quantization of quantized layers."""
    arrays: Arrays = {}
    quantized: dict[str, Quantization] = {}
    for name, value in weights.read(dtype, keep_quantized=keep_quantized):
        if isinstance(value, QuantizedArray) and value.global_scale is not None:
            # MLX's quantized layers have no scale for the whole tensor
            value = value.dequantize(dtype)
        if not isinstance(value, QuantizedArray):
            arrays[name] = value
            continue
        if not name.endswith(_WEIGHT):
            raise FormatError(f"{name[:200]}: only weights of layers can be quantized")
        path = name.removesuffix(_WEIGHT)
        quantized[path] = value.quantization
        arrays |= {f"{path}.{field}": array for field, array in value.parts.items()}
    return arrays, quantized


def _quantize(network: Any, arrays: Arrays, quantized: dict[str, Quantization]) -> None:
    """Replace the layers whose arrays are quantized by MLX's quantized layers."""
    if not quantized:
        return
    first = next(iter(quantized.values()))

    def find_options(path: str, module: Any) -> bool | dict[str, Any]:
        if f"{path}.scales" not in arrays or not hasattr(module, "to_quantized"):
            return False
        # ``sanitize`` gives stacked experts a new name; they are quantized as the first layer
        quantization = quantized.get(path, first)
        kind = quantization.type
        return {"group_size": quantization.group_size, "bits": kind.bits, "mode": kind.mode}

    quantize_layers(network, class_predicate=find_options)
    adapt_to_cuda(network)


def count_parameter_bytes(network: Any) -> int:
    """Return the bytes of all parameters."""
    parameters: Any = tree_flatten(network.parameters())
    return sum(int(value.nbytes) for _, value in parameters)
