"""The settings of a node: from options, then AIMAGE_NODE_..., then "node" in the configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, model_validator

from clowder_aimage.engine.settings import ServerSettings, Words, parse_duration
from clowder_aimage.node.eviction import AGE, Watermarks

DEFAULT_ADDRESS = "127.0.0.1:8050"


def _check(is_valid: Callable[[float], bool], message: str) -> AfterValidator:
    def check(value: float) -> float:
        if not is_valid(value):
            raise ValueError(message)
        return value

    return AfterValidator(check)


_HIGH = _check(
    lambda percent: 0 < percent <= 100, "must be above 0 and at most 100 percent of the disk"
)
_LOW = _check(lambda percent: 0 <= percent <= 100, "must be between 0 and 100 percent of the disk")
_PERIOD = _check(lambda seconds: seconds >= 1.0, "must be at least 1 second")


class NodeSettings(ServerSettings):
    """The settings of a node.

    ``desired`` is a directory; with ``prune``, models no longer listed in it are removed. ``high``
    and ``low`` are percentages of the disk. ``collect`` is the interval in seconds between
    collections of unreferenced blobs; ``min_age`` is in seconds.
    """

    SECTION = "node"
    PREFIX = "AIMAGE_NODE_"
    PATHS = (*ServerSettings.PATHS, "desired")
    ADDRESS = DEFAULT_ADDRESS

    desired: Path | None = None
    prune: bool = False
    high: Annotated[float, _HIGH] = 85.0
    low: Annotated[float, _LOW] = 80.0
    min_age: Annotated[float, BeforeValidator(parse_duration)] = AGE
    collect: Annotated[float, BeforeValidator(parse_duration), _PERIOD] = 600.0
    neighbours: Words = ()

    @model_validator(mode="after")
    def _check_marks(self) -> NodeSettings:
        if self.low > self.high:
            raise ValueError("low must not be above high")
        if self.desired is not None and os.path.isfile(self.desired):  # noqa: PTH113 - never raises
            raise ValueError(f"desired must be a directory, but {self.desired} is a file")
        return self

    @property
    def marks(self) -> Watermarks:
        """The watermarks of the store's disk."""
        return Watermarks(self.high / 100, self.low / 100, self.min_age)
