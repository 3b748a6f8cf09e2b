"""The requests of OpenAI's text APIs: chat completions, completions and embeddings.

The fields are those of OpenAI's API, and extensions of other servers: ``top_k``, ``min_p``,
``repetition_penalty`` and ``chat_template_kwargs`` are vLLM's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict

from clowder_aimage.api.field_rule import FieldRule, excludes, requires
from clowder_aimage.api.parameter_field import Seed
from clowder_aimage.api.request_body import GenerationBody, RequestBody, build_field_error
from clowder_aimage.api.text.chat_message import MAX_MESSAGES, MAX_TOOLS, Message, Tool
from clowder_aimage.errors import UsageError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.model.text.language_model import (
    MAX_ALTERNATIVES,
    MAX_PROMPT_NAME,
    MAX_SEED,
    MAX_STOP,
    MAX_STOPS,
    EmbeddingRequest,
    Sampling,
    TextRequest,
    is_answer,
)

# Texts of a request
MAX_CHOICES = 128
# Texts whose embeddings are requested, as at OpenAI
MAX_INPUTS = 2048
_MAX_TOKENS = 1 << 31
_TOKENS = "must be text: lists of tokens are not supported"
_NO_EFFECT = frozenset(
    {"user", "safety_identifier", "prompt_cache_key", "store", "metadata", "service_tier"}
)
_Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
_MOST_TOKENS = "The maximum number of tokens of a text; -1 for as many as the context has room for."
# Characters of the variables of a chat template
_MAX_OPTIONS = 16384
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_RESERVED = frozenset(
    "messages conversation conversations tools documents add_generation_prompt chat_template"
    " continue_final_message bos_token eos_token unk_token sep_token pad_token cls_token"
    " mask_token raise_exception strftime_now namespace range dict loop caller self".split()
)
# A field that is refused
_Nothing = Annotated[Any, WithJsonSchema({"type": "null"})]


def parse_stops(value: object) -> list[object]:
    """Return the texts in a list. Empty ones, which clients send for none, are left out."""
    values = value if isinstance(value, list) else [value]
    return [text for text in values if text not in ("", None)]


def parse_texts(value: object) -> object:
    """Return the texts of a field that is a text or a list. Raises ValueError for tokens."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and texts and all(isinstance(text, int | list) for text in texts):
        raise ValueError(_TOKENS)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a text or a list of texts")
    return texts


def _read_count(value: object) -> object:
    # llama.cpp's clients send it for no limit
    return None if value == -1 else value


def _clamp_top_k(value: int) -> int:
    # -1 is vLLM's for no limit
    return max(0, value)


_Stop = Annotated[str, Field(max_length=MAX_STOP)]
PromptName = Annotated[
    str | None,
    Field(
        max_length=MAX_PROMPT_NAME,
        description="A prompt that the model's files name, before each text. None: its default. "
        "An extension.",
    ),
]
_StopList = Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
StopTexts = _Stop | Annotated[list[_Stop | None], Field(max_length=MAX_STOPS)]
Stops = Annotated[
    _StopList,
    BeforeValidator(parse_stops, json_schema_input_type=StopTexts),
    Field(description="Texts that end the answer and are not part of it."),
]
_Count = Annotated[int, Field(ge=1, le=_MAX_TOKENS)]
_Tokens = Annotated[
    _Count | None, BeforeValidator(_read_count, json_schema_input_type=_Count | Literal[-1])
]
_Text = Annotated[str, Field(min_length=1)]


def build_texts_validator(most: int) -> BeforeValidator:
    """Return the reader of a field that is a text, or a list of up to ``most``; none is empty."""
    listed = Annotated[list[_Text], Field(min_length=1, max_length=most)]
    return BeforeValidator(parse_texts, json_schema_input_type=_Text | listed)


class SamplingFields(RequestBody):
    """Parameters of drawing tokens; None leaves them to the model."""

    temperature: float | None = Field(
        default=None,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="0 takes the most probable token. Default: the model's.",
    )
    top_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    top_k: Annotated[int, Field(ge=-1, le=1 << 31), AfterValidator(_clamp_top_k)] | None = Field(
        default=None, description="0 or -1: no limit. An extension."
    )
    min_p: float | None = Field(
        default=None, ge=0, le=1, allow_inf_nan=False, description="An extension."
    )
    repetition_penalty: float | None = Field(
        default=None,
        ge=1e-3,
        le=100,
        allow_inf_nan=False,
        description="An extension; 1 is none.",
    )
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    seed: Seed = Field(
        default=None, description="The same seed gives the same text; -1 or none draws one."
    )

    def build_sampling(self) -> Sampling:
        """Return the values of a request."""
        return Sampling(**{name: getattr(self, name) for name in SamplingFields.model_fields})


