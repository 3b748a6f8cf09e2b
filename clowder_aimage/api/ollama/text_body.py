"""The requests of ollama's API for language models (ollama, docs/api.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from clowder_aimage.api.field_rule import FieldRule, excludes
from clowder_aimage.api.ollama.request import OllamaBody
from clowder_aimage.api.request_body import RequestBody, build_field_error
from clowder_aimage.api.text.chat_message import MAX_MESSAGES, MAX_NAME, MAX_TOOLS, Tool
from clowder_aimage.api.text.request import (
    MAX_INPUTS,
    PromptName,
    SamplingFields,
    Stops,
    build_request,
    parse_texts,
)
from clowder_aimage.model.text.language_model import MAX_ALTERNATIVES, TextRequest, is_answer


class OllamaTextOptions(SamplingFields):
    """The options that have an effect; ``num_ctx`` and those of the machine are the worker's."""

    repeat_penalty: float | None = Field(default=None, ge=1e-3, le=100, allow_inf_nan=False)
    num_predict: int | None = Field(
        default=None,
        description="The maximum number of tokens of a text; 0 or less is as many as the context "
        "has room for.",
    )
    stop: Stops = Field(default_factory=list)

    def request(self, stops: Sequence[str]) -> dict[str, Any]:
        """Return the fields of a request, with more stop texts.

        A number of tokens below 1 is not set.
        """
        changed: dict[str, Any] = {}
        if self.repeat_penalty is not None:
            changed["repetition_penalty"] = self.repeat_penalty
        count = self.num_predict
        return {
            "sampling": self.model_copy(update=changed).build_sampling(),
            "max_tokens": count if count is not None and count > 0 else None,
            "stop": tuple(dict.fromkeys((*self.stop, *stops))),
        }


def _parse_schema(value: object) -> Any:
    """Return the JSON Schema of ``format``: "json" is any object."""
    if value in ("", None):
        return None
    if value == "json":
        return {}
    if isinstance(value, dict):
        return value
    raise ValueError('must be "json" or a JSON Schema')


_Effort = Literal["low", "medium", "high", "max"]


def _check_thinking(value: object) -> object:
    """Return a boolean or a level. Raises ValueError."""
    if value == "":
        return None
    if not isinstance(value, bool | None) and value not in get_args(_Effort):
        raise ValueError(f"must be true, false or one of {', '.join(get_args(_Effort))}")
    return value


