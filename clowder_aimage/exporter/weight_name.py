"""Names of weights in files: those of the libraries, and of the makers for quantized ones.

A quantized weight becomes MLX's ``x.weight`` (codes), ``x.scales`` and ``x.biases`` (MLX-LM's
``save_config``, ``mlx.nn.QuantizedLinear``). nvfp4 with a factor for the whole matrix is none of
MLX's: it becomes ModelOpt's ``x.weight`` (two codes a byte), ``x.weight_scale`` and
``x.weight_scale_2`` (ModelOpt, "unified checkpoint"). Both are read by ``importer.prequantized``
to the same blobs: no value changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from clowder_aimage.errors import ModelError
from clowder_aimage.tensor.tensor_blob import BIAS, GLOBAL_SCALE, SCALE
from clowder_aimage.tensor.weight import SourceTensor, Weight

_WEIGHT = ".weight"
_MLX = {SCALE: ".scales", BIAS: ".biases"}
_MODELOPT = {SCALE: ("_scale", "F8_E4M3"), GLOBAL_SCALE: ("_scale_2", "F32")}
_BYTES = 4  # of a word of codes


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A tensor of a file to be, and where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: SourceTensor

    @property
    def nbytes(self) -> int:
        return self.source.nbytes


def is_modelopt(weight: Weight) -> bool:
    """Return whether it is quantized, and written in ModelOpt's form."""
    return any(part.suffix == GLOBAL_SCALE for part in weight.parts)


def stem(weight: Weight) -> str:
    """Return the module that a weight is of."""
    return weight.name.removesuffix(_WEIGHT)


def entries(component: str, weight: Weight) -> list[WeightEntry]:
    """Return the tensors that ``weight`` becomes.

    Raises:
        ModelError: it is quantized, and called as no tool calls such a weight.
    """
    if weight.quantization is None:
        return [WeightEntry(weight.name, p.dtype, p.shape, p.tensor) for p in weight.parts]
    if not weight.name.endswith(_WEIGHT):
        raise ModelError(
            f"{component}/{weight.name[:200]} is quantized to {weight.dtype}, and neither MLX nor "
            "ModelOpt has a name for that: they quantize what is called .weight",
            hint="export the AImage as it was before it was quantized",
        )
    return _modelopt(weight) if is_modelopt(weight) else _mlx(weight)


def _mlx(weight: Weight) -> list[WeightEntry]:
    own = stem(weight)
    return [
        WeightEntry(own + _MLX.get(part.suffix, _WEIGHT), part.dtype, part.shape, part.tensor)
        for part in weight.parts
    ]


def _modelopt(weight: Weight) -> list[WeightEntry]:
    """Codes are words in our blobs.

    The same bytes, two codes in each, the first in the low half.
    """
    made = []
    for part in weight.parts:
        if part.suffix in _MODELOPT:
            word, dtype = _MODELOPT[part.suffix]
            made.append(WeightEntry(weight.name + word, dtype, part.shape, part.tensor))
        else:
            shape = (*part.shape[:-1], part.shape[-1] * _BYTES)
            made.append(WeightEntry(weight.name, "U8", shape, part.tensor))
    return made
