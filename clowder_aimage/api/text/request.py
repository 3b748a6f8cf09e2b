"""The requests of OpenAI's text APIs: chat completions, completions and embeddings.

The fields are those of OpenAI's API, and extensions of other servers: ``top_k``, ``min_p``,
``repetition_penalty`` and ``chat_template_kwargs`` are vLLM's.
"""

from __future__ import annotations

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
from clowder_aimage.model.text.language_model import (
    MAX_ALTERNATIVES,
    MAX_SEED,
    MAX_STOP,
    MAX_STOPS,
    EmbeddingRequest,
    Sampling,
    TextRequest,
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


_IF_SCHEMA: JsonDict = {
    "if": {"properties": {"type": {"const": "json_schema"}}},
    "then": {
        "required": ["json_schema"],
        "properties": {
            "json_schema": {
                "type": "object",
                "required": ["schema"],
                "properties": {"schema": {"type": "object"}},
            }
        },
    },
}


class TextFormat(RequestBody):
    """Text, a JSON object, or JSON of a schema."""

    model_config = ConfigDict(json_schema_extra=_IF_SCHEMA)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(
        default=None,
        description="An object whose `schema` is a JSON Schema; needed by json_schema.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "json_schema" and self.value is None:
            raise ValueError("needs json_schema with a schema, a JSON object")
        return self

    @property
    def value(self) -> Mapping[str, Any] | None:
        """The JSON Schema of the answer; an empty one is any JSON object."""
        if self.type == "text":
            return None
        schema = (self.json_schema or {}).get("schema") if self.type == "json_schema" else {}
        return schema if isinstance(schema, dict) else None


class TemplateFields(RequestBody):
    """Fields of the chat template."""

    model_config = RequestBody.model_config | {"extra": "forbid"}
    enable_thinking: bool | None = None


class ChatRequest(TextBody):
    """A request of ``/v1/chat/completions``."""

    RULES: ClassVar[tuple[FieldRule, ...]] = (requires("top_logprobs", "logprobs"),)

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: _Tokens = Field(
        default=None, description="Newer name of `max_tokens`, and used if both are set."
    )
    logprobs: bool = Field(default=False, description="Return the log probability of each token.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = Field(
        default=None, description="The most probable tokens at each place; requires `logprobs`."
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
    tool_choice: Annotated[Any, WithJsonSchema({"enum": ["auto", "none"]})] = Field(
        default="auto", description="A model cannot be made to call a function."
    )
    parallel_tool_calls: bool = Field(
        default=True, description="false returns only the first call."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        Field(
            default=None,
            description="`none` and `minimal` turn thinking off, others on, in models that have "
            "both.",
        )
    )
    chat_template_kwargs: TemplateFields | None = Field(
        default=None, description="Takes precedence over `reasoning_effort`. An extension."
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
        if self.tool_choice not in ("auto", "none"):
            allowed = 'must be "auto" or "none": a model cannot be made to call a function'
            raise build_field_error("tool_choice", allowed, "unsupported_value")
        return self

    @property
    def _thinking(self) -> bool | None:
        if self.chat_template_kwargs and self.chat_template_kwargs.enable_thinking is not None:
            return self.chat_template_kwargs.enable_thinking
        effort = self.reasoning_effort
        return None if effort is None else effort not in ("none", "minimal")

    def build_requests(self) -> list[TextRequest]:
        """Return the request of each choice."""
        tools = () if self.tool_choice == "none" else tuple(tool.to_dict() for tool in self.tools)
        request = TextRequest(
            messages=tuple(message.to_dict() for message in self.messages),
            tools=tools,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            sampling=self.build_sampling(),
            stop=tuple(self.stop),
            alternatives=(self.top_logprobs or 0) if self.logprobs else None,
            schema=self.response_format.value if self.response_format else None,
            thinking=self._thinking,
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
        return EmbeddingRequest(tuple(self.input))
