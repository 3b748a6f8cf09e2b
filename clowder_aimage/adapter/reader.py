"""Adapters from safetensors files of all dialects, for the tensors of one base model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
from clowder_aimage.adapter.adapter_layer import (
    LOHA,
    LOKR,
    LORA,
    TABLE,
    AdapterLayer,
    AdapterLayers,
    read_layers,
)
from clowder_aimage.adapter.adapter_values import AdapterValues
from clowder_aimage.adapter.fit import AdapterFit, told_base
from clowder_aimage.adapter.names import (
    ALPHA,
    DIFF,
    DIFF_BIAS,
    DORA_SCALE,
    DOWN,
    HADA,
    MAGNITUDE,
    RESHAPE,
    SET,
    SET_BIAS,
    TABLE_DOWN,
    TABLE_UP,
    UP,
)
from clowder_aimage.adapter.peft_config import CONFIG, WEIGHTS, PeftConfig, parse_metadata
from clowder_aimage.adapter.target import LayerTarget, dotted_module
from clowder_aimage.errors import FormatError
from clowder_aimage.strict_json import read_json
from clowder_aimage.tensor import read_header

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_PICKLES = (b"\x80", b"PK\x03\x04")
_AGAIN = "download the file again"
_LEAST = 1 << 26  # values that an adapter of a small base may have


def read_adapter(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    what: str,
    base: str,
    config: Mapping[str, Any] | None = None,
) -> Adapter:
    """Return the adapter in a safetensors file, or in a directory of peft with one.

    Args:
        path: The file. ``adapter_model.safetensors`` has its configuration beside it.
        shapes: The tensors of the base: ``component/name`` in diffusers' names, and shapes.
        what: The adapter's name in messages.
        base: The base's name in messages.
        config: The adapter's ``adapter_config.json``, if it is not beside the file.

    Raises:
        FormatError: It is not a safetensors file or not an adapter, is damaged, incomplete, of a
            kind that cannot be read, or for another base.
        OSError: It cannot be read.
    """
    path, config = _locate(path, what, config)
    with path.open("rb") as file:
        _check_start(what, path, file.read(16))
        file.seek(0)
        try:
            header = read_header(file, path.stat().st_size)
        except FormatError as error:
            raise FormatError(f"{what} is damaged: {error}", hint=_AGAIN) from None
        peft = PeftConfig.parse(config, f"{CONFIG} of {what}") if config is not None else None
        metadata = parse_metadata(header.metadata, what)
        tensors = {name: info.shape for name, info in header.tensors.items()}
        found = read_layers(what, tensors, peft)
        values = AdapterValues(what, file, header)
        _check_size(what, tensors, shapes)
        told = told_base(header.metadata, (peft, *metadata.values()))
        fit = AdapterFit(what, base, shapes, told)
        return _Reader(what, fit, values, found, peft, metadata).read()


def _locate(
    path: Path, what: str, config: Mapping[str, Any] | None
) -> tuple[Path, Mapping[str, Any] | None]:
    """Return the file of weights and the configuration of an adapter."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise FormatError(
                f"{what} must contain one safetensors file with an adapter, not {len(files)}",
                hint=f"pass the file itself, or keep only {WEIGHTS}",
            )
        path = files[0]
    beside = path.with_name(CONFIG)
    if config is None and path.name == WEIGHTS and beside.is_file():
        value = read_json(beside.read_bytes(), f"{CONFIG} of {what}")
        if not isinstance(value, dict):
            raise FormatError(f"{CONFIG} of {what} is not a JSON object")
        config = value
    return path, config


def _check_start(what: str, path: Path, start: bytes) -> None:
    """Check that a file begins as safetensors, if it begins as another known format."""
    if start[8:9] == b"{":
        return
    if path.suffix.lower() in _PICKLED or start.startswith(_PICKLES):
        raise FormatError(
            f"{what} is pickled: loading it can execute arbitrary code, so it is not read",
            hint="convert the adapter to safetensors",
        )
    if start.startswith(b"GGUF"):
        raise FormatError(f"{what} is a GGUF file", hint="use the adapter's safetensors file")


