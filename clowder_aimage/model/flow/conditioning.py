"""The captions and the guidance of a generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Caption:
    """An embedded text, independent of the time and computed once per prompt.

    tokens: arrays of the library, (1, length, dim) with MLX. rope: the table of their positions.
    """

    tokens: Any
    rope: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Conditioning:
    """The captions of a generation; ``negative`` only with guidance.

    ``weight`` is that of the guidance, up to the time ``end``; its result is at most
    ``normalization`` times as long as the positive velocity, if that is not 0. ``inputs``
    are those of the transformer beside the latents: a control, or reference pictures.
    """

    positive: Caption
    negative: Caption | None = None
    weight: float = 0.0
    end: float = 1.0
    normalization: float = 0.0
    inputs: Any = None
