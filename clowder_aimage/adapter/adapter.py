"""The changes of an adapter, by tensor of the base model, and their kinds.

A change, times the strength t of the adapter, is added to a tensor W of the base.
Matrices are (out, in), as in torch. Sources: LoRA (arXiv 2106.09685), LoHa and LoKr (LyCORIS,
arXiv 2309.14859), DoRA (arXiv 2402.09353), ComfyUI's ``comfy/weight_adapter``, peft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """LoRA: ``scale * up @ down``; ``down`` is (rank, in), ``up`` (out, rank)."""

    down: Floats
    up: Floats
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        return self.up.shape[0], self.down.shape[1]

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])

    def slice_rows(self, start: int, stop: int) -> LowRank:
        """Return the change of these rows of the matrix."""
        return LowRank(self.down, self.up[start:stop], self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Hadamard:
    """LoHa: ``scale * (first.up @ first.down) * (second.up @ second.down)``, by element.

    The scales of ``first`` and ``second`` are 1.
    """

    first: LowRank
    second: LowRank
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        return self.first.shape

    def slice_rows(self, start: int, stop: int) -> Hadamard:
        """Return the change of these rows of the matrix."""
        return Hadamard(
            self.first.slice_rows(start, stop), self.second.slice_rows(start, stop), self.scale
        )


@dataclass(frozen=True, slots=True, eq=False)
class Kronecker:
    """LoKr: rows ``start`` to ``stop`` of ``scale * kron(first, second)``.

    The factors are matrices, or low-rank pairs with a scale of 1.
    """

    first: Floats | LowRank
    second: Floats | LowRank
    scale: float = 1.0
    start: int = 0
    stop: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = (a * b for a, b in zip(self.first.shape, self.second.shape, strict=True))
        return (rows if self.stop is None else self.stop) - self.start, columns

    def slice_rows(self, start: int, stop: int) -> Kronecker:
        """Return the change of these rows of the matrix."""
        return Kronecker(self.first, self.second, self.scale, self.start + start, self.start + stop)


@dataclass(frozen=True, slots=True, eq=False)
class DenseChange:
    """A difference of the tensor's shape, also of norms and biases."""

    values: Floats

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def slice_rows(self, start: int, stop: int) -> DenseChange:
        """Return the change of these rows."""
        return DenseChange(self.values[start:stop])


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """Other values V for the tensor: the change is V - W."""

    values: Floats

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def slice_rows(self, start: int, stop: int) -> Replacement:
        """Return the change of these rows."""
        return Replacement(self.values[start:stop])


Linear = LowRank | Hadamard | Kronecker | DenseChange


class Norm(Enum):
    """The norm replaced by a magnitude m. D is the change without its strength t.

    CHANGED (peft): m (W + tD) / row norm of (W + tD). ROWS (kohya, LyCORIS; m is [out]):
    W + t (m (W + D) / row norm of W - W). COLUMNS (m is [in]): W + t (m (W + D) / column norm of
    (W + D) - W). The last two follow ComfyUI, which adds float32's epsilon to the norm.
    """

    CHANGED = "changed"
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True, eq=False)
class Decomposed:
    """DoRA: a magnitude for each row, or column, of the matrix after ``changes``."""

    changes: tuple[Linear, ...]
    magnitude: Floats
    norm: Norm

    @property
    def shape(self) -> tuple[int, ...]:
        return self.changes[0].shape

    def slice_rows(self, start: int, stop: int) -> Decomposed:
        """Return the change of these rows. Not for COLUMNS: their norms need all rows."""
        changes = tuple(change.slice_rows(start, stop) for change in self.changes)
        return Decomposed(changes, self.magnitude[start:stop], self.norm)


Change = Linear | Replacement | Decomposed


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The changes by tensor of the base: ``transformer/layers.0.attention.to_q.weight``.

    The changes of a tensor are added. ``label`` names the adapter in messages. ``embeddings`` are
    words whose embeddings are in its file, and are not used.
    """

    label: str
    changes: Mapping[str, tuple[Change, ...]] = field(default_factory=dict)
    embeddings: tuple[str, ...] = ()

    @property
    def warning(self) -> str | None:
        """Return a sentence about the unused parts of its file, or None."""
        if not self.embeddings:
            return None
        words = ", ".join(self.embeddings)
        return f"{self.label} has embeddings of its own for {words:.200}, which are not used"

    @property
    def nbytes(self) -> int:
        """Return the size of the values in bytes."""
        return sum(
            array.nbytes for changes in self.changes.values() for array in _list_arrays(changes)
        )


def _list_arrays(changes: tuple[object, ...]) -> list[Floats]:
    arrays: list[Floats] = []
    for change in changes:
        match change:
            case np.ndarray():
                arrays.append(change)
            case LowRank():
                arrays += [change.down, change.up]
            case Hadamard() | Kronecker():
                arrays += _list_arrays((change.first, change.second))
            case DenseChange() | Replacement():
                arrays.append(change.values)
            case Decomposed():
                arrays += [*_list_arrays(change.changes), change.magnitude]
    return arrays
