"""The operations of language models in OpenAI's interface."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from clowder_aimage.api.model_choice import MODEL_HEADERS
from clowder_aimage.api.request_body import StrictQuery
from clowder_aimage.api.text.request import ChatRequest, CompletionRequest, EmbeddingsBody
from clowder_aimage.http.operation import COMPUTES, OPENAI, Answer, Operation
from clowder_aimage.http.route import INFER

# Bytes: ample for the context of a model
MAX_BODY = 4 << 20
_Fingerprint = Annotated[str, Field(description="The first digits of the manifest's digest.")]
HEADERS = {
    **MODEL_HEADERS,
    "X-Aimage-Digest": "The manifest of that AImage; with `stream`, if it was in the store.",
}
CUT = {"X-Aimage-Warning": "A sentence about texts that were cut."}
_Warnings = Annotated[
    list[str], Field(description="Sentences about what is not in a prompt, or has no effect.")
]
_FinishReason = Literal["stop", "length", "tool_calls"] | None


class CachedTokens(TypedDict):
    """Tokens of a prompt that were known from an earlier one."""

    cached_tokens: int


class TokenUsage(TypedDict):
    """The counts of tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: NotRequired[int]
    prompt_tokens_details: NotRequired[CachedTokens]


class ChatAnswerMessage(TypedDict):
    """The next message of a chat."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[dict[str, Any]]]
    reasoning_content: NotRequired[
        Annotated[str, Field(description="The thinking that preceded the answer.")]
    ]


class ChatChoice(TypedDict):
    """An answer."""

    index: int
    message: ChatAnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: _FinishReason


class ChatCompletion(TypedDict):
    """The answers of a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: NotRequired[_Fingerprint]
    choices: list[ChatChoice]
    usage: TokenUsage
    warnings: NotRequired[_Warnings]


class TextChoice(TypedDict):
    """A text."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: _FinishReason


class TextCompletion(TypedDict):
    """Continuations of texts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: NotRequired[_Fingerprint]
    choices: list[TextChoice]
    usage: TokenUsage
    warnings: NotRequired[_Warnings]


class EmbeddingObject(TypedDict):
    """An embedding."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    """Embeddings."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: TokenUsage
    warnings: NotRequired[Annotated[list[str], Field(description="Sentences about cut texts.")]]


CHAT = Operation(
    "POST",
    "/v1/chat/completions",
    INFER,
    OPENAI,
    "chat",
    "Answer the messages of a chat.",
    (
        Answer(
            "The answer; with `stream`, a stream of chunks.",
            ChatCompletion,
            media=("text/event-stream",),
            headers=HEADERS,
        ),
    ),
    details="Chunks are `chat.completion.chunk`; the last is `[DONE]`. An error after the first "
    "chunk is sent as the event `error`.",
    limit=MAX_BODY,
    body=ChatRequest,
    query=StrictQuery,
    refusals=COMPUTES,
)
COMPLETE = Operation(
    "POST",
    "/v1/completions",
    INFER,
    OPENAI,
    "complete",
    "Continue texts.",
    (
        Answer(
            "The texts; with `stream`, a stream of chunks.",
            TextCompletion,
            media=("text/event-stream",),
            headers=HEADERS,
        ),
    ),
    details="The last chunk is `[DONE]`. An error after the first chunk is sent as the event "
    "`error`.",
    limit=MAX_BODY,
    body=CompletionRequest,
    query=StrictQuery,
    refusals=COMPUTES,
)
EMBED = Operation(
    "POST",
    "/v1/embeddings",
    INFER,
    OPENAI,
    "embed",
    "Compute embeddings of texts.",
    (Answer("The embeddings.", EmbeddingList, headers=HEADERS | CUT),),
    limit=MAX_BODY,
    body=EmbeddingsBody,
    query=StrictQuery,
    refusals=COMPUTES,
)
