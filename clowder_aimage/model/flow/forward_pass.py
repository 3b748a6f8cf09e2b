"""Forward passes of a transformer that pictures wait for: computed alone, or several at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.adapter.loaded_adapter import Use
from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.memory_budget import Stage


@dataclass(slots=True, eq=False)
class ForwardPass:
    """A pass for the latents of a picture, held by the library, and one of its captions.

    time, inputs, cache: as of ``FlowFamily.predict_velocity``. velocity: held, once it is computed.
    """

    latents: Any
    time: float
    caption: Caption
    inputs: Any = None
    cache: Any = None
    velocity: Any = None


@dataclass(slots=True, eq=False)
class PassRecord:
    """The way in which the passes of pictures were computed.

    batch: the most passes at once. forms: those in which layers were computed.
    """

    batch: int = 1
    forms: set[str] = field(default_factory=set)

    def add(self, batch: int, forms: Collection[str]) -> None:
        """Note that passes were computed, ``batch`` at once."""
        self.batch = max(self.batch, batch)
        self.forms.update(forms)


@dataclass(slots=True, eq=False)
class StepPasses:
    """The passes of a step, of one or several pictures of a request.

    adapters: those of the request. stage: its memory, for pictures of ``pixels``. error: that of a
    pass, which ``check`` raises.
    """

    passes: Sequence[ForwardPass]
    adapters: tuple[Use, ...]
    stage: Stage
    pixels: int
    record: PassRecord
    error: Exception | None = None

    def check(self) -> None:
        """Raise the error of a pass, once."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            # Its traceback would refer to itself, and hold the memory of the pass
            del error
