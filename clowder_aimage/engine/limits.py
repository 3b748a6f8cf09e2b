"""The limits of an engine, and the policies of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass

FOR_EVER = math.inf
NEVER, IF_MISSING, ALWAYS = "never", "if-missing", "always"  # when an AImage is pulled


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of an engine.

    queue: requests that may wait. models: loaded at once. keep_alive: seconds that an idle model
    stays in memory; FOR_EVER, or 0. deadline: seconds of a request, from its arrival to its last
    picture. text_encoder: auto, keep or release. memory: bytes that all models together may use;
    None for the machine's. load_timeout: seconds that a load may make no progress.
    cancel_timeout: seconds in which a process must end a cancelled request before it is killed.
    """

    queue: int = 8
    models: int = 1
    keep_alive: float = 300.0
    deadline: float = FOR_EVER
    dtype: str | None = None
    text_encoder: str = "auto"
    memory: int | None = None
    load_timeout: float = 300.0
    cancel_timeout: float = 30.0
