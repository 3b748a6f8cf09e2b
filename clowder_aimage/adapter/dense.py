"""Changes as whole matrices, in float32: to fuse adapters into weights, and for norms of rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from clowder_aimage.adapter.adapter import (
    Change,
    Decomposed,
    DenseChange,
    Floats,
    Hadamard,
    Linear,
    LowRank,
    Norm,
    Replacement,
)

_TINY = float(np.finfo(np.float32).tiny) ** 0.5  # of a row that is zero
EPSILON = float(np.finfo(np.float32).eps)  # added to norms, as ComfyUI does


def changed(weight: Floats, uses: Iterable[tuple[Change, float]]) -> Floats:
    """Return ``weight`` with changes and their strengths: summed in float32, added once.

    Each change is computed from the unchanged weight, whatever the others do.
    """
    total = np.zeros(weight.shape, dtype=np.float32)
    for change, strength in uses:
        total += effect(weight, change, strength)
    total += weight
    return total


def effect(weight: Floats, change: Change, strength: float) -> Floats:
    """Return what ``change`` adds to ``weight`` with a strength."""
    t = np.float32(strength)
    if not isinstance(change, Decomposed):
        moved = change.values - weight if isinstance(change, Replacement) else delta(change)
        return np.asarray(t * moved)
    sums = difference(change.parts)
    magnitude = change.magnitude
    if change.norm is Norm.CHANGED:
        moved = weight + t * sums
        return np.asarray(
            magnitude[:, None] * moved / np.maximum(norms(moved, 1), _TINY)[:, None] - weight
        )
    moved = weight + sums
    if change.norm is Norm.ROWS:
        factors = (magnitude / (norms(weight, 1) + EPSILON))[:, None]
    else:
        factors = (magnitude / (norms(moved, 0) + EPSILON))[None]
    return np.asarray(t * (factors * moved - weight))


def difference(parts: Iterable[Linear]) -> Floats:
    """Return the sum of the changes as a matrix."""
    total = None
    for part in parts:
        total = delta(part) if total is None else total + delta(part)
    assert total is not None  # noqa: S101 - a decomposed change has parts
    return total


def delta(change: Linear) -> Floats:
    """Return a linear change as a matrix."""
    if isinstance(change, DenseChange):
        return change.values
    scale = np.float32(change.scale)
    if isinstance(change, LowRank):
        return scale * (change.up @ change.down)
    if isinstance(change, Hadamard):
        return scale * (delta(change.first) * delta(change.second))
    first, second = matrix(change.first), matrix(change.second)
    return scale * np.kron(first, second)[change.start : change.stop]


def matrix(factor: Floats | LowRank) -> Floats:
    """Return a factor of a Kronecker product as a matrix."""
    return delta(factor) if isinstance(factor, LowRank) else factor


def norms(values: Floats, axis: int) -> Floats:
    """Return the Euclidean norms along an axis."""
    sums: Floats = np.square(values).sum(axis=axis, dtype=np.float32)
    return np.sqrt(sums)
