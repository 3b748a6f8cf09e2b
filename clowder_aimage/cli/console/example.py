"""Examples in the help of a verb, with a comment after ``#``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

NAME = "registry.example.com/team/shapes:v1"
REPOSITORY = "registry.example.com/team/shapes"

_Command = TypeVar("_Command", bound=click.Command)
_EXAMPLES = "examples"


def examples(*lines: str) -> Callable[[_Command], _Command]:
    """Return a decorator that adds example command lines to the help of a command."""

    def give(command: _Command) -> _Command:
        setattr(command, _EXAMPLES, lines)
        return command

    return give


def get_examples(command: click.Command) -> tuple[str, ...]:
    """Return the examples of a command."""
    return getattr(command, _EXAMPLES, ())
