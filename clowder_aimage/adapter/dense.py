"""Changes as dense matrices in float32, for fusing adapters into weights and for norms."""

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

# The norm of a row of zeros.
_TINY = float(np.finfo(np.float32).tiny) ** 0.5
# ComfyUI adds it to norms.
EPSILON = float(np.finfo(np.float32).eps)


def apply_changes(weight: Floats, uses: Iterable[tuple[Change, float]]) -> Floats:
    """Return ``weight`` with the sum of the changes, times their strengths, in float32.

    Each change is computed from the unchanged weight, so their order has no effect.
    """
    total = np.zeros(weight.shape, dtype=np.float32)
    for change, strength in uses:
        total += compute_effect(weight, change, strength)
    total += weight
    return total


def compute_effect(weight: Floats, change: Change, strength: float) -> Floats:
    """Return the difference from ``weight`` of a change with a strength."""
    t = np.float32(strength)
    if not isinstance(change, Decomposed):
        changed = (
            change.values - weight if isinstance(change, Replacement) else compute_delta(change)
        )
        return np.asarray(t * changed)
    sums = sum_changes(change.changes)
    magnitude = change.magnitude
    # With peft's norm the strength is inside the norm; ComfyUI scales the difference afterwards.
    if change.norm is Norm.CHANGED:
        changed = weight + t * sums
        return np.asarray(
            magnitude[:, None] * changed / np.maximum(compute_norms(changed, 1), _TINY)[:, None]
            - weight
        )
    changed = weight + sums
    if change.norm is Norm.ROWS:
        factors = (magnitude / (compute_norms(weight, 1) + EPSILON))[:, None]
    else:
        factors = (magnitude / (compute_norms(changed, 0) + EPSILON))[None]
    return np.asarray(t * (factors * changed - weight))


def sum_changes(changes: Iterable[Linear]) -> Floats:
    """Return the sum of the changes as a matrix."""
    total = None
    for change in changes:
        total = compute_delta(change) if total is None else total + compute_delta(change)
    assert total is not None  # noqa: S101 - a decomposed change has changes
    return total


def compute_delta(change: Linear) -> Floats:
    """Return a linear change as a matrix."""
    if isinstance(change, DenseChange):
        return change.values
    scale = np.float32(change.scale)
    if isinstance(change, LowRank):
        return scale * (change.up @ change.down)
    if isinstance(change, Hadamard):
        return scale * (compute_delta(change.first) * compute_delta(change.second))
    first, second = expand_factor(change.first), expand_factor(change.second)
    return scale * np.kron(first, second)[change.start : change.stop]


def expand_factor(factor: Floats | LowRank) -> Floats:
    """Return a factor of a Kronecker product as a matrix."""
    return compute_delta(factor) if isinstance(factor, LowRank) else factor


def compute_norms(values: Floats, axis: int) -> Floats:
    """Return the Euclidean norms along an axis."""
    sums: Floats = np.square(values).sum(axis=axis, dtype=np.float32)
    return np.sqrt(sums)
