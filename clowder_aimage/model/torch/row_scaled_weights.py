"""The matrices of a component that are computed in fp8, from its blobs.

They are those that ``create --quantize fp8`` would quantize. Of the transformer, floats are
quantized while they are loaded, with the same codes; of other components, only stored codes count.
"""

from __future__ import annotations

import torch

from clowder_aimage.errors import ModelError
from clowder_aimage.model.parameter_names import FLOATS
from clowder_aimage.model.torch.dequantize import read_parts
from clowder_aimage.model.torch.library import TorchLibrary
from clowder_aimage.model.torch.row_scaled import CODE, MULTIPLE, RowScaledTensor
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.tensor.blob import GLOBAL_SCALE, SCALE
from clowder_aimage.tensor.kept_weight import KeepRule
from clowder_aimage.tensor.quantization import ROW_SCALED

_QUANTIZED = "transformer"
_HINT = "use the model with float or fp8 weights, or compute in bfloat16"


class RowScaledWeights:
    """The weights of a component, for a library that computes in fp8."""

    def __init__(self, library: TorchLibrary, weights: ModelWeights) -> None:
        self._library, self._weights = library, weights
        self._is_quantized = weights.component == _QUANTIZED
        self._rule = KeepRule.of(ROW_SCALED, weights) if library.tuning.compute else None

    def has(self, name: str) -> bool:
        """Return True if the tensor may be computed in fp8, by its name, type and shape.

        It is not if it turns out to be codes of another form. Raises as ``get_shape_and_dtype``.
        """
        if self._rule is None:
            return False
        shape, dtype = self._weights.get_shape_and_dtype(name)
        if not self._is_quantized and self._weights.get_code_type(name) != ROW_SCALED.type.name:
            return False
        is_kept = self._rule.find_reason(name, dtype or FLOATS[0], shape) is not None
        return not is_kept and shape[0] % MULTIPLE == 0

    def read(self, name: str) -> RowScaledTensor | None:
        """Return a tensor on the device, or None if it is not computed in fp8.

        Raises ModelError: its codes are of another form, in a component whose floats are quantized;
        or its values are not finite. Also as ``find`` and ``read_parts``.
        """
        if not self.has(name):
            return None
        library, stored = self._library, self._weights.get_quantization(name)
        if stored is None:
            values = self._weights.read_torch(name).to(library.device)
            if not bool(values.isfinite().all()):
                raise ModelError(
                    f"{self._weights.component}/{name[:200]} has values that are NaN or infinite",
                    hint="compute in bfloat16, or repair the model",
                )
            return RowScaledTensor.of(values, library.dtype)
        if stored.type == ROW_SCALED.type:
            parts = read_parts(self._weights.find(name), library.device)
            scales = parts[SCALE]
            if GLOBAL_SCALE not in parts and bool((scales == scales[:, :1]).all()):
                factors = torch.exp2(scales[:, 0].double() - 127).float()
                return RowScaledTensor(parts[""].view(CODE), factors, library.dtype)
        if not self._is_quantized:
            return None
        groups = f" with a scale for {stored.group_size} values"
        raise ModelError(
            f"{self._weights.component}/{name[:200]} cannot be computed in fp8: it is "
            f"{stored.type.name}{groups}",
            hint=_HINT,
        )