def _check_size(
    what: str, tensors: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that an adapter is not much larger than its base. Raises FormatError."""
    count = sum(map(math.prod, tensors.values()))
    limit = max(_LEAST, 2 * sum(map(math.prod, shapes.values())))
    if count > limit:
        raise FormatError(f"{what} has {count} values, more than {limit}: too many for an adapter")


@dataclass(frozen=True, slots=True)
class _Reader:
    what: str
    fit: AdapterFit
    values: AdapterValues
    found: AdapterLayers
    config: PeftConfig | None
    metadata: Mapping[str, PeftConfig]
    changes: dict[str, list[Change]] = field(default_factory=dict)

    def read(self) -> Adapter:
        self._check_magnitudes()
        pairs = list(self.fit.match(self.found.layers))
        for layer, target in pairs:
            self._check_matrix(layer, target)
        for layer, target in pairs:
            self._read_layer(layer, target)
        return Adapter(self.what, {name: tuple(found) for name, found in self.changes.items()})

    def _check_matrix(self, layer: AdapterLayer, target: LayerTarget) -> None:
        """Check what only values tell, and that matrices are for a linear layer."""
        if layer.kinds and (len(target.shape) != 2 or target.parts[0].bias is None):
            part = next(part for part in layer.parts if part not in (ALPHA, DORA_SCALE))
            layer.fail(part, f"{target.name} of {self.fit.base} is not a linear layer", "remove it")
        if RESHAPE in layer.parts:
            shape = self.values.integers(layer.parts[RESHAPE])
            if shape != target.shape:
                raise self.fit.misfit(layer.parts[RESHAPE], shape, target.parts[0].tensor)

    def _check_magnitudes(self) -> None:
        """Check that an adapter that says it is a DoRA has magnitudes. Raises FormatError."""
        flags = [flag for flag in (self.found.flags.get(names.DORA_FLAG),) if flag]
        is_dora = any(one.is_dora for one in self._configs()) or any(map(self._is_set, flags))
        if is_dora and not any(layer.is_decomposed for layer in self.found.layers):
            raise FormatError(f"{self.what} says that it is a DoRA, but it has no magnitudes")
        for layer in self.found.layers:
            flag = layer.parts.get(names.DORA_FLAG)
            if flag and not layer.is_decomposed and self._is_set(flag):
                layer.fail(names.DORA_FLAG, "the magnitude of DoRA is missing", _AGAIN)

    def _configs(self) -> Iterable[PeftConfig]:
        return (*((self.config,) if self.config else ()), *self.metadata.values())

    def _is_set(self, name: str) -> bool:
        return self.values.number(name) != 0

    def _read_layer(self, layer: AdapterLayer, target: LayerTarget) -> None:
        linear = [self._linear(layer, kind, target) for kind in layer.kinds]
        weights: list[Change] = list(linear)
        if layer.is_decomposed:
            weights = [self._decomposed(layer, linear, target)]
        if DIFF in layer.parts:
            weights.append(DenseChange(self._dense(layer, DIFF, target)))
        if SET in layer.parts:
            weights.append(Replacement(self._dense(layer, SET, target)))
        biases = [self._bias(layer, part, target) for part in layer.biases]
        for rows in target.parts:
            for tensor, changes in ((rows.tensor, weights), (rows.bias, biases)):
                if tensor is not None and changes:
                    own = self.changes.setdefault(tensor, [])
                    is_whole = len(target.parts) == 1
                    own += changes if is_whole else [c.rows(rows.start, rows.stop) for c in changes]

    def _dense(self, layer: AdapterLayer, part: str, target: LayerTarget) -> Floats:
        return self.values.array(layer.parts[part], None).reshape(target.shape)

    def _bias(self, layer: AdapterLayer, part: str, target: LayerTarget) -> Change:
        values = self.values.array(layer.parts[part], 1)
        if part == SET_BIAS:
            return Replacement(values)
        if part == DIFF_BIAS:
            return DenseChange(values)
        return DenseChange(np.float32(self._scale(layer, LORA, target)) * values)

    def _decomposed(
        self, layer: AdapterLayer, linear: list[Linear], target: LayerTarget
    ) -> Decomposed:
        if MAGNITUDE in layer.parts:
            return Decomposed(tuple(linear), self._vector(layer, MAGNITUDE), Norm.CHANGED)
        rows = target.shape[0]
        norm = Norm.ROWS if layer.shapes[DORA_SCALE] in ((rows,), (rows, 1)) else Norm.COLUMNS
        return Decomposed(tuple(linear), self._vector(layer, DORA_SCALE), norm)

    def _vector(self, layer: AdapterLayer, part: str) -> Floats:
        return self.values.array(layer.parts[part], None).reshape(-1)

    def _linear(self, layer: AdapterLayer, kind: str, target: LayerTarget) -> Linear:
        def of(part: str) -> Floats:
            return self.values.array(layer.parts[part])

        scale = self._scale(layer, kind, target)
        if kind == LORA:
            return LowRank(of(DOWN), of(UP), scale)
        if kind == TABLE:  # a row for each word: the matrix of the pair is transposed
            return LowRank(of(TABLE_UP).T, of(TABLE_DOWN).T, scale)
        if kind == LOHA:
            first, second = (LowRank(of(down), of(up)) for up, down in (HADA[:2], HADA[2:]))
            return Hadamard(first, second, scale)
        factors = [
            of(name) if name in layer.parts else LowRank(of(f"{name}_b"), of(f"{name}_a"))
            for name in ("lokr_w1", "lokr_w2")
        ]
        return Kronecker(factors[0], factors[1], scale)

    def _scale(self, layer: AdapterLayer, kind: str, target: LayerTarget) -> float:
        """Return alpha / rank; by the tensor, else by a configuration, else 1."""
        rank = layer.ranks.get(kind)
        module = (dotted_module(layer.stem), target.module)
        other = self.metadata.get(target.component) or self.metadata.get("")
        configs = [one for one in (self.config, other) if one is not None]
        if kind == LOKR and self.config is not None and self.config.kind == "LOKR":
            rank = int(self.config.rank_of(module) or 0) or rank  # peft scales whole factors, too
        if rank is None:
            return 1.0
        flags = (layer.parts.get(names.RSLORA_FLAG), self.found.flags.get(names.RSLORA_FLAG))
        is_rslora = any(one.is_rslora for one in configs)
        is_rslora = is_rslora or any(flag is not None and self._is_set(flag) for flag in flags)
        return self._alpha(layer, module, configs, rank) / (math.sqrt(rank) if is_rslora else rank)

    def _alpha(
        self, layer: AdapterLayer, module: tuple[str, str], configs: list[PeftConfig], rank: int
    ) -> float:
        if ALPHA in layer.parts:
            return self.values.number(layer.parts[ALPHA])
        for config in configs:
            alpha, stated = config.alpha_of(module), config.rank_of(module)
            if alpha is None:
                continue
            if stated not in (None, rank):
                part = next(iter(layer.parts))
                layer.fail(part, f"its rank is {rank}, but the configuration has {stated}", _AGAIN)
            return alpha
        return float(rank)
