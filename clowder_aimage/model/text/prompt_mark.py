"""Marks in place of what a message says: a prompt of them shows what a template writes.

The letters of a short text, of a name or of a called function may be in any prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from clowder_aimage.model.text.content_form import build_text_part

# Texts of fewer characters are marked
_SHORT = 16
# The letters of Yi, which have no cases
_FIRST, _LETTERS = 0xA000, 1165
_ESCAPED = re.compile(r"\\u(a[0-4][0-9a-f]{2})", re.IGNORECASE)
TEXT, NAME, CALLS = "text", "name", "tool_calls"


class MarkedMessages:
    """Messages with marks: each has a letter of its own, and the length of what it replaces.

    ``texts`` are those of the messages, without thoughts.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> None:
        self._marks, self._count = dict[tuple[int, str], list[str]](), 0
        self.messages = tuple(
            self._mark(number, message, texts[number].strip())
            for number, message in enumerate(messages)
        )

    @property
    def has_marks(self) -> bool:
        """Return True if there is anything to look for."""
        return bool(self._marks)

    def measure(self, prompt: str) -> dict[tuple[int, str], float]:
        """Return the part that a prompt has of each field of the messages, by number and field."""
        decoded = unquote(_ESCAPED.sub(lambda match: chr(int(match[1], 16)), prompt))
        return {
            field: min(min(1.0, decoded.count(mark[0]) / len(mark)) for mark in marks)
            for field, marks in self._marks.items()
        }

    def _mark(self, number: int, message: Mapping[str, Any], text: str) -> dict[str, Any]:
        result = dict(message)
        if 0 < len(text) < _SHORT:
            mark, content = self._add(number, TEXT, text), message["content"]
            result["content"] = mark if isinstance(content, str) else [build_text_part(mark)]
        # The name of a tool is that of its call
        if message.get("name") and message.get("role") != "tool":
            result["name"] = self._add(number, NAME, message["name"])
        if calls := message.get("tool_calls"):
            result["tool_calls"] = [self._mark_call(number, call) for call in calls]
        return result

    def _mark_call(self, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function") or {}
        name = self._add(number, CALLS, str(function.get("name") or "f"))
        return {**call, "function": {**function, "name": name}}

    def _add(self, number: int, field: str, text: str) -> str:
        mark = chr(_FIRST + self._count % _LETTERS) * len(text)
        self._count += 1
        self._marks.setdefault((number, field), []).append(mark)
        return mark