def _encode_arguments(value: object) -> Any:
    """Return the arguments of a call as text; ollama's are an object."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class OllamaFunction(RequestBody):
    """The function of a call."""

    name: str = Field(min_length=1, max_length=MAX_NAME)
    arguments: Annotated[
        str, BeforeValidator(_encode_arguments, json_schema_input_type=str | dict[str, Any])
    ] = "{}"


class OllamaCall(RequestBody):
    """A call of a function in an earlier answer."""

    id: str | None = Field(default=None, max_length=MAX_NAME)
    function: OllamaFunction


class OllamaMessage(RequestBody):
    """A message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_name: str | None = Field(default=None, max_length=MAX_NAME)
    tool_call_id: str | None = Field(default=None, max_length=MAX_NAME)
    images: list[Any] | None = Field(
        default=None,
        description="Only empty: only text is supported.",
        json_schema_extra={"maxItems": 0},
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.images:
            raise ValueError("has images; only text is supported")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the message in OpenAI's form."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        message |= {"reasoning_content": self.thinking} if self.thinking else {}
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            message["tool_calls"] = [
                {"id": call.id or f"call_{at}", "type": "function", "function": dict(call.function)}
                for at, call in calls
            ]
        if self.role == "tool":
            message |= {"name": self.tool_name} if self.tool_name else {}
            message["tool_call_id"] = self.tool_call_id or "call_0"
        return message


class OllamaTextBody(OllamaBody):
    """The fields that requests of chat and of generate have in common."""

    HAS_STOPS = True

    options: OllamaTextOptions = OllamaTextOptions()
    format: Annotated[
        Mapping[str, Any] | None,
        BeforeValidator(_parse_schema, json_schema_input_type=Literal["", "json"] | dict[str, Any]),
    ] = Field(
        default=None,
        description="`json`, or a JSON Schema. An error (400) where the runtime of the model has "
        "no grammars.",
    )
    think: Annotated[
        Any, BeforeValidator(_check_thinking, json_schema_input_type=bool | _Effort | Literal[""])
    ] = Field(
        default=None,
        description="Turn thinking on or off. A level turns it on, and is passed to chat templates "
        "that read it.",
    )
    logprobs: bool = Field(default=False, description="Return the log probability of each token.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] = Field(
        default=0, description="The most probable tokens at each place."
    )

    @property
    def is_change(self) -> bool:
        """Return True if the request only loads or unloads the model."""
        raise NotImplementedError

    def request(self) -> TextRequest:
        """Return the request of the model."""
        return build_request(
            **self._build_content(),
            **self.options.request(self.stop_texts),
            alternatives=self.top_logprobs if self.logprobs else None,
            schema=self.format,
            thinking=self.think if isinstance(self.think, bool | None) else True,
            effort=self.think if isinstance(self.think, str) else None,
        )

    def _build_content(self) -> dict[str, Any]:
        raise NotImplementedError


class OllamaChatBody(OllamaTextBody):
    """A request of ``/api/chat``."""

    messages: list[OllamaMessage] = Field(
        default_factory=list,
        max_length=MAX_MESSAGES,
        description="None: load the model, or unload it with `keep_alive: 0`.",
    )
    tools: list[Tool] = Field(
        default_factory=list,
        max_length=MAX_TOOLS,
        description="Functions that the model may call. An error (400) where its template has no "
        "tools.",
    )

    @property
    def is_change(self) -> bool:
        return not self.messages

    def _build_content(self) -> dict[str, Any]:
        messages = tuple(message.to_dict() for message in self.messages)
        return {
            "messages": messages,
            "tools": tuple(tool.to_dict() for tool in self.tools),
            "is_continued": self.format is None and is_answer(messages[-1]),
        }


class OllamaPromptBody(OllamaTextBody):
    """A request of ``/api/generate`` for a language model."""

    RULES: ClassVar[tuple[FieldRule, ...]] = (
        excludes("system", "raw", words="raw: its prompt has no messages"),
    )

    prompt: str = ""
    system: str = Field(default="", description="The system message.")
    raw: bool = Field(default=False, description="Use the prompt as it is, without a template.")
    suffix: str = Field(
        default="", description="Only empty; else refused.", json_schema_extra={"maxLength": 0}
    )
    template: str = Field(
        default="", description="Only empty; else refused.", json_schema_extra={"maxLength": 0}
    )
    images: list[Any] = Field(
        default_factory=list,
        description="Only empty; else refused.",
        json_schema_extra={"maxItems": 0},
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise ApiError for fields that no runtime supports."""
        for name in ("suffix", "template"):
            if getattr(self, name):
                raise build_field_error(
                    name, "is not supported by language models", "unsupported_value"
                )
        if self.images:
            raise build_field_error(
                "images", "is not supported by language models", "unsupported_value"
            )
        return self

    @property
    def is_change(self) -> bool:
        return not self.prompt

    def _build_content(self) -> dict[str, Any]:
        if self.raw:
            return {"prompt": self.prompt}
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"messages": (*system, {"role": "user", "content": self.prompt})}


# A single text may be empty: it loads the model
_INPUT = BeforeValidator(
    parse_texts,
    json_schema_input_type=str
    | Annotated[list[str], Field(min_length=1, max_length=1)]
    | Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_INPUTS)
    ],
)


class OllamaEmbedBody(OllamaBody):
    """A request of ``/api/embed``, or of the older ``/api/embeddings``."""

    input: Annotated[list[str], Field(max_length=MAX_INPUTS), _INPUT] | None = Field(
        default=None, description="A text or several. None: load the model."
    )
    prompt: str = Field(default="", description="The text of `/api/embeddings`.")
    dimensions: Annotated[Any, WithJsonSchema({"type": "null"})] = Field(
        default=None, description="Refused: embeddings have the dimensions of the model."
    )
    prompt_name: PromptName = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dimensions is not None:
            message = "is not supported: embeddings have the dimensions of the model"
            raise build_field_error("dimensions", message, "unsupported_value")
        if self.input and len(self.input) > 1 and "" in self.input:
            raise build_field_error("input", "must not have an empty text")
        return self

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts; none if the request only loads the model."""
        return tuple(filter(None, self.input or [self.prompt]))
