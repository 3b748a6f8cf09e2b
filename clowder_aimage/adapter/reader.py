"""Adapters from safetensors files of all dialects, for the tensors of a base model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clowder_aimage.adapter import names
from clowder_aimage.adapter.adapter import (
    Adapter,
    Change,
    Decomposed,
    DenseChange,
    Floats,
    Hadamard,
    Kronecker,
    Linear,
    LowRank,
    Norm,
    Replacement,
)
from clowder_aimage.adapter.file import OpenAdapter, open_adapter
from clowder_aimage.adapter.fit import AdapterFit, Shapes
from clowder_aimage.adapter.layer import (
    LOHA,
    LOKR,
    LORA,
    TABLE,
    AdapterLayer,
)
from clowder_aimage.adapter.names import (
    ALPHA,
    DIFF,
    DIFF_BIAS,
    DORA_SCALE,
    DOWN,
    HADA,
    MAGNITUDE,
    RESHAPE,
    ROWS,
    SET,
    SET_BIAS,
    TABLE_DOWN,
    TABLE_UP,
    UP,
)
from clowder_aimage.adapter.peft_config import MAX_ALPHA, PeftConfig
from clowder_aimage.adapter.target import LayerTarget, strip_tool_prefixes
from clowder_aimage.errors import FormatError

_AGAIN = "download the file again"


def read_adapter(
    path: Path,
    shapes: Shapes,
    *,
    label: str,
    base: str,
    config: Mapping[str, Any] | None = None,
) -> Adapter:
    """Return the adapter in a safetensors file, or in a directory of peft with one.

    Args:
        path: The file. That of peft has its configuration in the same directory.
        shapes: The tensors of the base: ``component/name`` in diffusers' names, and shapes.
        label: The adapter's name in messages.
        base: The base's name in messages.
        config: The adapter's ``adapter_config.json``, by default that in the file's directory.

    Raises:
        FormatError: It is not a safetensors file or not an adapter, is damaged, incomplete, of an
            unsupported kind, or for another base.
        OSError: It cannot be read.
    """
    with open_adapter(path, label, config) as source:
        source.check_size(shapes)
        return match_adapter(source, shapes, base).read()


def match_adapter(source: OpenAdapter, shapes: Shapes, base: str) -> MatchedAdapter:
    """Return an adapter with the targets of its layers in a base. Raises FormatError."""
    fit = AdapterFit(source.label, base, shapes, source.base_names)
    matched = MatchedAdapter(source, base, tuple(fit.match(source.content.layers)))
    matched.check(fit)
    return matched


@dataclass(frozen=True, slots=True)
class MatchedAdapter:
    """An open adapter, and the target of each layer in a base."""

    source: OpenAdapter
    base: str
    pairs: tuple[tuple[AdapterLayer, LayerTarget], ...]

    def read(self) -> Adapter:
        """Read all values. Raises FormatError."""
        changes: dict[str, list[Change]] = {}
        for layer, target in self.pairs:
            self._read_layer(layer, target, changes)
        return Adapter(
            self.source.label,
            {name: tuple(tensor_changes) for name, tensor_changes in changes.items()},
            self.source.content.embeddings,
        )

    def check(self, fit: AdapterFit) -> None:
        """Check the flags, reshapes and layers before the matrices are read. Raises FormatError."""
        self._check_magnitudes()
        for layer, target in self.pairs:
            self._check_matrix(layer, target, fit)

    def _check_matrix(self, layer: AdapterLayer, target: LayerTarget, fit: AdapterFit) -> None:
        if layer.kinds and (len(target.shape) != 2 or target.rows[0].bias is None):
            role = next(role for role in layer.tensors if role not in (ALPHA, DORA_SCALE))
            layer.fail(role, f"{target.name} of {self.base} is not a linear layer", "remove it")
        if RESHAPE in layer.tensors:
            shape = self.source.values.read_integers(layer.tensors[RESHAPE])
            if shape != target.shape:
                raise fit.build_shape_error(layer.tensors[RESHAPE], shape, target.rows[0].tensor)

    def _check_magnitudes(self) -> None:
        """Check that an adapter stated to be a DoRA has magnitudes. Raises FormatError."""
        flags = [flag for flag in (self.source.content.flags.get(names.DORA_FLAG),) if flag]
        is_dora = any(config.is_dora for config in self.source.configs) or any(
            map(self._is_set, flags)
        )
        if is_dora and not any(layer.is_decomposed for layer in self.source.content.layers):
            raise FormatError(
                f"{self.source.label} says that it is a DoRA, but it has no magnitudes"
            )
        for layer in self.source.content.layers:
            flag = layer.tensors.get(names.DORA_FLAG)
            if flag and not layer.is_decomposed and self._is_set(flag):
                layer.fail(names.DORA_FLAG, "the magnitude of DoRA is missing", _AGAIN)

    def _is_set(self, name: str) -> bool:
        return self.source.values.read_number(name) != 0

    def _read_layer(
        self, layer: AdapterLayer, target: LayerTarget, changes_by_tensor: dict[str, list[Change]]
    ) -> None:
        linear = [self._read_linear(layer, kind, target) for kind in layer.kinds]
        weights: list[Change] = list(linear)
        if layer.is_decomposed:
            weights = [self._read_decomposed(layer, linear, target)]
        if DIFF in layer.tensors:
            weights.append(DenseChange(self._read_dense(layer, DIFF, target)))
        if SET in layer.tensors:
            weights.append(Replacement(self._read_dense(layer, SET, target)))
        biases = [self._read_bias(layer, role, target) for role in layer.biases]
        for rows in target.rows:
            for tensor, changes in ((rows.tensor, weights), (rows.bias, biases)):
                if tensor is not None and changes:
                    tensor_changes = changes_by_tensor.setdefault(tensor, [])
                    is_whole = len(target.rows) == 1
                    tensor_changes += (
                        changes
                        if is_whole
                        else [c.slice_rows(rows.start, rows.stop) for c in changes]
                    )

    def _read_dense(self, layer: AdapterLayer, role: str, target: LayerTarget) -> Floats:
        values = self.source.values.read_array(layer.tensors[role], None).reshape(target.shape)
        return _order_rows(values, layer, role, target)

    def _read_bias(self, layer: AdapterLayer, role: str, target: LayerTarget) -> Change:
        values = _order_rows(
            self.source.values.read_array(layer.tensors[role], 1), layer, role, target
        )
        if role == SET_BIAS:
            return Replacement(values)
        if role == DIFF_BIAS:
            return DenseChange(values)
        return DenseChange(np.float32(self._read_scale(layer, LORA, target)) * values)

    def _read_decomposed(
        self, layer: AdapterLayer, linear: list[Linear], target: LayerTarget
    ) -> Decomposed:
        if MAGNITUDE in layer.tensors:
            vector = _order_rows(self._read_vector(layer, MAGNITUDE), layer, MAGNITUDE, target)
            return Decomposed(tuple(linear), vector, Norm.CHANGED)
        rows = target.shape[0]
        norm = Norm.ROWS if layer.shapes[DORA_SCALE] in ((rows,), (rows, 1)) else Norm.COLUMNS
        vector = self._read_vector(layer, DORA_SCALE)
        if norm is Norm.ROWS:
            vector = _order_rows(vector, layer, DORA_SCALE, target)
        return Decomposed(tuple(linear), vector, norm)

    def _read_vector(self, layer: AdapterLayer, role: str) -> Floats:
        return self.source.values.read_array(layer.tensors[role], None).reshape(-1)

    def _read_linear(self, layer: AdapterLayer, kind: str, target: LayerTarget) -> Linear:
        def of(role: str) -> Floats:
            return _order_rows(
                self.source.values.read_array(layer.tensors[role]), layer, role, target
            )

        scale = self._read_scale(layer, kind, target)
        if kind == LORA:
            return LowRank(of(DOWN), of(UP), scale)
        if kind == TABLE:
            # An embedding has a row for each word: the matrix of the pair is transposed.
            return LowRank(of(TABLE_UP).T, of(TABLE_DOWN).T, scale)
        if kind == LOHA:
            first, second = (LowRank(of(down), of(up)) for up, down in (HADA[:2], HADA[2:]))
            return Hadamard(first, second, scale)
        factors = [
            of(name) if name in layer.tensors else LowRank(of(f"{name}_b"), of(f"{name}_a"))
            for name in ("lokr_w1", "lokr_w2")
        ]
        return Kronecker(factors[0], factors[1], scale)

    def read_scaling(
        self, layer: AdapterLayer, kind: str, target: LayerTarget
    ) -> tuple[float, int] | None:
        """Return alpha and rank of a layer's matrices; None if they are not scaled.

        Alpha is that of the tensor, else of a configuration, else the rank. It is multiplied by the
        root of the rank if the adapter is rank-stabilised (arXiv 2312.03732).
        """
        rank = layer.ranks.get(kind)
        module = (strip_tool_prefixes(layer.stem), target.module)
        metadata = self.source.metadata
        configs = (self.source.config, metadata.get(target.component) or metadata.get(""))
        stated = [config for config in configs if config is not None]
        if kind == LOKR and stated and stated[0].kind == "LOKR":
            # peft scales LoKr factors that are matrices too, by the rank of the configuration.
            rank = stated[0].find_rank(module) or rank
        if rank is None:
            return None
        flags = (
            layer.tensors.get(names.RSLORA_FLAG),
            self.source.content.flags.get(names.RSLORA_FLAG),
        )
        is_stable = any(config.is_rslora for config in stated)
        is_stable = is_stable or any(flag is not None and self._is_set(flag) for flag in flags)
        alpha = self._read_alpha(layer, module, stated, rank)
        return (alpha * math.sqrt(rank) if is_stable else alpha), rank

    def _read_scale(self, layer: AdapterLayer, kind: str, target: LayerTarget) -> float:
        scaling = self.read_scaling(layer, kind, target)
        return 1.0 if scaling is None else scaling[0] / scaling[1]

    def _read_alpha(
        self, layer: AdapterLayer, module: tuple[str, str], configs: list[PeftConfig], rank: int
    ) -> float:
        if ALPHA in layer.tensors:
            alpha = self.source.values.read_number(layer.tensors[ALPHA])
            if abs(alpha) > MAX_ALPHA:
                layer.fail(ALPHA, f"{alpha} is too large", _AGAIN)
            return alpha
        for config in configs:
            stated, of_rank = config.find_alpha(module), config.find_rank(module)
            if stated is None:
                continue
            if of_rank not in (None, rank):
                role = next(iter(layer.tensors))
                layer.fail(role, f"its rank is {rank}, but the configuration has {of_rank}", _AGAIN)
            return stated
        return float(rank)


def _order_rows(values: Floats, layer: AdapterLayer, role: str, target: LayerTarget) -> Floats:
    """Return the values of a role in the order of the tensor's rows. Raises FormatError."""
    if not target.is_exchanged or role not in ROWS:
        return values
    if len(values) % 2:
        layer.fail(role, "its rows have no halves, which the base has in another order", _AGAIN)
    return np.roll(values, len(values) // 2, axis=0)
