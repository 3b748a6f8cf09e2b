"""The fit of an adapter to a base: the target of each layer, and its shape. Reads no values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from clowder_aimage.adapter.layer import AdapterLayer
from clowder_aimage.adapter.names import DORA_SCALE, MAGNITUDE
from clowder_aimage.adapter.peft_config import PeftConfig
from clowder_aimage.adapter.target import LayerTarget, TargetTable
from clowder_aimage.errors import FormatError

Shape = tuple[int, ...]
# Shapes of the base's tensors, by ``component/name``.
Shapes = Mapping[str, Shape]
BASES = ("ss_base_model_version", "modelspec.architecture")
_OTHER = "use an adapter that was made for this base"
_AGAIN = "use the complete file, as its author published it"


def format_base_names(metadata: Mapping[str, str], configs: Iterable[PeftConfig | None]) -> str:
    """Return the names of base models in an adapter's metadata and configurations."""
    stated = [metadata.get(key) for key in BASES]
    stated += [config.base for config in configs if config is not None]
    return ", ".join(dict.fromkeys(text.strip()[:100] for text in stated if text and text.strip()))


@dataclass(frozen=True, slots=True)
class AdapterFit:
    """The name of an adapter and of a base, for messages, and the shapes of the base's tensors.

    ``base_names`` are the names of bases in the adapter.
    """

    label: str
    base: str
    shapes: Shapes
    base_names: str = ""

    def match(self, layers: Iterable[AdapterLayer]) -> Iterator[tuple[AdapterLayer, LayerTarget]]:
        """Yield each layer with its target in the base.

        Raises:
            FormatError: A layer is missing in the base or has another shape, or two layers have
                the same target.
        """
        table = TargetTable(self.shapes)
        stems: dict[str, str] = {}
        for layer in layers:
            target = self._find(layer, table)
            for rows in target.rows:
                earlier = stems.setdefault(rows.tensor, layer.stem)
                if earlier != layer.stem:
                    raise FormatError(
                        f"{self.label} names one layer of {self.base} twice: {earlier[:200]} and "
                        f"{layer.stem[:200]}",
                        hint="remove one of them from the file",
                    )
            self._check(layer, target)
            yield layer, target

    def build_shape_error(
        self, name: str, shape: Shape, tensor: str, expected_shape: Shape | None = None
    ) -> FormatError:
        """Return the error for a tensor of the adapter with a ``shape`` other than the base's."""
        expected = list(self.shapes[tensor] if expected_shape is None else expected_shape)
        return FormatError(
            f"{self.label} does not match {self.base}: for {name[:200]} it has {list(shape)}, the "
            f"model {expected} ({tensor[:200]}){self._describe_bases()}",
            hint=_OTHER,
        )

    def _describe_bases(self) -> str:
        return f"; it says that it is for {self.base_names}" if self.base_names else ""

    def _find(self, layer: AdapterLayer, table: TargetTable) -> LayerTarget:
        target = table.find(layer.stem)
        if target is None:
            name = next(iter(layer.tensors.values()))
            raise FormatError(
                f"{self.label} does not match {self.base}, which has no layer for {name[:200]}"
                f"{self._describe_bases()}",
                hint=_OTHER,
            )
        return target

    def _check(self, layer: AdapterLayer, target: LayerTarget) -> None:
        tensor = target.rows[0].tensor
        for name, shape in layer.changes:
            # The matrices for a convolution have columns for all positions of its kernel.
            is_matrix = len(shape) == 2 < len(target.shape)
            expected = (target.shape[0], math.prod(target.shape[1:])) if is_matrix else target.shape
            if shape != expected:
                raise self.build_shape_error(name, shape, tensor, target.shape)
        for role in layer.biases:
            self._check_bias(layer, role, target)
        for role in (MAGNITUDE, DORA_SCALE):
            if role in layer.tensors:
                self._check_magnitude(layer, role, target)

    def _check_bias(self, layer: AdapterLayer, role: str, target: LayerTarget) -> None:
        name, shape = layer.tensors[role], layer.shapes[role]
        for target_rows in target.rows:
            # A linear layer may get a bias that the base does not have, but a norm may not.
            bias, length = target_rows.bias, (target_rows.stop - target_rows.start,)
            is_vector = bias not in self.shapes and len(target.shape) < 2
            if bias is None or is_vector:
                layer.fail(
                    role, f"{target_rows.tensor} of {self.base} is not a layer with a bias", _AGAIN
                )
            elif shape != target.shape[:1]:
                raise self.build_shape_error(name, shape, target_rows.tensor, target.shape[:1])
            elif self.shapes.get(bias, length) != length:
                raise self.build_shape_error(name, length, bias)

    def _check_magnitude(self, layer: AdapterLayer, role: str, target: LayerTarget) -> None:
        rows, columns, shape = target.shape[0], math.prod(target.shape[1:]), layer.shapes[role]
        if shape in ((rows,), (rows, 1)):
            return
        if role == MAGNITUDE or shape != (1, columns):
            raise self.build_shape_error(
                layer.tensors[role], shape, target.rows[0].tensor, target.shape
            )
        if len(target.rows) > 1:
            layer.fail(
                role,
                "a magnitude for each column of a stacked query, key and value has norms over all "
                "three, which the base keeps apart",
                "use the adapter in a form with separate layers to_q, to_k and to_v",
            )
