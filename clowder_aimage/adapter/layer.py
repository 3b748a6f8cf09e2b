"""The layers that an adapter's tensors change, and the kinds of changes: from names and shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from clowder_aimage.adapter import names
from clowder_aimage.adapter.names import (
    ALPHA,
    DIFF,
    DIFF_BIAS,
    DORA_SCALE,
    DOWN,
    HADA,
    KRON,
    MAGNITUDE,
    SET,
    SET_BIAS,
    TABLE_DOWN,
    TABLE_UP,
    UP,
    UP_BIAS,
)
from clowder_aimage.adapter.peft_config import PeftConfig
from clowder_aimage.adapter.target import dotted_module
from clowder_aimage.errors import FormatError

LORA, TABLE, LOHA, LOKR, DORA, FULL = "lora", "embedding", "loha", "lokr", "dora", "full"
Shape = tuple[int, ...]
_AGAIN = "use the complete file, as its author published it"
_BIASES = (UP_BIAS, DIFF_BIAS, SET_BIAS)
_FACTORS = {
    LORA: (DOWN, UP),
    TABLE: (TABLE_DOWN, TABLE_UP),
    LOHA: HADA,
}
_PAIRS = (
    *((UP, DOWN), (TABLE_UP, TABLE_DOWN), HADA[:2], HADA[2:]),
    *(("lokr_w1_a", "lokr_w1_b"), ("lokr_w2_a", "lokr_w2_b")),
)
_SETTINGS = {ALPHA, names.RESHAPE, names.DORA_FLAG, names.RSLORA_FLAG}  # no changes by themselves


@dataclass(frozen=True, slots=True)
class AdapterLayer:
    """The tensors for one layer. ``parts`` maps each part to its tensor, ``shapes`` to its shape.

    Shapes are those of matrices: further dimensions of length 1, of convolutions, are left out.
    """

    what: str
    stem: str
    parts: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of matrices, without differences and magnitudes."""
        found = [kind for kind, factors in _FACTORS.items() if factors[0] in self.parts]
        return (*found, *((LOKR,) if self.kron else ()))

    @property
    def kron(self) -> tuple[str, ...]:
        """The parts of a Kronecker product: each factor's, or its pair's, in order."""
        return tuple(part for part in KRON if part in self.parts)

    @property
    def is_decomposed(self) -> bool:
        """Return whether there is a magnitude (DoRA)."""
        return MAGNITUDE in self.parts or DORA_SCALE in self.parts

    @property
    def ranks(self) -> dict[str, int]:
        """The ranks by kind; a Kronecker product of whole factors has none."""
        found = {LORA: self.shapes.get(DOWN), TABLE: self.shapes.get(TABLE_DOWN)}
        found[LOHA] = self.shapes.get(HADA[1])
        found[LOKR] = self.shapes.get("lokr_w2_b") or self.shapes.get("lokr_w1_b")
        return {kind: shape[0] for kind, shape in found.items() if shape is not None}

    @property
    def changes(self) -> Iterator[tuple[str, Shape]]:
        """The shapes of the changes, with the name of a tensor of each."""
        shapes = self.shapes
        if DOWN in shapes:
            yield self.parts[UP], (shapes[UP][0], math.prod(shapes[DOWN][1:]))
        if TABLE_DOWN in shapes:
            yield self.parts[TABLE_DOWN], (shapes[TABLE_DOWN][1], shapes[TABLE_UP][0])
        if HADA[0] in shapes:
            for up, down in (HADA[:2], HADA[2:]):
                yield self.parts[up], (shapes[up][0], shapes[down][1])
        if self.kron:
            rows, columns = self._factor("lokr_w1"), self._factor("lokr_w2")
            yield self.parts[self.kron[0]], tuple(a * b for a, b in zip(rows, columns, strict=True))
        for part in (DIFF, SET):
            if part in shapes:
                yield self.parts[part], shapes[part]

    @property
    def biases(self) -> Iterator[str]:
        """The parts that change the layer's bias."""
        return (part for part in _BIASES if part in self.parts)

    def check(self) -> None:
        """Check that all tensors of each change are there and match. Raises FormatError."""
        for factors in _FACTORS.values():
            self._check_complete(factors)
        for name in ("lokr_w1", "lokr_w2") if self.kron else ():
            self._check_factor(name)
        for up, down in _PAIRS:
            self._check_pair(up, down)
        self._check_others()

    def _check_factor(self, name: str) -> None:
        pair = (f"{name}_a", f"{name}_b")
        is_pair = any(part in self.parts for part in pair)
        if is_pair:
            self._check_complete(pair)
        if name not in self.parts:
            if not is_pair:
                self.fail(self.kron[0], f"{name} is missing", _AGAIN)
            return
        if is_pair:
            self.fail(name, "a factor is there twice, whole and as a pair", _AGAIN)
        if len(self.shapes[name]) != 2 or 0 in self.shapes[name]:
            self.fail(name, f"its shape is {list(self.shapes[name])}, not a matrix", _AGAIN)

    def _check_others(self) -> None:
        if self.is_decomposed:
            part = MAGNITUDE if MAGNITUDE in self.parts else DORA_SCALE
            found = " and ".join(self.kinds) or "no matrices"
            if len(self.kinds) != 1:
                self.fail(part, f"the magnitude of DoRA has {found} beside it", _AGAIN)
        if MAGNITUDE in self.parts and DORA_SCALE in self.parts:
            self.fail(DORA_SCALE, "the magnitude of DoRA is there twice", _AGAIN)
        if UP_BIAS in self.parts and UP not in self.parts:
            self.fail(UP_BIAS, "it is the bias of matrices that are missing", _AGAIN)
        for part in (DIFF, SET, *self.biases):
            shape = self.shapes.get(part, (1,))
            if not shape or (part in _BIASES and len(shape) != 1):
                self.fail(part, f"its shape is {list(shape)}", _AGAIN)
        if not self.parts.keys() - _SETTINGS:
            part = next(iter(self.parts))
            self.fail(part, "it belongs to matrices that are missing", _AGAIN)

    def _check_complete(self, factors: tuple[str, ...]) -> None:
        found = [part for part in factors if part in self.parts]
        if found and len(found) < len(factors):
            missing = next(part for part in factors if part not in self.parts)
            some = "one half of a low-rank pair" if len(factors) == 2 else "not all matrices"
            self.fail(found[0], f"{some} is there: {missing} is missing", _AGAIN)

    def _check_pair(self, up: str, down: str) -> None:
        if up not in self.parts:
            return
        first, second = self.shapes[up], self.shapes[down]
        if len(first) != 2 or len(second) < 2 or first[1] != second[0]:
            self.fail(
                up, f"incompatible shapes of a pair: {list(second)} and {list(first)}", _AGAIN
            )
        if 0 in first or 0 in second:
            problem = "a low-rank pair of rank 0" if not second[0] else "an empty matrix"
            self.fail(up, problem, "save the adapter again without empty layers")

    def _factor(self, name: str) -> tuple[int, int]:
        if name in self.shapes:
            rows, columns = self.shapes[name]
            return rows, columns
        return self.shapes[f"{name}_a"][0], self.shapes[f"{name}_b"][1]

    def fail(self, part: str, problem: str, hint: str) -> None:
        """Raise a FormatError about the tensor of a part."""
        raise FormatError(f"{self.what}: {self.parts[part][:200]}: {problem}", hint=hint)


