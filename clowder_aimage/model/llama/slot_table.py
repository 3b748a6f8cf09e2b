"""The slots of llama.cpp, by client: a slot keeps what it computed of its last prompt.

llama.cpp's own choice compares the prompts of all clients, so that the time until the first token
would tell a client how the prompts of others begin.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(slots=True)
class _Slot:
    number: int
    # The client of the last prompt; None before the first one
    owner: str | None = None
    prompt: str = ""
    is_taken: bool = False
    # The count of takes so far, when it was taken
    turn: int = 0


class SlotTable:
    """The slots of a server with ``count`` of them."""

    def __init__(self, count: int) -> None:
        self._slots = [_Slot(number) for number in range(count)]
        self._turn = 0

    def take(self, owner: str, prompt: str) -> tuple[int, bool] | None:
        """Take a free slot; also return True if its last prompt was the owner's. None without one.

        The prompt that begins most alike is preferred, then an unused slot, then the oldest one.
        """
        free = [slot for slot in self._slots if not slot.is_taken]
        if not free:
            return None
        slot = max(free, key=lambda slot: self._rate(slot, owner, prompt))
        is_own, self._turn = slot.owner == owner, self._turn + 1
        slot.owner, slot.prompt, slot.is_taken, slot.turn = owner, prompt, True, self._turn
        return slot.number, is_own

    def release(self, number: int) -> None:
        """Return a slot."""
        self._slots[number].is_taken = False

    @staticmethod
    def _rate(slot: _Slot, owner: str, prompt: str) -> tuple[int, bool, int]:
        common = _count_common(slot.prompt, prompt) if slot.owner == owner else 0
        return common, slot.owner is None, -slot.turn


def _count_common(left: str, right: str) -> int:
    """Return the number of equal characters at the beginning."""
    lengths = range(1, min(len(left), len(right)) + 1)
    return bisect_left(lengths, True, key=lambda length: left[:length] != right[:length])
