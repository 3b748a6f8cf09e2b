"""The operations of language models in ollama's interface."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from clowder_aimage.api.ollama.text_body import OllamaChatBody, OllamaEmbedBody
from clowder_aimage.api.openai.text_operation import CUT, MAX_BODY
from clowder_aimage.http.operation import COMPUTES, OLLAMA, Answer, Operation
from clowder_aimage.http.route import INFER


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
    warnings: NotRequired[
        Annotated[list[str], Field(description="What the prompt lacks. In the last line.")]
    ]


class OllamaEmbeddings(TypedDict):
    """Embeddings; without a text the model is only loaded."""

    model: NotRequired[str]
    embeddings: NotRequired[list[list[float]]]


class OllamaEmbedding(TypedDict):
    """The embedding of a text; without one the model is only loaded."""

    embedding: NotRequired[list[float]]


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
    (Answer("The embeddings.", OllamaEmbeddings, headers=CUT),),
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
    (Answer("The embedding.", OllamaEmbedding, headers=CUT),),
    limit=MAX_BODY,
    body=OllamaEmbedBody,
    refusals=COMPUTES,
)