@dataclass(frozen=True, slots=True)
class AdapterLayers:
    """The layers of an adapter, and the tensors (flags) that belong to all of them."""

    layers: tuple[AdapterLayer, ...]
    flags: Mapping[str, str]


def read_layers(
    what: str, shapes: Mapping[str, Shape], config: PeftConfig | None = None
) -> AdapterLayers:
    """Return the layers of an adapter with tensors ``shapes``; ``what`` names it in messages.

    Raises:
        FormatError: A tensor is not one of an adapter, is of a kind that cannot be read, is there
            twice, or does not match its other half.
    """
    found: dict[str, AdapterLayer] = {}
    for name, shape in shapes.items():
        stem, part = _split(what, name, config)
        layer = found.setdefault(stem, AdapterLayer(what, stem))
        if part in layer.parts:
            raise FormatError(
                f"{what} has two tensors for one purpose: {layer.parts[part][:200]} and "
                f"{name[:200]}",
                hint="keep one of them: a file contains a single adapter",
            )
        layer.parts[part], layer.shapes[part] = name, _matrix(shape)
    flags = found.pop("", AdapterLayer(what, "")).parts
    if odd := flags.keys() - {names.DORA_FLAG, names.RSLORA_FLAG}:
        raise FormatError(f"{what}: {flags[min(odd)][:200]} names no layer", hint=_AGAIN)
    for layer in found.values():
        layer.check()
    if not any(len(layer.parts) for layer in found.values()):
        raise FormatError(f"{what} contains no tensors of an adapter", hint=_AGAIN)
    return AdapterLayers(tuple(found.values()), flags)


def _split(what: str, name: str, config: PeftConfig | None) -> tuple[str, str]:
    split = names.split_name(name)
    if split is not None:
        return split
    if (kind := names.unsupported_kind(name)) is not None:
        raise FormatError(
            f"{what} is of a kind that is not supported: {kind} (its tensor {name[:200]})",
            hint="LoRA, LoHa, LoKr, DoRA and whole differences can be read",
        )
    module, _, leaf = name.rpartition(".")
    if config is not None and leaf in ("weight", "bias"):
        if config.saves(dotted_module(module)):
            return module, SET if leaf == "weight" else SET_BIAS
        if leaf == "bias" and config.has_biases:
            return module, SET_BIAS
    raise FormatError(
        f"{what}: {name[:200]} is not a tensor of an adapter",
        hint="LoRA, LoHa, LoKr, DoRA and whole differences can be read",
    )


def _matrix(shape: Shape) -> Shape:
    """Return a shape without the dimensions of 1 that convolutions have at the end."""
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
