"""What a request hears while it is served, from its place in the queue to the last picture."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuedEvent:
    """It waits; ``ahead`` requests are served first."""

    ahead: int


@dataclass(frozen=True, slots=True)
class PullingEvent:
    """The model is fetched: ``done`` of ``total`` bytes."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class LoadingEvent:
    """The model is loaded into memory."""


@dataclass(frozen=True, slots=True)
class StartedEvent:
    """It is the request's turn, and the model has taken it."""


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Step ``index`` of ``total`` is done (1 to total), of picture ``picture`` (0 to n - 1)."""

    index: int
    total: int
    picture: int


@dataclass(frozen=True, slots=True, eq=False)
class PreviewEvent:
    """What the picture will be, as far as it is known after a step: encoded as a picture is, and
    ``number`` counts the previews of this picture from 0."""

    data: bytes
    number: int
    picture: int


@dataclass(frozen=True, slots=True, eq=False)
class ImageEvent:
    """A finished picture, encoded."""

    data: bytes
    seed: int
    picture: int
    width: int
    height: int


Event = (
    QueuedEvent | PullingEvent | LoadingEvent | StartedEvent | StepEvent | PreviewEvent | ImageEvent
)
