"""Rotary position embeddings without arrays of a library: configurations and positions.

Source: YaRN (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clowder_aimage.tensor.config_fields import ConfigFields

Floats = npt.NDArray[np.float32]
# The logarithm of the base is a divisor
MIN_THETA = 1.001


def place_pixels(positions: npt.NDArray[np.int64], height: int, width: int) -> None:
    """Write row and column, row by row, to the columns 1 and 2 of positions of a picture."""
    positions[:, 1] = np.repeat(np.arange(height), width)
    positions[:, 2] = np.tile(np.arange(width), height)


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
        raw = config.get_raw("rope_parameters", config.get_raw("rope_scaling", {}))
        if not isinstance(raw, dict):
            raise config.refuse("rope_parameters", "must be an object")
        fields = ConfigFields(config.name, {"rope_theta": config.get_raw("rope_theta"), **raw})
        theta = fields.get_number("rope_theta", 10000.0, minimum=MIN_THETA)
        kind = fields.get_text("rope_type", fields.get_text("type", "default"))
        fields.check_value("partial_rotary_factor", 1.0)
        if kind == "default":
            return cls(dim, theta)
        factor = fields.get_number("factor", minimum=1e-3, maximum=1e6)
        if kind == "linear":
            return cls(dim, theta, kind, factor)
        if kind != "yarn":
            raise config.refuse("rope_parameters", "only default, linear and yarn are supported")
        return cls(
            dim,
            theta,
            kind,
            factor,
            _parse_yarn_attention(fields, factor),
            fields.get_integer(
                "original_max_position_embeddings", config.get_integer("max_position_embeddings")
            ),
            fields.get_number("beta_fast", 32.0, minimum=1e-3, maximum=1e6),
            fields.get_number("beta_slow", 1.0, minimum=1e-3, maximum=1e6),
            fields.get_boolean("truncate", True),
        )

    def compute_angles(self, length: int) -> Floats:
        """Return the angles (length, dim / 2) of the positions 0 to length - 1."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        # Powers in float64, rounded to float32 once
        powers = np.float64(self.theta) ** exponents.astype(np.float64)
        inverse = np.float32(1) / powers.astype(np.float32)
        if self.kind == "linear":
            inverse = inverse / np.float32(self.factor)
        elif self.kind == "yarn":
            keep = self._compute_yarn_keep()
            inverse = inverse / np.float32(self.factor) * (1 - keep) + inverse * keep
        angles = np.outer(np.arange(length, dtype=np.float32), inverse.astype(np.float32))
        return angles.astype(np.float32)

    def _compute_yarn_keep(self) -> Floats:
        """Return the unchanged share of every frequency under YaRN, 1 to 0."""

        def find_dimension(turns: float) -> float:
            period = self.original_length / (turns * 2 * math.pi)
            return self.dim * math.log(period) / (2 * math.log(self.theta))

        low, high = find_dimension(self.beta_fast), find_dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        # As in the reference, against a division by 0
        if low == high:
            high += 0.001
        ramp = (np.arange(self.dim // 2, dtype=np.float32) - low) / (high - low)
        keep: Floats = (1 - np.clip(ramp, 0, 1)).astype(np.float32)
        return keep


def _parse_yarn_attention(fields: ConfigFields, factor: float) -> float:
    """Return the factor on cosines and sines: stated, or 0.1 ln(factor) + 1 (YaRN, section 3.4)."""
    if fields.get_raw("attention_factor") is not None:
        return fields.get_number("attention_factor", minimum=1e-3, maximum=1e3)

    def scale_of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.get_raw("mscale") and fields.get_raw("mscale_all_dim"):
        above, below = (
            fields.get_number(key, minimum=0, maximum=1e3) for key in ("mscale", "mscale_all_dim")
        )
        return scale_of(above) / scale_of(below)
    return scale_of(1.0)
