"""Prompts of pictures that a language model writes from shorter ones.

The sampling is the model's own, with the seed of the picture: the same seed gives the same prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from clowder_aimage.errors import ModelError
from clowder_aimage.model.text.language_model import Sampling, TextDelta, TextEvent, TextRequest

INSTRUCTION = """\
You write prompts for a program that paints pictures. Turn the request of the user into the \
description of one finished picture.
Keep all that the request states: subjects, their number, names, colours, actions and places. \
Repeat each text that must appear in the picture exactly, in double quotes, and say where it is.
Add what the request leaves open: composition and point of view, light, materials, surroundings \
and style.
Describe only what is visible, in plain words and in the language of the request, with fewer than \
100 words.
Answer with the description alone, without a heading, a list or an explanation."""
# The request in place of an empty prompt
ANY = "Invent a picture"
ANY_TEMPERATURE = 0.9
MAX_TOKENS = 512
# Bytes of an instruction in place of INSTRUCTION
MAX_INSTRUCTION = 64 << 10
_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_FENCE = re.compile(r"^\s*```[^\n]*$", re.MULTILINE)
_LABEL = re.compile(
    r"^[#*_\s]*((enhanced |rewritten |image |final )*prompt|description)[*_\s]*:[*_\s]*", re.I
)
_MARKS = {'"': '"', "'": "'", "`": "`", "**": "**", "__": "__"}
_MARKS |= {"“": "”", "‘": "’", "«": "»", "「": "」"}


def build_enhancement_request(
    prompt: str, seed: int, instruction: str | None = None
) -> TextRequest:
    """Return the request for a longer prompt; for an empty prompt, for an invented one."""
    is_any = not prompt.strip()
    return TextRequest(
        messages=(
            {"role": "system", "content": instruction or INSTRUCTION},
            {"role": "user", "content": ANY if is_any else prompt},
        ),
        max_tokens=MAX_TOKENS,
        sampling=Sampling(temperature=ANY_TEMPERATURE if is_any else None, seed=seed),
        thinking=False,
    )


def collect_prompt(events: Iterable[TextEvent]) -> str:
    """Return the prompt in an answer. Raises ModelError if the answer has no prompt."""
    text = "".join(
        event.text for event in events if isinstance(event, TextDelta) and event.kind == "content"
    )
    prompt = extract_prompt(text)
    if not prompt:
        raise ModelError("the language model returned no prompt")
    return prompt


def extract_prompt(text: str) -> str:
    """Return an answer as one line, without thoughts, headings, markup and quotes around it."""
    text = _THOUGHT.sub("", text.rpartition("</think>")[2] if "<think>" not in text else text)
    text = _LABEL.sub("", " ".join(_FENCE.sub("", text).split()))
    # Twice, since a pair of marks can be inside another
    for start, end in [*_MARKS.items()] * 2:
        inner = text[len(start) : len(text) - len(end)]
        is_around = inner and text.startswith(start) and text.endswith(end)
        if is_around and start not in inner and end not in inner:
            text = inner.strip()
    return text
