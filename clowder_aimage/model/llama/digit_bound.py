"""The bound of numbers in JSON: its grammar allows digits without end."""

from __future__ import annotations

# Digits one after another; a double has 17 that matter, and at most 309 in all
_MOST = 320


class DigitBound:
    """Counts the digits of the number at the end of a text of JSON."""

    def __init__(self) -> None:
        self._is_in_string = self._is_escaped = False
        self._count = 0

    def feed(self, text: str) -> bool:
        """Continue the text; return True if a number has too many digits."""
        for character in text:
            if self._is_in_string:
                self._is_in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            else:
                self._is_in_string = character == '"'
                self._count = self._count + 1 if character.isdecimal() else 0
                if self._count > _MOST:
                    return True
        return False
