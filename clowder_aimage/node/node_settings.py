"""The settings of a node: options, AIMAGE_NODE_..., "node" in the configuration, in this order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, model_validator

from clowder_aimage.engine.settings import ServerSettings, Words, duration
from clowder_aimage.node.eviction import AGE, Watermarks

DEFAULT_ADDRESS = "127.0.0.1:8050"


def _upper(value: float) -> float:
    if not 0 < value <= 100:
        raise ValueError("more than 0 per cent of the disk, and at most 100")
    return value


def _lower(value: float) -> float:
    if not 0 <= value <= 100:
        raise ValueError("between 0 and 100 per cent of the disk")
    return value


def _period(value: float) -> float:
    if value < 1.0:
        raise ValueError("at least 1 second")
    return value


class NodeSettings(ServerSettings):
    """The settings of a node.

    ``desired`` is a directory; with ``prune`` models that it lists no longer are removed. ``high``
    and ``low`` are per cent of the disk. Collections of unreferenced blobs are ``collect`` seconds
    apart; ``min_age`` is in seconds.
    """

    SECTION = "node"
    PREFIX = "AIMAGE_NODE_"
    PATHS = (*ServerSettings.PATHS, "desired")
    ADDRESS = DEFAULT_ADDRESS

    desired: Path | None = None
    prune: bool = False
    high: Annotated[float, AfterValidator(_upper)] = 85.0
    low: Annotated[float, AfterValidator(_lower)] = 80.0
    min_age: Annotated[float, BeforeValidator(duration)] = AGE
    collect: Annotated[float, BeforeValidator(duration), AfterValidator(_period)] = 600.0
    neighbours: Words = ()

    @model_validator(mode="after")
    def _check_marks(self) -> NodeSettings:
        if self.low > self.high:
            raise ValueError("low must not be above high")
        if self.desired is not None and os.path.isfile(self.desired):  # noqa: PTH113 - never raises
            raise ValueError(f"desired must be a directory, and {self.desired} is a file")
        return self

    @property
    def marks(self) -> Watermarks:
        """The watermarks of the store's disk."""
        return Watermarks(self.high / 100, self.low / 100, self.min_age)
