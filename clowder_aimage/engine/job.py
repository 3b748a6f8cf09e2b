"""What is asked of an engine, and how much it may take on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.dialect import AImage
from clowder_aimage.oci import Reference

FOR_EVER = math.inf
NEVER, IF_MISSING, ALWAYS = "never", "if-missing", "always"
Wishes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """``queue``: requests that may wait. ``models``: that are loaded at once. ``keep_alive``: how
    long an idle model stays, in seconds; FOR_EVER, or 0. ``deadline``: for a request, in seconds,
    from its coming to its last picture. ``text_encoder``: auto, keep or release; ``memory``: bytes
    that all models together may take, None for what the machine has. ``stall``: seconds that a
    load may stand still. ``patience``: seconds that a model gets to end what was given up, before
    its process is ended."""

    queue: int = 8
    models: int = 1
    keep_alive: float = 300.0
    deadline: float = FOR_EVER
    dtype: str | None = None
    text_encoder: str = "auto"
    memory: int | None = None
    stall: float = 300.0
    patience: float = 30.0


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be made: by which AImage, of which words, with which ``wishes`` (fields of
    model.pipeline.Request; None or left out: as the AImage says), or with those that a function
    makes of the AImage once it is here. ``encoding``: ``kind`` (png, jpeg, webp), ``quality`` (0 to
    100), for the pictures and for up to ``previews`` of each. ``pull`` says whether the AImage may
    be fetched."""

    reference: Reference
    prompt: str
    wishes: Wishes | Callable[[AImage], Wishes] = field(default_factory=dict)
    encoding: Mapping[str, Any] = field(default_factory=dict)
    previews: int = 0
    keep_alive: float | None = None
    pull: str = IF_MISSING
