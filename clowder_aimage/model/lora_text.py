"""Adapters in texts: ``NAME:STRENGTH``, tags in prompts, trigger words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from clowder_aimage.errors import UsageError
from clowder_aimage.generation.request import LoraUse

_TAG = re.compile(r"<lora:([^<>]*)>", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)", re.ASCII)
# In NAME@sha256:123 the number is a digest, not a strength
_ALGORITHMS = ("@sha256", "@sha512")


def parse_use(text: str, is_file: Callable[[str], bool] = lambda _: False) -> LoraUse:
    """Parse ``NAME[:STRENGTH]``.

    A number with a sign or a point is a strength. Other digits may be a tag: they are a strength
    after a file or a name that has a tag or a digest. Raises UsageError: there is no name.
    """
    name, number = _split(text)
    if number is None:
        return LoraUse(_check_name(text, text))
    name = _check_name(name, text)
    base_name = name.rpartition("/")[2]
    is_strength = not number.isdecimal() or ":" in base_name or "@" in base_name or is_file(name)
    return LoraUse(name, float(number)) if is_strength else LoraUse(text)


def take_tags(prompt: str) -> tuple[str, tuple[LoraUse, ...]]:
    """Return a prompt without its tags ``<lora:NAME:STRENGTH>``, and their adapters.

    The tags are those of stable-diffusion-webui: the strength is any last number, and optional.
    Raises UsageError: a tag has no name.
    """
    # The pattern has one group: its matches alternate with the text after them
    text, *fragments = _TAG.split(prompt)
    if not fragments:
        return prompt, ()
    uses = []
    for inner, after in zip(fragments[::2], fragments[1::2], strict=True):
        name, number = _split(inner)
        strength = None if number is None else float(number)
        uses.append(LoraUse(_check_name(name, f"<lora:{inner}>"), strength))
        text = _join_text(text.rstrip(), after.lstrip())
    return text.strip(), tuple(uses)


def list_missing_words(prompt: str, words: Iterable[str]) -> list[str]:
    """Return the trigger words that the prompt lacks, in any case of its letters."""
    folded_prompt = prompt.casefold()
    return [word for word in dict.fromkeys(words) if word.casefold() not in folded_prompt]


def _split(text: str) -> tuple[str, str | None]:
    """Return the name and the last number, or None if the last part is not one."""
    name, _, number = text.rpartition(":")
    is_number = _NUMBER.fullmatch(number) and not name.endswith(_ALGORITHMS)
    return (name, number) if is_number else (text, None)


def _check_name(name: str, text: str) -> str:
    if not (name := name.strip()):
        raise UsageError(f"{text[:60]!r} has no name of an adapter")
    return name


def _join_text(before: str, after: str) -> str:
    """Join the text around a tag, without doubled spaces and commas."""
    if before[-1:] in ("", ",") and after.startswith(","):
        after = after[1:].lstrip()
    space = " " if before and after[:1] not in ("", ",", ".", ";") else ""
    return before + space + after
