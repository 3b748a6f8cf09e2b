"""The operations of language models: OpenAI's, and those of ollama that only they have."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from clowder_aimage.api.model_choice import MODEL_HEADERS
from clowder_aimage.api.request_body import IGNORED, StrictQuery
from clowder_aimage.api.text.ollama_body import OllamaChatBody, OllamaEmbedBody
from clowder_aimage.api.text.text_request import ChatRequest, CompletionRequest, EmbeddingsBody
from clowder_aimage.http.operation import COMPUTES, OLLAMA, OPENAI, Answer, Operation
from clowder_aimage.http.route import INFER

MAX_BODY = 4 << 20  # bytes: ample for the context of a model
_Fingerprint = Annotated[str, Field(description="The first digits of the manifest's digest.")]
_HEADERS = {
    **MODEL_HEADERS,
    **IGNORED,
    "X-Aimage-Digest": "The manifest of that AImage; with `stream`, if it was in the store.",
}
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


class OllamaText(TypedDict):
    """A line of an answer, or the whole answer."""

    model: str
    created_at: str
    message: NotRequired[
        Annotated[
            dict[str, Any],
            Field(
                description="The part of the answer: `role`, `content`, `thinking`, `tool_calls`."
            ),
        ]
    ]
    logprobs: NotRequired[list[dict[str, Any]]]
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class OllamaEmbeddings(TypedDict):
    """Embeddings; without a text the model is only loaded."""

    model: NotRequired[str]
    embeddings: NotRequired[list[list[float]]]


class OllamaEmbedding(TypedDict):
    """The embedding of a text; without one the model is only loaded."""

    embedding: NotRequired[list[float]]


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
            headers=_HEADERS,
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
            headers=_HEADERS,
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
    (Answer("The embeddings.", EmbeddingList, headers=_HEADERS),),
    limit=MAX_BODY,
    body=EmbeddingsBody,
    query=StrictQuery,
    refusals=COMPUTES,
)
OLLAMA_CHAT = Operation(
    "POST",
    "/api/chat",
    INFER,
    OLLAMA,
    "ollamaChat",
    "Answer the messages of a chat. Without messages: load the model, or unload it with "
    "`keep_alive: 0`.",
    (
        Answer(
            "The answer, in lines or with `stream: false` at once.",
            OllamaText,
            media=("application/x-ndjson",),
        ),
    ),
    limit=MAX_BODY,
    body=OllamaChatBody,
    refusals=COMPUTES,
)
OLLAMA_EMBED = Operation(
    "POST",
    "/api/embed",
    INFER,
    OLLAMA,
    "ollamaEmbed",
    "Compute embeddings of texts.",
    (Answer("The embeddings.", OllamaEmbeddings),),
    limit=MAX_BODY,
    body=OllamaEmbedBody,
    refusals=COMPUTES,
)
OLLAMA_EMBEDDINGS = Operation(
    "POST",
    "/api/embeddings",
    INFER,
    OLLAMA,
    "ollamaEmbeddings",
    "Compute the embedding of a text; the older form of `/api/embed`.",
    (Answer("The embedding.", OllamaEmbedding),),
    limit=MAX_BODY,
    body=OllamaEmbedBody,
    refusals=COMPUTES,
)
