"""The check that a prompt has what the messages say.

A template may trim a text, write it as JSON, or remove a part of it on purpose. One that leaves a
text out answers something that nobody asked.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable

# Groups of words of a text that are looked for, and words of a group
_GROUPS, _WORDS = 64, 8
MAX_LOST = 8
LEAST_SHARE = 0.5  # of a text that counts as written in part
# Commands such as /no_think, which templates take out of the texts
_COMMAND = re.compile(r"(?<!\S)/\w+")


def find_lost(texts: Iterable[tuple[int, str]], prompt: str) -> dict[int, float]:
    """Return the texts that a prompt lacks, or has in part: their numbers, and the part of each.

    The first eight are returned.
    """
    lost, offset, plain, letters = dict[int, float](), 0, "", ""
    for number, text in texts:
        stripped = text.strip()
        # In the order of the messages, so that the prompt is read once
        place = prompt.find(stripped, offset)
        if place >= 0:
            offset = place + len(stripped)
        elif stripped not in prompt and not _is_written(stripped, prompt):
            plain = plain or html.unescape(prompt)
            letters = letters or _keep_letters(plain)
            if (share := _measure_share(stripped, plain, letters)) < 1:
                lost[number] = min(share, lost.get(number, 1.0))
        if len(lost) == MAX_LOST:
            break
    return lost


def is_lost(text: str, prompt: str) -> bool:
    """Return True if a prompt has at most half of a text."""
    return find_lost([(0, text)], prompt).get(0, 1.0) <= LEAST_SHARE


def _is_written(text: str, prompt: str) -> bool:
    """Return True if a prompt has a text as JSON or HTML."""
    forms = (json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
    return any(form in prompt for form in (*forms, html.escape(text)))


def _measure_share(text: str, prompt: str, letters: str) -> float:
    """Return the part of a text that a prompt has, from words all over the text."""
    text = _COMMAND.sub("", text)
    groups = _sample(text)
    if not groups:
        # Symbols only
        groups, letters = text.split()[:_GROUPS], prompt
    return sum(group in letters for group in groups) / len(groups) if groups else 1.0


def _sample(text: str) -> list[str]:
    """Return groups of words, all of a short text."""
    words = re.findall(r"[^\W_]+", text.casefold())
    step = max(1, -(-len(words) // _GROUPS))
    groups = (words[at : at + step] for at in range(0, len(words), step))
    return ["".join(group[:_WORDS]) for group in groups]


def _keep_letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", re.sub(r"\\[nrt]", " ", text.casefold()))
