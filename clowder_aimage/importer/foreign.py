"""Weights that were quantized in ways that we do not know: seen by what is left of them.

What is not converted must not be packed: nothing could read it, and codes would pass for values.
Makers: GPTQ and AWQ (``qweight``), bitsandbytes (``quant_state``, ``SCB``), transformers (fp8 and
mxfp4), compressed-tensors, MLX.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError
from clowder_aimage.importer.shards import SourceTensor
from clowder_aimage.tensor.quantization import CONVERTED

_HINT = (
    "known are MLX's .scales and .biases, and nvfp4 of ModelOpt and compressed-tensors: "
    "begin with the model as it was before it was quantized"
)
_ENDS = (
    *(".qweight", ".qzeros", ".SCB"),
    *(".weight.absmax", ".weight.nested_absmax", ".weight.quant_map"),
    *(".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_global_scale"),
    *(".weight_scale", ".weight_scale_inv", ".weight_scale_2"),
    *(".weight_blocks", ".weight_scales"),
)
_STATE = ".weight.quant_state."
_BLOCKS, _SCALES = "_blocks", "_scales"
_CODES = "U32"


def check_method(directory: Path, config: Mapping[str, Any]) -> None:
    """Raises FormatError where config.json names a way of quantizing that is not converted."""
    said = config.get("quantization_config")
    if not isinstance(said, dict) or (method := said.get("quant_method")) is None:
        return
    if method not in CONVERTED:
        raise FormatError(
            f"{directory / 'config.json'} says that the weights were quantized by "
            f"{method!r:.60}, which is not known",
            hint=_HINT,
        )
    if said.get("transform_config"):
        # rotations would have to be undone while the model runs
        raise FormatError(
            f"{directory / 'config.json'} says that the weights were transformed before they were "
            "quantized, which is not known",
            hint=_HINT,
        )


def check_rest(rest: Iterable[SourceTensor]) -> None:
    """Raises FormatError where tensors that nothing was made of are parts of quantized ones."""
    named = {tensor.name: tensor for tensor in rest}
    for name, tensor in named.items():
        if _is_left(name, tensor, named):
            raise FormatError(
                f"{tensor.path}: {name[:200]} is of a tensor that is quantized in a way that is "
                "not known",
                hint=_HINT,
            )


def _is_left(name: str, tensor: SourceTensor, named: Mapping[str, SourceTensor]) -> bool:
    if name.endswith(_ENDS) or _STATE in name:
        return True
    if name.endswith(_BLOCKS):
        return name.removesuffix(_BLOCKS) + _SCALES in named
    # no network has weights of that type: they are codes whose scales are not where MLX has them
    return name.endswith(".weight") and tensor.dtype == _CODES
