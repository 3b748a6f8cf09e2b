"""The events of a request, from its place in the queue to its last picture."""

from __future__ import annotations

from dataclasses import dataclass

from clowder_aimage.model.pipeline import Step


@dataclass(frozen=True, slots=True)
class QueuedEvent:
    """The request waits; ``ahead`` requests are served first."""

    ahead: int


@dataclass(frozen=True, slots=True)
class PullingEvent:
    """The model is pulled: ``done`` of ``total`` bytes."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class LoadingEvent:
    """The model is loaded into memory."""


@dataclass(frozen=True, slots=True)
class StartedEvent:
    """The model has accepted the request."""


@dataclass(frozen=True, slots=True, eq=False)
class PreviewEvent:
    """A preview of picture ``picture``, encoded as the picture will be.

    ``number`` counts the previews of a picture from 0.
    """

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


Event = QueuedEvent | PullingEvent | LoadingEvent | StartedEvent | Step | PreviewEvent | ImageEvent
