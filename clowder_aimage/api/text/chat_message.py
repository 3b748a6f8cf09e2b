"""The messages and tools of a chat in OpenAI's form (OpenAI, "Create chat completion")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    model_validator,
)
from pydantic.config import JsonDict

from clowder_aimage.api.request_body import RequestBody

MAX_MESSAGES = 4096
MAX_TOOLS = 128
# Characters of a name or an id
MAX_NAME = 256


def _read_parts(content: object) -> object:
    """Return a list of parts with their texts. Raises ValueError for a part that is not text."""
    if not isinstance(content, list):
        if not isinstance(content, str):
            raise ValueError("must be a text or a list of parts")
        return content
    parts = []
    for segment in content:
        kind = segment.get("type") if isinstance(segment, dict) else None
        if not isinstance(kind, str):
            raise ValueError("must be a text or a list of parts with a type")
        if kind not in (*get_args(TextPart.model_fields["type"].annotation), "refusal"):
            raise ValueError(f"has a part of the type {kind[:40]!a}; only text is supported")
        if not isinstance(text := segment.get(kind if kind == "refusal" else "text"), str):
            raise ValueError("has a part without a text")
        parts.append({"type": "text", "text": text})
    return parts


class TextPart(RequestBody):
    """A part of a message that is text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(RequestBody):
    """A part of an earlier answer that is a refusal."""

    type: Literal["refusal"]
    refusal: str


# A text, or a list of parts as objects
Content = Annotated[
    Any,
    BeforeValidator(_read_parts, json_schema_input_type=str | list[TextPart | RefusalPart]),
]
_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class CalledFunction(RequestBody):
    """The function of a call."""

    name: _Name
    arguments: str = Field(default="{}", description="A JSON object as text.")


class Call(RequestBody):
    """A call of a function in an earlier answer."""

    id: str = Field(default="", max_length=MAX_NAME)
    type: Literal["function"] = "function"
    function: CalledFunction


_IF_TOOL: JsonDict = {
    "if": {"properties": {"role": {"const": "tool"}}},
    "then": {
        "required": ["tool_call_id"],
        "properties": {"tool_call_id": {"type": "string", "minLength": 1}},
    },
}
_NO_CALLS: JsonDict = {"tool_calls": {"type": ["array", "null"], "maxItems": 0}}
_TEXT: JsonDict = {"content": {"type": ["string", "array"]}}


class Message(RequestBody):
    """A message of a chat. Other fields of an answer that is sent back are ignored."""

    # Of answers that are sent back
    NO_EFFECT = frozenset({"annotations", "refusal"})

    model_config = ConfigDict(
        json_schema_extra={
            **_IF_TOOL,
            "anyOf": [
                {"required": ["content"], "properties": {**_TEXT, **_NO_CALLS}},
                # An answer may be all thoughts or calls
                {"properties": {"role": {"const": "assistant"}}},
            ],
        }
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    tool_calls: list[Call] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = Field(
        default=None,
        max_length=MAX_NAME,
        description="The call that a message of the role tool answers, which needs it.",
    )
    reasoning_content: str | None = Field(
        default=None, description="The thinking that preceded an answer."
    )

    @model_validator(mode="wrap")
    @classmethod
    def _record_parts(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Return the message, with the unknown fields of its parts."""
        message = handler(value)
        content = value.get("content") if isinstance(value, Mapping) else None
        for index, part in enumerate(content if isinstance(content, list) else ()):
            stated = {name for name, field in part.items() if field is not None}
            unknown = sorted(stated - {"type", "refusal" if part["type"] == "refusal" else "text"})
            message._unknown += tuple(f"content[{index}].{name}" for name in unknown)  # noqa: SLF001
        if message.role != "tool" and message.tool_call_id:
            message._unknown += ("tool_call_id",)  # noqa: SLF001
        return message

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise ValueError for a message without a field that its role requires."""
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("of the role tool needs a tool_call_id")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"of the role {self.role} cannot have tool_calls")
        if self.content is None and self.role != "assistant":
            raise ValueError("has no content")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the message for a template: only known roles, and always a content."""
        fields = self.model_dump(exclude_none=True)
        fields["role"] = "system" if self.role == "developer" else self.role
        fields["content"] = self.content or ""
        if not self.name:
            fields.pop("name", None)
        return fields


class ToolFunction(RequestBody):
    """The name of a function, and its arguments."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,256}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="The JSON Schema of its arguments."
    )


class Tool(RequestBody):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: ToolFunction

    def to_dict(self) -> dict[str, Any]:
        """Return the tool for a template."""
        function = self.function.model_dump(exclude_none=True)
        return {"type": "function", "function": function}
