"""The forms in which a chat template takes the content of messages: a text, or a list of parts.

A template shows by rendering what it takes, so that it is asked with a text that nothing else
contains. Reference: ggml-org/llama.cpp, common/jinja/caps.cpp; vLLM, chat_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
# Renders messages; None if the template fails or refuses them
Render = Callable[[list[Message]], str | None]
_MARK, _OTHER = "aimageprobea", "aimageprobeb"
_CALL = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": {}}}
# Parts that are printed as they are, instead of their texts
_RAW = re.compile(rf"""text['"]:\s*['"]{_MARK}""")


@dataclass(frozen=True, slots=True)
class ContentForm:
    """The forms of one role. has_parts: a list may have several parts."""

    takes_text: bool = True
    takes_part: bool = False
    has_parts: bool = False

    def convert(self, content: str | Sequence[Mapping[str, Any]]) -> str | list[Message]:
        """Return a content in a form that the template takes."""
        if not isinstance(content, str):
            if self.has_parts:
                return [dict(part) for part in content]
            content = join_parts(content)
        if self.takes_text or not self.takes_part or not content:
            return content
        return [{"type": "text", "text": content}]


def join_parts(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a content; vLLM and llama.cpp separate parts by lines too."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or "") for part in content)


def build_text_part(text: str) -> Message:
    """Return a part of a content."""
    return {"type": "text", "text": text}


class ContentForms:
    """The forms of each role, found when they are first needed."""

    def __init__(self, render: Render) -> None:
        self._render, self._forms = render, dict[str, ContentForm]()

    def find(self, role: str) -> ContentForm:
        """Return the form of a role; other roles than the known ones take texts."""
        if role not in self._forms:
            self._forms[role] = self._probe(role)
        return self._forms[role]

    def _probe(self, role: str) -> ContentForm:
        takes_text = self._shows(role, _MARK, _MARK)
        takes_part = self._shows(role, [build_text_part(_MARK)], _MARK)
        parts = [build_text_part(_MARK), build_text_part(_OTHER)]
        return ContentForm(
            takes_text, takes_part, takes_part and self._shows(role, parts, _MARK, _OTHER)
        )

    def _shows(self, role: str, content: str | list[Message], *marks: str) -> bool:
        prompt = self._render(self._build_messages(role, content))
        if prompt is None or _RAW.search(prompt.lower()):
            return False
        return all(mark in prompt.lower() for mark in marks)

    def _build_messages(self, role: str, content: str | list[Message]) -> list[Message]:
        """Return a conversation in which a message of the role has the content."""
        message: Message = {"role": role, "content": content}
        if role == "user":
            return [message]
        user = {"role": "user", "content": self.find("user").convert("x")}
        if role == "system":
            return [message, user]
        if role == "tool":
            call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
            return [user, call, message | {"tool_call_id": _CALL["id"], "name": "f"}]
        return [user, message, user]