class StreamOptions(RequestBody):
    """Additions to a stream."""

    include_usage: bool = Field(
        default=False, description="Send the counts of tokens in a chunk of their own at the end."
    )


class TextBody(SamplingFields, GenerationBody):
    """The fields that requests of chat and of completions have in common."""

    NO_EFFECT = _NO_EFFECT

    max_tokens: _Tokens = Field(default=None, description=_MOST_TOKENS)
    n: _Choices = Field(
        default=1,
        description="Number of texts of each prompt, made one after another, with consecutive "
        "seeds.",
    )
    stop: Stops = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logit_bias: dict[str, float] = Field(
        default_factory=dict,
        description="Only empty; else refused.",
        json_schema_extra={"maxProperties": 0},
    )

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        """Raise ApiError for fields that no runtime supports."""
        if self.logit_bias:
            raise build_field_error("logit_bias", "is not supported", "unsupported_value")
        return self

    @property
    def has_usage(self) -> bool:
        """Return True if a stream ends with the counts of tokens."""
        return self.stream_options.include_usage

    def build_requests(self) -> list[TextRequest]:
        """Return the request of each choice, in order. Raises ApiError."""
        raise NotImplementedError

    def _repeat(self, request: TextRequest) -> list[TextRequest]:
        """Return ``n`` requests, each with a seed that is one higher."""
        sampling, seed = request.sampling, request.sampling.seed
        seeds = [None if seed is None else (seed + at) & MAX_SEED for at in range(self.n)]
        return [replace(request, sampling=replace(sampling, seed=number)) for number in seeds]


_NAMED: JsonDict = {"required": ["schema"], "properties": {"schema": {"type": "object"}}}
_UNNAMED: JsonDict = {"properties": {"schema": {"type": "null"}}}
_WITHOUT: JsonDict = {"properties": {"json_schema": {"anyOf": [{"type": "null"}, _UNNAMED]}}}
# A schema in one of two places: needed by json_schema, and not with text
_SCHEMA_PLACES: JsonDict = {
    "anyOf": [
        {"required": ["json_schema"], "properties": {"json_schema": {"type": "object", **_NAMED}}},
        _NAMED,
        {"properties": {"type": {"enum": ["text", "json_object"]}}},
    ],
    "allOf": [
        {"anyOf": [_UNNAMED, _WITHOUT]},
        {
            "anyOf": [
                {"properties": {"type": {"enum": ["json_object", "json_schema"]}}},
                {"allOf": [_UNNAMED, _WITHOUT]},
            ]
        },
    ],
}


class NamedSchema(RequestBody):
    """A JSON Schema. An answer always observes it strictly."""

    # A label
    NO_EFFECT = frozenset({"name"})

    value: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool = Field(default=True, description="No difference: the schema is observed.")


