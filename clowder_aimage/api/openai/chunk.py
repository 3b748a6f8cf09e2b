"""Answers of OpenAI's text APIs: whole objects, and the chunks of a stream."""

from __future__ import annotations

import array
import base64
import json
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from clowder_aimage.api import answer_stream
from clowder_aimage.api.text.request import (
    ChatRequest,
    CompletionRequest,
    EmbeddingsBody,
    TextBody,
)
from clowder_aimage.engine.event import Event
from clowder_aimage.errors import ModelError
from clowder_aimage.model.text.language_model import (
    STOP,
    TOOL_CALLS,
    Embeddings,
    TextDelta,
    TextEnd,
    Token,
    ToolCall,
)

_DONE = answer_stream.encode_event(None, "[DONE]")


@dataclass(slots=True)
class _Choice:
    """A text so far; ``offset`` is the number of its characters that were sent."""

    content: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    end: TextEnd | None = None
    offset: int = 0


class TextAnswer:
    """The texts of a request: ``add`` takes the events of all choices, ``whole`` is the answer.

    ``frames`` and ``end`` are those of a stream. ``model``, ``digest`` and ``warnings`` are set
    when known.
    """

    ID: ClassVar[str]
    OBJECT: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(self, body: TextBody, choices: int) -> None:
        self._has_usage = body.has_usage
        self._choices = [_Choice() for _ in range(choices)]
        self._id = f"{self.ID}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self.model, self.digest = "", ""
        self.warnings = list[str]()

    @staticmethod
    def is_text(event: Event) -> bool:
        """Return True for an event of a text."""
        return isinstance(event, TextDelta | ToolCall | TextEnd)

    def add(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Take an event, and return the new parts of its choice, for a stream."""
        choice = self._choices[index]
        if isinstance(event, TextDelta):
            # An empty piece lets other requests have their turn
            if not event.text and not event.tokens:
                return []
            (choice.thinking if event.kind == "thinking" else choice.content).append(event.text)
            choice.tokens += event.tokens if event.kind == "content" else ()
            return self._build_parts(index, event)
        # Only in chats: completions have no tools
        if isinstance(event, ToolCall):
            return self._build_call_parts(index, event)
        if isinstance(event, TextEnd):
            choice.end = event
            return [self._build_last(index, self._find_reason(choice))]
        return []

    def iter_frames(self, numbered: tuple[int, Event]) -> Iterator[bytes]:
        """Yield the frames of an event of a choice."""
        for choice in self.add(*numbered):
            yield answer_stream.encode_event(None, self._build_object(self.CHUNK, choices=[choice]))

    def end(self) -> Iterator[bytes]:
        """Yield the frames after the last event."""
        usage = self._build_usage()
        if self._has_usage:
            counts = {"usage": usage, "timings": self._compute_timings(), **self._list_warnings()}
            yield answer_stream.encode_event(
                None, self._build_object(self.CHUNK, choices=[], **counts)
            )
        yield _DONE

    def build_body(self) -> dict[str, Any]:
        """Return the answer without a stream. Raises ModelError if a text has no end."""
        usage = self._build_usage()
        choices = [self._finish_choice(at, choice) for at, choice in enumerate(self._choices)]
        remarks = self._list_warnings()
        return self._build_object(self.OBJECT, choices=choices, usage=usage, **remarks)

    def _list_warnings(self) -> dict[str, list[str]]:
        """Return the field with the warnings, if any; several choices have the same ones."""
        return {"warnings": [*dict.fromkeys(self.warnings)]} if self.warnings else {}

    def _build_object(self, kind: str, **fields: Any) -> dict[str, Any]:
        answer = {"id": self._id, "object": kind, "created": self._created, "model": self.model}
        if self.digest:
            answer["system_fingerprint"] = f"fp_{self.digest.partition(':')[2][:12]}"
        return answer | fields

    def _build_usage(self) -> dict[str, Any]:
        """Return the counts of tokens: a prompt counts once for all of its choices."""
        ends = [choice.end for choice in self._choices]
        if None in ends:
            raise ModelError("the model ended a text without its counts")
        complete = [end for end in ends if end is not None]
        prompts = [end for at, end in enumerate(complete) if self._is_first(at)]
        read, written = (
            sum(end.prompt_tokens for end in prompts),
            sum(end.tokens for end in complete),
        )
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in prompts)},
        }

    def _compute_timings(self) -> dict[str, float]:
        """Return the milliseconds of prompts and of texts, by the names of llama.cpp's server."""
        ends = [choice.end for choice in self._choices if choice.end is not None]
        prompt, text = sum(end.prompt_seconds for end in ends), sum(end.seconds for end in ends)
        return {"prompt_ms": round(1000 * prompt, 3), "predicted_ms": round(1000 * text, 3)}

    def _is_first(self, index: int) -> bool:
        return index == 0

    @staticmethod
    def _find_reason(choice: _Choice) -> str:
        reason = choice.end.reason if choice.end else STOP
        return TOOL_CALLS if choice.calls and reason == STOP else reason

    def _build_call_parts(self, index: int, event: ToolCall) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _build_parts(self, index: int, piece: TextDelta) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _build_last(self, index: int, reason: str) -> dict[str, Any]:
        raise NotImplementedError

    def _finish_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswer(TextAnswer):
    """The answer of ``/v1/chat/completions``."""

    ID, OBJECT, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatRequest) -> None:
        super().__init__(body, body.n)
        self._has_logprobs = body.logprobs
        self._max_calls = None if body.parallel_tool_calls else 1
        self._begun: set[int] = set()

    def _build_parts(self, index: int, piece: TextDelta) -> list[dict[str, Any]]:
        name = "reasoning_content" if piece.kind == "thinking" else "content"
        tokens = piece.tokens if piece.kind == "content" else ()
        return self._build_deltas(index, {name: piece.text}, tokens) if piece.text or tokens else []

    def _build_call_parts(self, index: int, event: ToolCall) -> list[dict[str, Any]]:
        """Return the delta with a call; further ones are left out if they may not be parallel."""
        calls = self._choices[index].calls
        if len(calls) == self._max_calls:
            return []
        function = {"name": event.name, "arguments": event.arguments}
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        calls.append(call)
        return self._build_deltas(index, {"tool_calls": [{"index": len(calls) - 1, **call}]})

    def _build_deltas(
        self, index: int, delta: dict[str, Any], tokens: Sequence[Token] = ()
    ) -> list[dict[str, Any]]:
        """Return a delta, after the one with the role if it is the first."""
        chunk = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._has_logprobs and tokens:
            chunk["logprobs"] = _build_logprobs(tokens)
        if index in self._begun:
            return [chunk]
        self._begun.add(index)
        role_delta = {"role": "assistant", "content": ""}
        return [chunk | {"delta": role_delta, "logprobs": None}, chunk]

    def _build_last(self, index: int, reason: str) -> dict[str, Any]:
        delta = {} if index in self._begun else {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _finish_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        content, thinking = "".join(choice.content), "".join(choice.thinking)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.calls:
            message |= {"content": content or None, "tool_calls": choice.calls}
        if thinking:
            message["reasoning_content"] = thinking
        return {
            "index": index,
            "message": message,
            "logprobs": _build_logprobs(choice.tokens) if self._has_logprobs else None,
            "finish_reason": self._find_reason(choice),
        }


class CompletionAnswer(TextAnswer):
    """The answer of ``/v1/completions``."""

    ID, OBJECT, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest) -> None:
        super().__init__(body, body.n * len(body.prompt))
        self._n = body.n
        self._has_logprobs = body.logprobs is not None
        self._echoes = [prompt if body.echo else "" for prompt in body.prompt]

    def _is_first(self, index: int) -> bool:
        return index % self._n == 0

    def _build_parts(self, index: int, piece: TextDelta) -> list[dict[str, Any]]:
        choice = self._choices[index]
        is_first = len(choice.content) + len(choice.thinking) == 1
        text = (self._echoes[index // self._n] if is_first else "") + piece.text
        choice_part = self._build_choice(index, text, piece.tokens, choice.offset)
        choice.offset += len(piece.text)
        return [choice_part] if text or piece.tokens else []

    def _build_last(self, index: int, reason: str) -> dict[str, Any]:
        choice = self._choices[index]
        is_empty = not choice.content and not choice.thinking
        text = self._echoes[index // self._n] if is_empty else ""
        return self._build_choice(index, text) | {"finish_reason": reason}

    def _finish_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = self._echoes[index // self._n] + "".join(choice.content)
        reason = {"finish_reason": self._find_reason(choice)}
        return self._build_choice(index, text, choice.tokens) | reason

    def _build_choice(
        self, index: int, text: str, tokens: Sequence[Token] = (), offset: int = 0
    ) -> dict[str, Any]:
        logprobs = _build_legacy_logprobs(tokens, offset) if self._has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}


def _build_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    return {"content": [describe_token(token) for token in tokens], "refusal": None}


def describe_token(token: Token) -> dict[str, Any]:
    """Return a token with its log probability and those of its alternatives."""
    alternatives = [_describe_logprob(alternative) for alternative in token.alternatives]
    return {**_describe_logprob(token), "top_logprobs": alternatives}


def _describe_logprob(token: Token) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def _build_legacy_logprobs(tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    """Return the log probabilities of a completion; offsets are in characters."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            {alternative.text: alternative.logprob for alternative in tok.alternatives}
            for tok in tokens
        ],
        "text_offset": offsets,
    }


def encode_embeddings(result: Embeddings, body: EmbeddingsBody, model: str) -> str:
    """Return the answer of ``/v1/embeddings``, JSON that may have millions of numbers."""
    vectors = result.vectors
    if len(vectors) != len(body.input):
        raise ModelError(f"the model returned {len(vectors)} of {len(body.input)} embeddings")
    encode = _pack if body.encoding_format == "base64" else list
    facts: dict[str, Any] = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(vector)}
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": result.tokens, "total_tokens": result.tokens},
    }
    if warnings := result.list_warnings():
        facts["warnings"] = warnings
    return json.dumps(facts)


def _pack(vector: Sequence[float]) -> str:
    """Return float32 values, the lowest byte first, in base64."""
    values = array.array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()
