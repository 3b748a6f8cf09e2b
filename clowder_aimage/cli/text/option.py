"""Options of ``run`` for language models, and the requests that they state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from clowder_aimage.cli.console.option import TextOption, complete_path, in_section
from clowder_aimage.document.unicode_text import recode_file
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.model.text.language_model import Sampling, TextRequest
from clowder_aimage.oci import read_json

# Any JSON object, instead of a schema.
ANY_JSON = "json"
_MAX_SCHEMA = 1 << 20  # bytes
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
# Options that can be set between questions.
TEXT_SETTABLE = ("system", "max_tokens", *_SAMPLING, "stop", "think", "schema")

_option = partial(click.option, cls=TextOption)
text_options = in_section(
    "Text options",
    _option("--system", metavar="TEXT", help="Instructions for the model."),
    _option(
        "--max-tokens", type=click.IntRange(1), metavar="N", help="End the answer after N tokens."
    ),
    _option(
        "--temperature",
        type=float,
        metavar="FLOAT",
        help="Randomness of the answer; 0 always takes the most probable token. [default: the "
        "model's]",
    ),
    _option(
        "--top-p",
        type=float,
        metavar="FLOAT",
        help="Draw from the most probable tokens whose probabilities add up to P.",
    ),
    _option("--top-k", type=int, metavar="N", help="Draw from the N most probable tokens."),
    _option(
        "--min-p",
        type=float,
        metavar="FLOAT",
        help="Draw from tokens at least this fraction as probable as the most probable one.",
    ),
    _option(
        "--stop",
        metavar="TEXT",
        multiple=True,
        help="End the answer where this text would begin. May be repeated.",
    ),
    _option(
        "--think/--no-think",
        "think",
        default=None,
        help="Let the model think before it answers. [default: the model's]",
    ),
    _option(
        "--schema",
        metavar="FILE",
        shell_complete=complete_path,
        help="The answer is JSON that this schema allows (GGUF models only);"
        " 'json' allows any JSON object.",
    ),
)


def build_text_request(
    values: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> TextRequest:
    """Return the request for an answer to messages. Raises UsageError, NotFoundError."""
    system = values["system"]
    head = ({"role": "system", "content": system},) if system else ()
    return TextRequest(
        messages=(*head, *messages),
        max_tokens=values["max_tokens"],
        sampling=Sampling(**{name: values[name] for name in _SAMPLING}),
        stop=tuple(filter(None, values["stop"])),
        schema=_read_schema(values["schema"]),
        thinking=values["think"],
    )


def _read_schema(name: str | None) -> dict[str, Any] | None:
    """Return the JSON Schema in a file; an empty one for any JSON object."""
    if name is None or name == ANY_JSON:
        return None if name is None else {}
    try:
        with Path(name).open("rb") as file:
            data = recode_file(file.read(_MAX_SCHEMA + 1))
        schema = read_json(data, name, _MAX_SCHEMA)
    except FileNotFoundError:
        raise NotFoundError(f"--schema: {name} not found") from None
    except OSError as error:
        raise UsageError(f"--schema: cannot read {name}: {error.strerror}") from None
    except FormatError as error:
        raise UsageError(f"--schema: {error.message}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--schema: {name} is not valid UTF-16 text") from None
    if not isinstance(schema, dict):
        raise UsageError(f"--schema: {name} is not a JSON object")
    return schema