class TextFormat(RequestBody):
    """Text, a JSON object, or JSON of a schema."""

    model_config = ConfigDict(json_schema_extra=_SCHEMA_PLACES)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = Field(
        default=None, description="An object whose `schema` is a JSON Schema."
    )
    bare_schema: dict[str, Any] | None = Field(
        default=None,
        alias="schema",
        description="A JSON Schema in place of that in `json_schema`, as at llama.cpp. An "
        "extension.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        count = len(self._schemas)
        if self.type == "text" and count:
            raise ValueError("has a schema: it needs the type json_schema or json_object")
        if count > 1:
            raise ValueError("has two schemas: in json_schema, and beside it")
        if self.type == "json_schema" and not count:
            raise ValueError("needs json_schema with a schema, a JSON object")
        return self

    @property
    def _schemas(self) -> list[dict[str, Any]]:
        named = None if self.json_schema is None else self.json_schema.value
        return [schema for schema in (named, self.bare_schema) if schema is not None]

    @property
    def schema_of_answer(self) -> Mapping[str, Any] | None:
        """The JSON Schema of the answer; an empty one is any JSON object."""
        return None if self.type == "text" else next(iter(self._schemas), {})


class NamedFunction(RequestBody):
    """A function of ``tools``."""

    name: str


def _read_tool_choice(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


class ToolChoice(RequestBody):
    """The tools that the answer may call: any, none, at least one, or a function."""

    type: Literal["auto", "none", "required", "function"] = "auto"
    function: NamedFunction | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "function") != (self.function is not None):
            raise ValueError("must have the type function, and a function with a name")
        return self


def _check_template_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return variables for a chat template without nulls. Raises ValueError."""
    for name, value in options.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"has a name that is not one of a variable: {name[:40]!a}")
        if name in _RESERVED:
            raise ValueError(f"cannot set {name}, which follows from the other fields")
        if name == "enable_thinking" and not isinstance(value, bool | None):
            raise ValueError("has an enable_thinking that is not a boolean")
    if len(json.dumps(options)) > _MAX_OPTIONS:
        raise ValueError(f"must be at most {_MAX_OPTIONS} characters of JSON")
    return {name: value for name, value in options.items() if value is not None}


def build_request(**fields: Any) -> TextRequest:
    """Return a request of a model. Raises ApiError for fields that do not fit each other."""
    try:
        return TextRequest(**fields)
    except UsageError as error:
        message = f"{error.message}; {error.hint}" if error.hint else error.message
        param = error.facts.get("field")
        raise ApiError(400, message, code="unsupported_value", param=param) from None


class ChatRequest(TextBody):
    """A request of ``/v1/chat/completions``."""

    RULES: ClassVar[tuple[FieldRule, ...]] = (requires("top_logprobs", "logprobs"),)

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: _Tokens = Field(
        default=None, description="Newer name of `max_tokens`, and used if both are set."
    )
    logprobs: bool = Field(default=False, description="Return the log probability of each token.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] = Field(
        default=0, description="The most probable tokens at each place; requires `logprobs`."
    )
    response_format: TextFormat | None = Field(
        default=None, description="An error (400) where the runtime of the model has no grammars."
    )
    tools: list[Tool] = Field(
        default_factory=list,
        max_length=MAX_TOOLS,
        description="Functions that the model may call. An error (400) where its template has no "
        "tools.",
    )
    tool_choice: Annotated[
        ToolChoice,
        BeforeValidator(
            _read_tool_choice,
            json_schema_input_type=Literal["auto", "none", "required"] | ToolChoice,
        ),
    ] = Field(
        default=ToolChoice(),
        description="`required`, or an object with the name of a function: the answer calls some, "
        "or that one. An error (400) where the runtime of the model has no grammars.",
    )
    parallel_tool_calls: bool = Field(
        default=True, description="false returns only the first call."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        Field(
            default=None,
            description="Passed to chat templates that read it. In others that can turn thinking "
            "on and off, `none` and `minimal` turn it off, others on; else it is ignored.",
        )
    )
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(max_length=32), AfterValidator(_check_template_options)
    ] = Field(
        default_factory=dict,
        description="Variables of the chat template, such as `enable_thinking`. They take "
        "precedence over `reasoning_effort`. Those that it does not read are ignored. An "
        "extension.",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="The answer continues the last message. Default: true if that is of the "
        "assistant, unless JSON is requested. An error (400) with tools. An extension.",
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="false: the prompt ends with the last message. true: the answer is a new "
        "message. An extension.",
    )
    modalities: list[Literal["text"]] = Field(default_factory=list)
    functions: list[Any] = Field(
        default_factory=list,
        description="Only empty: replaced by `tools`.",
        json_schema_extra={"maxItems": 0},
    )
    function_call: _Nothing = Field(default=None, description="Refused: replaced by `tool_choice`.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise ApiError for incompatible fields."""
        if self.functions or self.function_call is not None:
            name = "functions" if self.functions else "function_call"
            raise build_field_error(name, "is not supported: use tools", "unsupported_value")
        names = [tool.function.name for tool in self.tools]
        if (function := self.tool_choice.function) and function.name not in names:
            raise build_field_error("tool_choice", "names a function that tools does not have")
        if self.tool_choice.type == "required" and not names:
            raise build_field_error("tool_choice", "requires tools")
        if self.continue_final_message and self.add_generation_prompt:
            message = "must be false with continue_final_message"
            raise build_field_error("add_generation_prompt", message)
        return self

    @property
    def _must_call(self) -> tuple[str, ...]:
        """The names of the functions of which the answer calls some."""
        if self.tool_choice.function is not None:
            return (self.tool_choice.function.name,)
        is_required = self.tool_choice.type == "required"
        return tuple(tool.function.name for tool in self.tools) if is_required else ()

    @property
    def _thinking(self) -> bool | None:
        stated = (self.chat_template_kwargs.get(name) for name in ("enable_thinking", "thinking"))
        return next((value for value in stated if isinstance(value, bool)), None)

    @property
    def _is_continued(self) -> bool:
        if self.continue_final_message is not None or self.add_generation_prompt:
            return bool(self.continue_final_message)
        schema = self.response_format.schema_of_answer if self.response_format else None
        return schema is None and is_answer(self.messages[-1].to_dict())

    def build_requests(self) -> list[TextRequest]:
        """Return the request of each choice."""
        tools = tuple(tool.to_dict() for tool in self.tools)
        is_named = self.tool_choice.function is not None
        request = build_request(
            messages=tuple(message.to_dict() for message in self.messages),
            tools=() if self.tool_choice.type == "none" else tools,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            sampling=self.build_sampling(),
            stop=tuple(self.stop),
            alternatives=self.top_logprobs if self.logprobs else None,
            schema=self.response_format.schema_of_answer if self.response_format else None,
            must_call=self._must_call,
            has_one_call=is_named or not self.parallel_tool_calls,
            thinking=self._thinking,
            effort=self.reasoning_effort,
            template_options=self.chat_template_kwargs,
            has_opening=self.add_generation_prompt is not False,
            is_continued=self._is_continued,
        )
        return self._repeat(request)


class CompletionRequest(TextBody):
    """A request of ``/v1/completions``: each text of ``prompt`` is continued ``n`` times."""

    RULES: ClassVar[tuple[FieldRule, ...]] = (excludes("echo", "logprobs"),)

    prompt: Annotated[
        list[str], Field(max_length=MAX_CHOICES), build_texts_validator(MAX_CHOICES)
    ] = Field(description="A text or several; lists of tokens are refused.")
    # OpenAI's default for completions
    max_tokens: _Tokens = Field(default=16, description=_MOST_TOKENS)
    echo: bool = Field(default=False, description="Begin each text with its prompt.")
    suffix: str = Field(
        default="", description="Only empty; else refused.", json_schema_extra={"maxLength": 0}
    )
    best_of: _Choices | None = Field(
        default=None, description="Only 1; else refused.", json_schema_extra={"maximum": 1}
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = Field(
        default=None,
        description="Return the log probabilities of each token and of this number of the most "
        "probable ones.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise ApiError for incompatible fields."""
        if self.suffix:
            raise build_field_error("suffix", "is not supported", "unsupported_value")
        if (self.best_of or 1) > 1:
            raise build_field_error("best_of", "must be 1: use n", "unsupported_value")
        if self.n * len(self.prompt) > MAX_CHOICES:
            raise build_field_error(
                "n", f"times the number of prompts must be at most {MAX_CHOICES}"
            )
        if "" in self.prompt:
            raise build_field_error("prompt", "must not be empty")
        return self

    def build_requests(self) -> list[TextRequest]:
        """Return the requests of all choices: those of the first prompt first."""
        requests = []
        for prompt in self.prompt:
            request = TextRequest(
                prompt=prompt,
                max_tokens=self.max_tokens,
                sampling=self.build_sampling(),
                stop=tuple(self.stop),
                alternatives=self.logprobs,
            )
            requests += self._repeat(request)
        return requests


class EmbeddingsBody(GenerationBody):
    """A request of ``/v1/embeddings``."""

    NO_EFFECT = _NO_EFFECT

    input: Annotated[list[str], Field(max_length=MAX_INPUTS), build_texts_validator(MAX_INPUTS)] = (
        Field(description="A text or several; lists of tokens are refused.")
    )
    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="Numbers, or float32 values in base64, the lowest byte first."
    )
    dimensions: _Nothing = Field(
        default=None, description="Refused: embeddings have the dimensions of the model."
    )
    prompt_name: PromptName = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise ApiError for fields that no model supports."""
        if self.dimensions is not None:
            message = "is not supported: embeddings have the dimensions of the model"
            raise build_field_error("dimensions", message, "unsupported_value")
        if "" in self.input:
            raise build_field_error("input", "must not be empty")
        return self

    def request(self) -> EmbeddingRequest:
        """Return the request of the model."""
        return EmbeddingRequest(tuple(self.input), self.prompt_name)
