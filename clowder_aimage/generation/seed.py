"""Seeds as clients write them, by one rule for pictures and texts."""

from __future__ import annotations

import re

MAX_SEED = (1 << 64) - 1
# The least signed number of 64 bits
MIN_SEED = -(1 << 63)
# Stands for a seed that is drawn, as in llama.cpp, ollama and the web UIs
DRAWN = -1
# In a form, and from clients whose numbers have fewer bits
_TEXT = re.compile(r"(-?[0-9]{1,20})(?:\.0*)?", re.ASCII)


def read_seed(value: object) -> object:
    """Return a seed as a number, None for one that is to be drawn; other values unchanged.

    It may be written as 42.0, or as text. Negative numbers other than -1 count as the unsigned ones
    of 64 bits.
    """
    if isinstance(value, str) and (match := _TEXT.fullmatch(value)):
        value = int(match[1])
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if value == DRAWN:
        return None
    return value & MAX_SEED if MIN_SEED <= value < 0 else value
