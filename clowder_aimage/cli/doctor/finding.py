"""A finding of a check, and the interface of checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Protocol

from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.errors import AImageError


class Level(StrEnum):
    """The severity of a finding: an error fails the command."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Stage(IntEnum):
    """The time at which a check runs: those of the network run at the same time, with a limit."""

    MACHINE = 0
    NETWORK = 1
    AFTER = 2
    """After the network: it needs what the others found there."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact with its level. ``advice`` is a remedy, beginning with the command if it is one."""

    level: Level
    message: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_error(
        cls, error: AImageError | OSError, advice: str = "", level: Level = Level.ERROR
    ) -> Finding:
        """Return the finding of an expected error; ``advice`` is for one without its own."""
        if isinstance(error, OSError):
            return cls(level, f"{error.filename or 'a file'}: {error.strerror or error}", advice)
        return cls(level, error.message, format_advice(error) or advice)


class Check(Protocol):
    """A check of one subject. An error that ``run`` raises is a finding, too."""

    @property
    def name(self) -> str:
        """The subject in one word."""

    @property
    def stage(self) -> Stage:
        """The time at which it runs."""

    @property
    def late(self) -> Finding:
        """The finding if a check of the network does not end in time."""

    def run(self) -> Iterator[Finding]:
        """Yield the findings. Raises AImageError, OSError."""


class MachineCheck:
    """A check that makes no connection."""

    stage = Stage.MACHINE
    late = Finding(Level.ERROR, "does not end")
