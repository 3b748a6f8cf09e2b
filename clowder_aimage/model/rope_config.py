"""Rotary position embeddings without arrays of a library: configurations and frequencies.

Sources: transformers, ``modeling_rope_utils.py``; YaRN (arXiv 2309.00071), LongRoPE (arXiv
2402.13753).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.errors import ModelError
from clowder_aimage.model.rope_setting import KINDS, find_rope_kind
from clowder_aimage.tensor.config_fields import ConfigFields

Floats = npt.NDArray[np.float32]
# The logarithm of the base is a divisor
MIN_THETA = 1.001
_MAX_FACTOR = 1e6


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding of heads: base, and scaling to longer contexts.

    dim: the rotated channels. low, high: the ends of the blend of llama3. short, long: divisors of
    longrope, for texts up to ``original_length`` and longer ones.
    """

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    original_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low: float = 1.0
    high: float = 4.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @classmethod
    def parse(cls, name: str, settings: Mapping[str, Any], head: int, length: int) -> RopeConfig:
        """Read the settings of a layer.

        head: the channels of a head. length: the longest context of the model.

        Raises:
            ModelError: The kind is unknown, or a value is invalid.
        """
        fields = ConfigFields(name, settings)
        theta = fields.get_number("rope_theta", minimum=MIN_THETA)
        dim = int(head * fields.get_number("partial_rotary_factor", 1.0, minimum=0.0, maximum=1.0))
        if dim < 2 or dim % 2:
            raise fields.refuse("partial_rotary_factor", f"rotates {dim} of {head} channels")
        if not (kind := find_rope_kind(settings)):
            raise fields.refuse(
                "rope_type" if "rope_type" in settings else "type",
                f"only {', '.join(KINDS)} are supported",
            )
        return cls(dim, theta, kind, **_PARSERS[kind](fields, length))

    def compute_frequencies(self, *, is_long: bool = False) -> Floats:
        """Return the radians per position of each pair of channels, (dim / 2).

        is_long: with the divisors for texts that are longer than the original context.
        """
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        # Powers in float64, rounded to float32 once
        powers = np.float64(self.theta) ** exponents.astype(np.float64)
        inverse: Floats = np.float32(1) / powers.astype(np.float32)
        if self.kind == "linear":
            inverse = inverse / np.float32(self.factor)
        elif self.kind == "yarn":
            keep = self._compute_yarn_keep()
            inverse = inverse / np.float32(self.factor) * (1 - keep) + inverse * keep
        elif self.kind == "llama3":
            # Slow turns are divided, fast ones stay, and those between are blended
            turns = self.original_length * inverse / (2 * math.pi)
            keep = np.clip((turns - self.low) / (self.high - self.low), 0, 1).astype(np.float32)
            inverse = inverse / np.float32(self.factor) * (1 - keep) + inverse * keep
        elif self.kind == "longrope":
            divisors = self.long if is_long else self.short
            if len(divisors) != len(inverse):
                raise ModelError(
                    f"rope_parameters of config.json: {len(divisors)} factors of longrope for "
                    f"{len(inverse)} pairs of channels"
                )
            inverse = (inverse / np.array(divisors, dtype=np.float32)).astype(np.float32)
        return inverse

    def compute_angles(self, length: int) -> Floats:
        """Return the angles (length, dim / 2) of the positions 0 to length - 1."""
        positions = np.arange(length, dtype=np.float32)
        return np.outer(positions, self.compute_frequencies()).astype(np.float32)

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


def _parse_default(fields: ConfigFields, length: int) -> dict[str, Any]:  # noqa: ARG001
    return {}


def _parse_linear(fields: ConfigFields, length: int) -> dict[str, Any]:  # noqa: ARG001
    return {"factor": _get_factor(fields)}


def _parse_yarn(fields: ConfigFields, length: int) -> dict[str, Any]:
    original = _get_length(fields, length)
    factor = _get_factor(fields, length / original)
    return {
        "factor": factor,
        "attention_factor": _parse_yarn_attention(fields, factor),
        "original_length": original,
        "beta_fast": fields.get_number("beta_fast", 32.0, minimum=1e-3, maximum=_MAX_FACTOR),
        "beta_slow": fields.get_number("beta_slow", 1.0, minimum=1e-3, maximum=_MAX_FACTOR),
        "truncate": fields.get_boolean("truncate", True),
    }


def _parse_llama3(fields: ConfigFields, length: int) -> dict[str, Any]:
    low = fields.get_number("low_freq_factor", minimum=1e-3, maximum=_MAX_FACTOR)
    high = fields.get_number("high_freq_factor", minimum=1e-3, maximum=_MAX_FACTOR)
    if high <= low:
        raise fields.refuse("high_freq_factor", "must be greater than low_freq_factor")
    original = _get_length(fields, length)
    return {"factor": _get_factor(fields), "original_length": original, "low": low, "high": high}


def _parse_longrope(fields: ConfigFields, length: int) -> dict[str, Any]:
    original = _get_length(fields, length)
    factor = _get_factor(fields, max(1.0, length / original))
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    return {
        "factor": factor,
        "attention_factor": fields.get_number("attention_factor", usual, minimum=1e-3, maximum=1e3),
        "original_length": original,
        "short": _get_divisors(fields, "short_factor"),
        "long": _get_divisors(fields, "long_factor"),
    }


_PARSERS = {
    "default": _parse_default,
    "linear": _parse_linear,
    "yarn": _parse_yarn,
    "llama3": _parse_llama3,
    "longrope": _parse_longrope,
}


def _get_factor(fields: ConfigFields, default: float | None = None) -> float:
    return fields.get_number("factor", default, minimum=1e-3, maximum=_MAX_FACTOR)


def _get_length(fields: ConfigFields, length: int) -> int:
    return fields.get_integer("original_max_position_embeddings", length)


def _get_divisors(fields: ConfigFields, key: str) -> tuple[float, ...]:
    value = fields.get_raw(key)
    if not isinstance(value, list) or not all(
        type(item) in (int, float) and 1e-3 <= item <= _MAX_FACTOR for item in value
    ):
        raise fields.refuse(key, "must be a list of numbers above 0")
    return tuple(map(float, value))


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
