"""The changed layers of an adapter and the kinds of their changes, from names and shapes."""

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
from clowder_aimage.adapter.target import strip_tool_prefixes
from clowder_aimage.errors import FormatError
from clowder_aimage.tensor.wrapper_name import strip_wrappers

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
# Roles of tensors that are not changes by themselves.
_SETTINGS = {ALPHA, names.RESHAPE, names.DORA_FLAG, names.RSLORA_FLAG}


@dataclass(frozen=True, slots=True)
class AdapterLayer:
    """The tensors for a layer. ``tensors`` maps roles to names of tensors, ``shapes`` to shapes.

    Shapes are those of matrices: the last dimensions of convolutions are omitted if they are 1.
    """

    label: str
    stem: str
    tensors: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of matrices, without differences and magnitudes."""
        pairs = [kind for kind, factors in _FACTORS.items() if factors[0] in self.tensors]
        return (*pairs, *((LOKR,) if self.kron else ()))

    @property
    def kron(self) -> tuple[str, ...]:
        """Return the roles in a Kronecker product, in order: of its factors or of their pairs."""
        return tuple(role for role in KRON if role in self.tensors)

    @property
    def is_decomposed(self) -> bool:
        """Return True if the layer has a magnitude (DoRA)."""
        return MAGNITUDE in self.tensors or DORA_SCALE in self.tensors

    @property
    def ranks(self) -> dict[str, int]:
        """Return the ranks by kind; a Kronecker product of matrices has none."""
        downs = {LORA: self.shapes.get(DOWN), TABLE: self.shapes.get(TABLE_DOWN)}
        downs[LOHA] = self.shapes.get(HADA[1])
        downs[LOKR] = self.shapes.get("lokr_w2_b") or self.shapes.get("lokr_w1_b")
        return {kind: shape[0] for kind, shape in downs.items() if shape is not None}

    @property
    def changes(self) -> Iterator[tuple[str, Shape]]:
        """Yield the name of a tensor of each change, and the shape of the change."""
        shapes = self.shapes
        if DOWN in shapes:
            yield self.tensors[UP], (shapes[UP][0], math.prod(shapes[DOWN][1:]))
        if TABLE_DOWN in shapes:
            yield self.tensors[TABLE_DOWN], (shapes[TABLE_DOWN][1], shapes[TABLE_UP][0])
        if HADA[0] in shapes:
            for up, down in (HADA[:2], HADA[2:]):
                yield self.tensors[up], (shapes[up][0], shapes[down][1])
        if self.kron:
            rows, columns = self._get_factor_shape("lokr_w1"), self._get_factor_shape("lokr_w2")
            yield (
                self.tensors[self.kron[0]],
                tuple(a * b for a, b in zip(rows, columns, strict=True)),
            )
        for role in (DIFF, SET):
            if role in shapes:
                yield self.tensors[role], shapes[role]

    @property
    def biases(self) -> Iterator[str]:
        """Yield the roles of the tensors that change the layer's bias."""
        return (role for role in _BIASES if role in self.tensors)

    def check(self) -> None:
        """Check that each change has all its tensors and that they match. Raises FormatError."""
        for factors in _FACTORS.values():
            self._check_complete(factors)
        for name in ("lokr_w1", "lokr_w2") if self.kron else ():
            self._check_factor(name)
        for up, down in _PAIRS:
            self._check_pair(up, down)
        self._check_others()

    def _check_factor(self, name: str) -> None:
        pair = (f"{name}_a", f"{name}_b")
        is_pair = any(role in self.tensors for role in pair)
        if is_pair:
            self._check_complete(pair)
        if name not in self.tensors:
            if not is_pair:
                self.fail(self.kron[0], f"{name} is missing", _AGAIN)
            return
        if is_pair:
            self.fail(name, "a factor occurs twice, as a matrix and as a pair", _AGAIN)
        if len(self.shapes[name]) != 2 or 0 in self.shapes[name]:
            self.fail(name, f"its shape is {list(self.shapes[name])}, not a matrix", _AGAIN)

    def _check_others(self) -> None:
        if self.is_decomposed:
            role = MAGNITUDE if MAGNITUDE in self.tensors else DORA_SCALE
            kinds = " and ".join(self.kinds) or "no matrices"
            if len(self.kinds) != 1:
                self.fail(role, f"the magnitude of DoRA has {kinds} beside it", _AGAIN)
        if MAGNITUDE in self.tensors and DORA_SCALE in self.tensors:
            self.fail(DORA_SCALE, "the magnitude of DoRA occurs twice", _AGAIN)
        if UP_BIAS in self.tensors and UP not in self.tensors:
            self.fail(UP_BIAS, "it is the bias of matrices that are missing", _AGAIN)
        for role in (DIFF, SET, *self.biases):
            shape = self.shapes.get(role, (1,))
            if not shape or (role in _BIASES and len(shape) != 1):
                self.fail(role, f"its shape is {list(shape)}", _AGAIN)
        if not self.tensors.keys() - _SETTINGS:
            role = next(iter(self.tensors))
            self.fail(role, "it belongs to matrices that are missing", _AGAIN)

    def _check_complete(self, factors: tuple[str, ...]) -> None:
        present = [role for role in factors if role in self.tensors]
        if present and len(present) < len(factors):
            missing = next(role for role in factors if role not in self.tensors)
            problem = "one half of a low-rank pair" if len(factors) == 2 else "not all matrices"
            self.fail(present[0], f"{problem} is there: {missing} is missing", _AGAIN)

    def _check_pair(self, up: str, down: str) -> None:
        if up not in self.tensors:
            return
        up_shape, down_shape = self.shapes[up], self.shapes[down]
        if len(up_shape) != 2 or len(down_shape) < 2 or up_shape[1] != down_shape[0]:
            self.fail(
                up,
                f"incompatible shapes of a pair: {list(down_shape)} and {list(up_shape)}",
                _AGAIN,
            )
        if 0 in up_shape or 0 in down_shape:
            problem = "a low-rank pair of rank 0" if not down_shape[0] else "an empty matrix"
            self.fail(up, problem, "save the adapter again without empty layers")

    def _get_factor_shape(self, name: str) -> tuple[int, int]:
        if name in self.shapes:
            rows, columns = self.shapes[name]
            return rows, columns
        return self.shapes[f"{name}_a"][0], self.shapes[f"{name}_b"][1]

    def fail(self, role: str, problem: str, hint: str) -> None:
        """Raise a FormatError about the tensor of a role."""
        raise FormatError(f"{self.label}: {self.tensors[role][:200]}: {problem}", hint=hint)


