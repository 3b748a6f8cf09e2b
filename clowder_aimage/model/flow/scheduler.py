"""The noise levels of the sampler: Euler steps of flow matching.

Computed as in ``FlowMatchEulerDiscreteScheduler`` of diffusers when used by ``ZImagePipeline``:
sigmas from 1 to 1/N, shifted towards 1 (arXiv 2403.03206, section 5.3.2), with a 0 at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.errors import ModelError
from clowder_aimage.generation.check import build_parameter_error
from clowder_aimage.tensor.config_fields import ConfigFields

Floats = npt.NDArray[np.float32]
# The largest sigma is 1; the margin is for its rounding.
_MAX_SIGMA = 1.001
# The exponent of Karras' spacing, arXiv 2206.00364
_RHO = 7.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Noise levels: ``sigmas`` has one entry more than ``times``.

    ``times`` are what a network gets: 1 - sigma * num_train_timesteps / 1000.
    """

    sigmas: Floats
    times: Floats

    def skip_steps(self, start: int) -> Schedule:
        """Return the schedule without its first ``start`` steps."""
        return Schedule(self.sigmas[start:], self.times[start:])


@dataclass(frozen=True, slots=True)
class FlowScheduler:
    """The fields of ``scheduler/scheduler_config.json``."""

    num_train_timesteps: int
    shift: float
    dynamic: bool
    base_shift: float
    max_shift: float
    base_image_seq_len: int
    max_image_seq_len: int
    shift_terminal: float | None
    time_shift_type: str
    # "shifted", "karras" or "exponential"
    spacing: str
    invert: bool

    @classmethod
    def parse(cls, name: str, values: Mapping[str, Any]) -> FlowScheduler:
        """Read the configuration.

        Raises:
            ModelError: The configuration has another scheduler, stochastic sampling (drawn from an
                unseeded generator in the reference) or beta sigmas.
        """
        fields = ConfigFields(name, values)
        fields.check_value("_class_name", "FlowMatchEulerDiscreteScheduler")
        fields.check_value("use_beta_sigmas", False)
        fields.check_value("stochastic_sampling", False)
        kind = fields.get_text("time_shift_type", "exponential")
        if kind not in ("exponential", "linear"):
            raise fields.refuse("time_shift_type", "must be exponential or linear")
        karras = fields.get_boolean("use_karras_sigmas", False)
        exponential = fields.get_boolean("use_exponential_sigmas", False)
        if karras and exponential:
            raise fields.refuse("use_karras_sigmas", "conflicts with use_exponential_sigmas")
        terminal = fields.get_raw("shift_terminal")
        if terminal:
            fields.get_number("shift_terminal", minimum=1e-6, maximum=1 - 1e-6)
        scheduler = cls(
            num_train_timesteps=fields.get_integer("num_train_timesteps", 1000),
            shift=fields.get_number("shift", 1.0, minimum=1e-6, maximum=1e6),
            dynamic=fields.get_boolean("use_dynamic_shifting", False),
            base_shift=fields.get_number("base_shift", 0.5, minimum=-1e3, maximum=1e3),
            max_shift=fields.get_number("max_shift", 1.15, minimum=-1e3, maximum=1e3),
            base_image_seq_len=fields.get_integer("base_image_seq_len", 256),
            max_image_seq_len=fields.get_integer("max_image_seq_len", 4096),
            shift_terminal=terminal or None,
            time_shift_type=kind,
            spacing="karras" if karras else "exponential" if exponential else "shifted",
            invert=fields.get_boolean("invert_sigmas", False),
        )
        if scheduler.dynamic and scheduler.max_image_seq_len <= scheduler.base_image_seq_len:
            raise fields.refuse("max_image_seq_len", "must be above base_image_seq_len")
        fields.finish()
        return scheduler

    def schedule(
        self, steps: int, image_tokens: int, shift: float | None = None, mu: float | None = None
    ) -> Schedule:
        """Return the noise levels of ``steps`` steps for a picture of ``image_tokens`` tokens.

        ``shift`` replaces the static shift of the model, ``mu`` the one by picture size.

        Raises:
            UsageError: ``shift`` is set but the model shifts by picture size.
            ModelError: The levels are not finite, or not from 0 to 1.
        """
        if shift is not None and self.dynamic:
            raise build_parameter_error(
                "shift", "cannot be set: this model derives it from the size"
            )
        with suppress(ArithmeticError, ValueError), np.errstate(all="ignore"):
            levels = self._compute_levels(steps, image_tokens, shift, mu)
            # Comparisons with NaN are false
            is_noise = (levels.sigmas >= 0) & (levels.sigmas <= _MAX_SIGMA)
            if is_noise.all() and np.isfinite(levels.times).all():
                return levels
        raise ModelError(
            "the scheduler gives no noise levels from 0 to 1 for these steps and this size"
        )

    def _compute_levels(
        self, steps: int, image_tokens: int, shift: float | None, mu: float | None
    ) -> Schedule:
        sigmas = _linspace(1.0, 1.0 / steps, steps)
        if self.dynamic:
            sigmas = self._shift_by(self._compute_mu(image_tokens) if mu is None else mu, sigmas)
        else:
            factor = np.float32(self.shift if shift is None else shift)
            sigmas = factor * sigmas / (1 + (factor - np.float32(1)) * sigmas)
        # Stretched so that the last level before 0 is shift_terminal
        if self.shift_terminal is not None:
            remainder = 1 - sigmas
            sigmas = 1 - remainder / (remainder[-1] / np.float32(1 - self.shift_terminal))
        sigmas = self._space_sigmas(sigmas).astype(np.float32)
        if self.invert:
            sigmas = np.float32(1) - sigmas
        # The pipelines of diffusers divide by 1000, also if num_train_timesteps is different
        timesteps = sigmas * np.float32(self.num_train_timesteps)
        times = (np.float32(1000) - timesteps) / np.float32(1000)
        end = np.float32(1 if self.invert else 0)
        return Schedule(np.append(sigmas, end), times)

    def _compute_mu(self, tokens: int) -> float:
        # Not zero: see parse
        span = self.max_image_seq_len - self.base_image_seq_len
        slope = (self.max_shift - self.base_shift) / span
        return tokens * slope + self.base_shift - slope * self.base_image_seq_len

    def _shift_by(self, mu: float, sigmas: Floats) -> Floats:
        factor = np.float32(math.exp(mu) if self.time_shift_type == "exponential" else mu)
        return (factor / (factor + (1 / sigmas - 1))).astype(np.float32)

    def _space_sigmas(self, sigmas: Floats) -> npt.NDArray[np.floating[Any]]:
        """Return the sigmas, unchanged or with another spacing between their ends."""
        highest, lowest = float(sigmas[0]), float(sigmas[-1])
        if self.spacing == "karras":
            ramp = np.linspace(0, 1, len(sigmas))
            start, end = highest ** (1 / _RHO), lowest ** (1 / _RHO)
            return np.asarray((start + ramp * (end - start)) ** _RHO)
        if self.spacing == "exponential":
            return np.exp(np.linspace(math.log(highest), math.log(lowest), len(sigmas)))
        return sigmas


def _linspace(start: float, end: float, count: int) -> Floats:
    """Return torch.linspace in float32: from the start up to the middle, then from the end."""
    if count == 1:
        return np.array([start], dtype=np.float32)
    low, high = np.float32(start), np.float32(end)
    step = (high - low) / np.float32(count - 1)
    # torch computes each half from its own end, and rounds differently than numpy.linspace
    index = np.arange(count)
    rising = low + step * index.astype(np.float32)
    falling = high - step * (count - 1 - index).astype(np.float32)
    return np.where(index < count // 2, rising, falling).astype(np.float32)
