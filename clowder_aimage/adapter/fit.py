"""The fit of an adapter and a base: the target of each layer, and its shape. Reads no values."""

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
Shapes = Mapping[str, Shape]  # of the base's tensors, by component and name
BASES = ("ss_base_model_version", "modelspec.architecture")
_OTHER = "use an adapter that was made for this base"
_AGAIN = "use the complete file, as its author published it"


def told_base(metadata: Mapping[str, str], configs: Iterable[PeftConfig | None]) -> str:
    """Return the base models that an adapter names; empty if it names none."""
    stated = [metadata.get(key) for key in BASES]
    stated += [config.base for config in configs if config is not None]
    return ", ".join(dict.fromkeys(text.strip()[:100] for text in stated if text and text.strip()))


@dataclass(frozen=True, slots=True)
class AdapterFit:
    """An adapter ``what`` and a base, for messages, and the base's tensors.

    ``told`` are the bases that the adapter names.
    """

    what: str
    base: str
    shapes: Shapes
    told: str = ""

    def match(self, layers: Iterable[AdapterLayer]) -> Iterator[tuple[AdapterLayer, LayerTarget]]:
        """Yield each layer with its target in the base.

        Raises:
            FormatError: A layer is not in the base or has another shape there, or two are one.
        """
        table = TargetTable(self.shapes)
        stems: dict[str, str] = {}
        for layer in layers:
            target = self._find(layer, table)
            for part in target.parts:
                other = stems.setdefault(part.tensor, layer.stem)
                if other != layer.stem:
                    raise FormatError(
                        f"{self.what} names one layer of {self.base} twice: {other[:200]} and "
                        f"{layer.stem[:200]}",
                        hint="remove one of them from the file",
                    )
            self._check(layer, target)
            yield layer, target

    def misfit(
        self, name: str, shape: Shape, tensor: str, other: Shape | None = None
    ) -> FormatError:
        """Return the error for a tensor of the adapter whose ``shape`` is not that of the base."""
        expected = list(self.shapes[tensor] if other is None else other)
        return FormatError(
            f"{self.what} does not match {self.base}: for {name[:200]} it has {list(shape)}, the "
            f"model {expected} ({tensor[:200]}){self._says()}",
            hint=_OTHER,
        )

    def _says(self) -> str:
        return f"; it says that it is for {self.told}" if self.told else ""

    def _find(self, layer: AdapterLayer, table: TargetTable) -> LayerTarget:
        target = table.find(layer.stem)
        if target is None:
            name = next(iter(layer.parts.values()))
            raise FormatError(
                f"{self.what} does not match {self.base}, which has no layer for {name[:200]}"
                f"{self._says()}",
                hint=_OTHER,
            )
        return target

    def _check(self, layer: AdapterLayer, target: LayerTarget) -> None:
        tensor = target.parts[0].tensor
        for name, shape in layer.changes:
            # matrices for a convolution have its columns of all positions
            is_matrix = len(shape) == 2 < len(target.shape)
            expected = (target.shape[0], math.prod(target.shape[1:])) if is_matrix else target.shape
            if shape != expected:
                raise self.misfit(name, shape, tensor, target.shape)
        for part in layer.biases:
            self._check_bias(layer, part, target)
        for part in (MAGNITUDE, DORA_SCALE):
            if part in layer.parts:
                self._check_magnitude(layer, part, target)

    def _check_bias(self, layer: AdapterLayer, part: str, target: LayerTarget) -> None:
        name, shape = layer.parts[part], layer.shapes[part]
        for one in target.parts:
            bias, rows = one.bias, (one.stop - one.start,)
            is_vector = bias not in self.shapes and len(target.shape) < 2  # of a norm
            if bias is None or is_vector:
                layer.fail(part, f"{one.tensor} of {self.base} is not a layer with a bias", _AGAIN)
            elif shape != target.shape[:1]:
                raise self.misfit(name, shape, one.tensor, target.shape[:1])
            elif self.shapes.get(bias, rows) != rows:
                raise self.misfit(name, rows, bias)

    def _check_magnitude(self, layer: AdapterLayer, part: str, target: LayerTarget) -> None:
        rows, columns, shape = target.shape[0], math.prod(target.shape[1:]), layer.shapes[part]
        if shape in ((rows,), (rows, 1)):
            return
        if part == MAGNITUDE or shape != (1, columns):
            raise self.misfit(layer.parts[part], shape, target.parts[0].tensor, target.shape)
        if len(target.parts) > 1:
            layer.fail(
                part,
                "a magnitude for each column of a stacked query, key and value has norms over all "
                "three, which the base keeps apart",
                "use the adapter in a form with separate layers to_q, to_k and to_v",
            )