@dataclass(frozen=True, slots=True)
class AdapterLayers:
    """The layers of an adapter, and the tensors of flags for all layers.

    embeddings: the words whose embeddings are in the file (textual inversion), and are not used.
    """

    layers: tuple[AdapterLayer, ...]
    flags: Mapping[str, str]
    embeddings: tuple[str, ...] = ()


def read_layers(
    label: str, shapes: Mapping[str, Shape], config: PeftConfig | None = None
) -> AdapterLayers:
    """Return the layers of an adapter with tensors ``shapes``; ``label`` names it in messages.

    Raises:
        FormatError: A tensor does not belong to an adapter, is of an unsupported kind, occurs
            twice, or does not match its other half.
    """
    layers: dict[str, AdapterLayer] = {}
    embeddings: dict[str, None] = {}
    for name, shape in shapes.items():
        if (match := names.EMBEDDING.fullmatch(name)) is not None:
            embeddings.setdefault(match["word"])
            continue
        stem, role = _split(label, strip_wrappers(name), config)
        layer = layers.setdefault(stem, AdapterLayer(label, stem))
        if role in layer.tensors:
            raise FormatError(
                f"{label} has two tensors for one purpose: {layer.tensors[role][:200]} and "
                f"{name[:200]}",
                hint="keep one of them: a file contains a single adapter",
            )
        layer.tensors[role], layer.shapes[role] = name, _squeeze_shape(shape)
    flags = layers.pop("", AdapterLayer(label, "")).tensors
    if unknown := flags.keys() - {names.DORA_FLAG, names.RSLORA_FLAG}:
        raise FormatError(f"{label}: {flags[min(unknown)][:200]} names no layer", hint=_AGAIN)
    for layer in layers.values():
        layer.check()
    if not any(len(layer.tensors) for layer in layers.values()):
        only = f", but the embeddings {', '.join(embeddings):.200}" if embeddings else ""
        raise FormatError(f"{label} contains no tensors of an adapter{only}", hint=_AGAIN)
    return AdapterLayers(tuple(layers.values()), flags, tuple(embeddings))


def _split(label: str, name: str, config: PeftConfig | None) -> tuple[str, str]:
    split = names.split_name(name)
    if split is not None:
        return split
    if (kind := names.find_unsupported_kind(name)) is not None:
        raise FormatError(
            f"{label} is of a kind that is not supported: {kind} (its tensor {name[:200]})",
            hint="LoRA, LoHa, LoKr, DoRA and whole differences can be read",
        )
    module, _, leaf = name.rpartition(".")
    if config is not None and leaf in ("weight", "bias"):
        if config.is_saved(strip_tool_prefixes(module)):
            return module, SET if leaf == "weight" else SET_BIAS
        if leaf == "bias" and config.has_biases:
            return module, SET_BIAS
    raise FormatError(
        f"{label}: {name[:200]} is not a tensor of an adapter",
        hint="LoRA, LoHa, LoKr, DoRA and whole differences can be read",
    )


def _squeeze_shape(shape: Shape) -> Shape:
    """Return a shape without the last dimensions of 1 of convolutions."""
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
