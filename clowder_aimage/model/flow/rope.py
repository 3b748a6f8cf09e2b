"""Rotary position embeddings: one axis in halves (Qwen), several axes in pairs (Z-Image, FLUX.2).

Angles are computed as in the references: in float64 (FLUX.2), rounded to float32 (Z-Image), or in
float32 (Qwen). Cosines and sines are computed once per length on the CPU, so that all devices use
the same tables. Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.model.backend import mx
from clowder_aimage.model.operation import contiguous, in_blocks, is_slow, memory
from clowder_aimage.tensor.config_fields import ConfigFields

Table = tuple[mx.array, mx.array]  # cosines and sines
Floats = npt.NDArray[np.float32]
MIN_THETA = 1.001  # the logarithm of the base is a divisor


def table(angles: npt.NDArray[np.floating[Any]], scale: float = 1.0) -> Table:
    """Return cosine and sine of angles, each rounded once, times ``scale``."""
    exact = angles.astype(np.float64)
    cosines = np.cos(exact).astype(np.float32) * np.float32(scale)
    sines = np.sin(exact).astype(np.float32) * np.float32(scale)
    return mx.array(cosines), mx.array(sines)


def rotate_halves(arrays: list[mx.array], rope: Table) -> list[mx.array]:
    """Rotate channel i with channel i + d/2. tables: (length, d/2).

    arrays: (1, length, heads, d); they may be overwritten.
    """
    if not is_slow(arrays[0]):
        return [_rotated_halves(array, rope) for array in arrays]
    *arrays, cosines, sines = contiguous(*arrays, *rope)
    tables = (memory(table)[:, None] for table in (cosines, sines))
    in_blocks(_turn_halves, *tables, *(memory(array)[0] for array in arrays))
    return arrays


def _turn_halves(cosines: Floats, sines: Floats, *arrays: Floats) -> None:
    for array in arrays:
        first, second = np.split(array, 2, axis=-1)
        turned = first * cosines - second * sines
        second *= cosines
        second += first * sines
        first[...] = turned


def _rotated_halves(x: mx.array, rope: Table) -> mx.array:
    cosines, sines = (part[:, None].astype(x.dtype) for part in rope)
    first, second = mx.split(x, 2, axis=-1)
    return mx.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )


def rotate_pairs(arrays: list[mx.array], rope: Table) -> list[mx.array]:
    """Rotate channel 2i with 2i + 1, in float32; tables: (length, d/2).

    arrays: (1, length, heads, d); they may be overwritten.
    """
    if not is_slow(arrays[0]):
        return [_rotated(array, *rope) for array in arrays]
    *arrays, cosines, sines = contiguous(*arrays, *rope)
    turns = memory(cosines) + 1j * memory(sines)
    pairs = [memory(array)[0].view(np.complex64) for array in arrays]
    in_blocks(_turn, turns[:, None], *pairs)
    return arrays


def _rotated(x: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    cosines, sines = cosines[:, None], sines[:, None]
    pairs = x.astype(mx.float32).reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = mx.stack([first * cosines - second * sines, first * sines + second * cosines], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def _turn(turns: npt.NDArray[np.complex64], *arrays: npt.NDArray[np.complex64]) -> None:
    for pairs in arrays:
        pairs *= turns


def place_pixels(positions: npt.NDArray[np.int64], height: int, width: int) -> None:
    """Write row and column, row by row, to the columns 1 and 2 of positions of a picture."""
    positions[:, 1] = np.repeat(np.arange(height), width)
    positions[:, 2] = np.tile(np.arange(width), height)


def axes_table(
    positions: npt.NDArray[np.int64],
    axes_dims: tuple[int, ...],
    theta: float,
    *,
    is_exact: bool = False,
) -> Table:
    """Return tables (length, sum(axes_dims) / 2) for positions of shape (length, axes).

    Angles are rounded to float32, unless ``is_exact``.
    """
    angles = []
    for axis, dim in enumerate(axes_dims):
        frequencies = 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
        angles.append(np.outer(positions[:, axis].astype(np.float64), frequencies))
    joined = np.concatenate(angles, axis=1)
    return table(joined if is_exact else joined.astype(np.float32))


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding of a Qwen text encoder: base, and scaling to longer contexts."""

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    original_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def parse(cls, config: ConfigFields, dim: int) -> RopeConfig:
        """Read ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (4).

        Raises:
            ModelError: The kind is not default, linear or yarn.
        """
        raw = config.raw("rope_parameters", config.raw("rope_scaling", {}))
        if not isinstance(raw, dict):
            raise config.refuse("rope_parameters", "must be an object")
        fields = ConfigFields(config.name, {"rope_theta": config.raw("rope_theta"), **raw})
        theta = fields.number("rope_theta", 10000.0, minimum=MIN_THETA)
        kind = fields.text("rope_type", fields.text("type", "default"))
        fields.only("partial_rotary_factor", 1.0)
        if kind == "default":
            return cls(dim, theta)
        factor = fields.number("factor", minimum=1e-3, maximum=1e6)
        if kind == "linear":
            return cls(dim, theta, kind, factor)
        if kind != "yarn":
            raise config.refuse("rope_parameters", "only default, linear and yarn are supported")
        return cls(
            dim,
            theta,
            kind,
            factor,
            _yarn_attention(fields, factor),
            fields.integer(
                "original_max_position_embeddings", config.integer("max_position_embeddings")
            ),
            fields.number("beta_fast", 32.0, minimum=1e-3, maximum=1e6),
            fields.number("beta_slow", 1.0, minimum=1e-3, maximum=1e6),
            fields.boolean("truncate", True),
        )

    def table(self, length: int) -> Table:
        """Return tables of shape (length, dim / 2) for the positions 0 to length - 1."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        powers = np.float64(self.theta) ** exponents.astype(np.float64)
        inverse = np.float32(1) / powers.astype(np.float32)
        if self.kind == "linear":
            inverse = inverse / np.float32(self.factor)
        elif self.kind == "yarn":
            keep = self._yarn_keep()
            inverse = inverse / np.float32(self.factor) * (1 - keep) + inverse * keep
        angles = np.outer(np.arange(length, dtype=np.float32), inverse.astype(np.float32))
        return table(angles.astype(np.float32), self.attention_factor)

    def _yarn_keep(self) -> Floats:
        """Return the share of every frequency that YaRN leaves unchanged, 1 to 0."""

        def dimension(turns: float) -> float:
            period = self.original_length / (turns * 2 * math.pi)
            return self.dim * math.log(period) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = (np.arange(self.dim // 2, dtype=np.float32) - low) / (high - low)
        keep: Floats = (1 - np.clip(ramp, 0, 1)).astype(np.float32)
        return keep


def _yarn_attention(fields: ConfigFields, factor: float) -> float:
    """Return the factor on cosines and sines: given, or 0.1 ln(factor) + 1 (YaRN, section 3.4)."""
    if fields.raw("attention_factor") is not None:
        return fields.number("attention_factor", minimum=1e-3, maximum=1e3)

    def scaled(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.raw("mscale") and fields.raw("mscale_all_dim"):
        above, below = (
            fields.number(key, minimum=0, maximum=1e3) for key in ("mscale", "mscale_all_dim")
        )
        return scaled(above) / scaled(below)
    return scaled(1.0)
