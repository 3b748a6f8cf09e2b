"""Answers of language models in the Python interface, and requests for them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypedDict

from clowder_aimage.client.work_thread import IsCancelled, check_cancelled
from clowder_aimage.model.text.language_model import (
    EmbeddingRequest,
    Sampling,
    TextDelta,
    TextEnd,
    TextEvent,
    TextNotice,
    TextRequest,
)

Messages = str | Sequence[Mapping[str, Any]]
OnText = Callable[[str], object]
_SHOWN = 40  # characters


class AnswerKeywords(TypedDict, total=False):
    """The parameters of ``chat``; None is the default of the model."""

    # Instructions for the model.
    system: str | None
    # End the answer after this number of tokens.
    max_tokens: int | None
    # How freely tokens are drawn; 0 takes the most probable one.
    temperature: float | None
    # Draw from the most probable tokens up to this probability.
    top_p: float | None
    # Draw from this number of most probable tokens.
    top_k: int | None
    # Draw from tokens that have this part of the highest probability.
    min_p: float | None
    # The same seed gives the same answer. Default: random.
    seed: int | None
    # End the answer before these texts.
    stop: Sequence[str] | None
    # Let the model think before it answers.
    think: bool | None
    # The answer is JSON that this JSON Schema allows; an empty one allows any object.
    schema: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a language model: its text, its thoughts before it, and counts of tokens.

    ``reason`` is stop, or length for an answer that is cut off.
    """

    text: str
    thinking: str
    reason: str
    prompt_tokens: int
    tokens: int
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        return f"<Answer {shown!r}, {self.tokens} tokens>"

    def __str__(self) -> str:
        return self.text


def build_text_request(messages: Messages, options: AnswerKeywords) -> TextRequest:
    """Return the request for an answer to a text, or to messages of a chat. Raises UsageError."""
    values: dict[str, Any] = {**options}
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if system := values.pop("system", None):
        messages = [{"role": "system", "content": system}, *messages]
    stop = values.pop("stop", None) or ()
    return TextRequest(
        tuple(messages),
        max_tokens=values.pop("max_tokens", None),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        thinking=values.pop("think", None),
        schema=values.pop("schema", None),
        # An unknown parameter is a TypeError, as of any function.
        sampling=Sampling(**values),
    )


def build_embedding_request(texts: str | Sequence[str], prompt: str | None) -> EmbeddingRequest:
    """Return the request for the embeddings of texts, or of one."""
    return EmbeddingRequest((texts,) if isinstance(texts, str) else tuple(texts), prompt)


def collect_answer(
    events: Generator[TextEvent, None, None], on_text: OnText | None, is_cancelled: IsCancelled
) -> Answer:
    """Return the answer of events; call ``on_text`` with each piece of its text.

    Raises CancelledError, and what the events raise.
    """
    pieces: dict[str, list[str]] = {"content": [], "thinking": []}
    warnings, end = list[str](), TextEnd("", 0, 0)
    with closing(events):
        for event in events:
            check_cancelled(is_cancelled)
            if isinstance(event, TextDelta):
                pieces[event.kind].append(event.text)
                if on_text is not None and event.kind == "content" and event.text:
                    on_text(event.text)
            elif isinstance(event, TextNotice):
                warnings += event.warnings
            elif isinstance(event, TextEnd):
                end = event
    content, thinking = ("".join(texts) for texts in pieces.values())
    return Answer(content, thinking, end.reason, end.prompt_tokens, end.tokens, tuple(warnings))
