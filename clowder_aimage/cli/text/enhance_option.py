"""Options for prompts that a language model enhances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from clowder_aimage.cli.console.option import complete_name, in_section
from clowder_aimage.cli.console.stored_name import resolve_reference
from clowder_aimage.document.unicode_text import recode_file
from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.oci import Reference

# Options that a worker serves too.
ENHANCING = ("enhance", "enhancer", "instruction")

enhance_options = in_section(
    "Prompt options",
    click.option(
        "--enhance",
        is_flag=True,
        help="Let a language model write a longer prompt, or invent one if PROMPT is empty. "
        "--enhance=REF names the model.",
    ),
    click.option(
        "--enhancer",
        type=resolve_reference,
        metavar="REF",
        shell_complete=complete_name,
        help="The language model of --enhance, which it implies. [env: AIMAGE_ENHANCER]",
    ),
    click.option(
        "--enhance-instruction",
        "instruction",
        type=click.Path(),
        metavar="FILE",
        help="A text that replaces the built-in instruction to the language model.",
    ),
)


@dataclass(frozen=True, slots=True)
class Enhancement:
    """The enhancement of prompts: by ``model``, or the worker's default; its ``instruction``."""

    model: Reference | None = None
    instruction: str | None = None


def is_enhanced(values: Mapping[str, Any]) -> bool:
    """Return True if prompts are enhanced. Raises UsageError: an instruction for nothing."""
    is_wanted = bool(values["enhance"] or values["enhancer"])
    if values["instruction"] is not None and not is_wanted:
        raise UsageError("--enhance-instruction requires --enhance")
    return is_wanted


def read_enhancement(values: Mapping[str, Any]) -> Enhancement | None:
    """Return the enhancement of prompts, if they are enhanced. Raises UsageError, NotFoundError."""
    if not is_enhanced(values):
        return None
    return Enhancement(values["enhancer"], _read_instruction(values["instruction"]))


def _read_instruction(name: str | None) -> str | None:
    """Return the text of a file. Raises UsageError, NotFoundError."""
    if name is None:
        return None
    from clowder_aimage.model.text.enhancement import MAX_INSTRUCTION

    try:
        with Path(name).open("rb") as file:
            data = file.read(MAX_INSTRUCTION + 1)
        if len(data) > MAX_INSTRUCTION:
            raise UsageError(f"--enhance-instruction: {name} exceeds {MAX_INSTRUCTION} bytes")
        if not (text := recode_file(data).decode().strip()):
            raise UsageError(f"--enhance-instruction: {name} is empty")
        return text
    except FileNotFoundError:
        raise NotFoundError(f"--enhance-instruction: {name} not found") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not valid UTF-8 text"
        raise UsageError(f"--enhance-instruction: cannot read {name}: {reason}") from None
