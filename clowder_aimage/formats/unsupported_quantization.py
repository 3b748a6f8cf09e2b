"""Weights that were quantized in ways that we do not know: seen by what is left of them.

What is not converted must not be packed: nothing could read it, and codes would pass for values.
Makers: GPTQ and AWQ (``qweight``), bitsandbytes (``quant_state``, ``SCB``), transformers (fp8 and
mxfp4), compressed-tensors, MLX, quanto (``_data``), HQQ (``W_q``), AQLM (``codebooks``), torchao
(``_qdata``), ComfyUI's scaled fp8 (``scale_weight``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError
from clowder_aimage.tensor.quantization import CONVERTED
from clowder_aimage.tensor.quantization_config import METHOD, unknown_key
from clowder_aimage.tensor.tensor_blob import BIAS, GLOBAL_SCALE, SCALE
from clowder_aimage.tensor.weight import SourceTensor

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
    *(".weight._data", ".weight._scale", ".weight._shift", "_qdata", ".W_q", ".codebooks"),
)
_STATE = ".weight.quant_state."
_BLOCKS, _SCALES = "_blocks", "_scales"
_CODES = "U32"
_OCTETS = ("U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ")  # too few bits alone
_FLOATS = ("F64", "F32", "F16", "BF16")
_PARTS = (SCALE, BIAS, GLOBAL_SCALE)
_WEIGHT = ".weight"
_WORD = "scale"  # is in the names of all factors


def check_method(directory: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config.json with a quantization that cannot be run. Raises FormatError."""
    key = unknown_key(config)
    if key is None:
        return
    said = config[key]
    method = said.get(METHOD) if isinstance(said, Mapping) else None
    if method in CONVERTED:
        # rotations would have to be undone while the model runs
        what = "were transformed before they were quantized, which is not known"
    elif method is not None:
        what = f"were quantized by {method!r:.60}, which is not known"
    else:
        what = f"were quantized in a way that is not known: {key} = {said!r:.60}"
    raise FormatError(f"{directory / 'config.json'} says that the weights {what}", hint=_HINT)


def check_rest(rest: Iterable[SourceTensor]) -> None:
    """Refuse unused tensors that are parts of quantized ones. Raises FormatError."""
    named = {tensor.name: tensor for tensor in rest}
    scaled = {_owner(name) for name in named if _WORD in name.rpartition(".")[2].lower()}
    for name, tensor in named.items():
        if _is_left(name, tensor, named, scaled):
            raise FormatError(
                f"{tensor.path}: {name[:200]} is of a tensor that is quantized in a way that is "
                "not known",
                hint=_HINT,
            )


def _owner(name: str) -> str:
    """Return the tensor of a factor: ``x`` for ``x.scale_weight`` and ``x.weight_scale``."""
    return name.rpartition(".")[0].removesuffix(_WEIGHT)


def _is_left(
    name: str, tensor: SourceTensor, named: Mapping[str, SourceTensor], scaled: AbstractSet[str]
) -> bool:
    if name.endswith(_ENDS) or _STATE in name:
        return True
    if name.endswith(_BLOCKS):
        return name.removesuffix(_BLOCKS) + _SCALES in named
    if any(name.endswith(part) and name.removesuffix(part) in named for part in _PARTS):
        return True  # no module is a tensor, too; and readers take it for what we write
    if not name.endswith(_WEIGHT):
        return False
    stem = name.removesuffix(_WEIGHT)
    # no network has weights of U32: they are codes whose scales are not where MLX has them
    return (
        tensor.dtype == _CODES
        or (tensor.dtype in _OCTETS and stem in scaled)
        or (tensor.dtype in _FLOATS and f"{stem}.scales" in named)
    )
