"""The interface of language models: requests, deltas of text, and embeddings.

Nothing here imports a runtime. Requests and events are passed between processes as JSON: their
fields that differ from the defaults.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from itertools import groupby
from typing import Any, Protocol

from clowder_aimage.errors import UsageError

CHAT, COMPLETION, EMBEDDING = "chat", "completion", "embedding"
TOOLS, THINKING, GRAMMAR, LOGPROBS = "tools", "thinking", "grammar", "logprobs"
# Reasons for the end of a text
STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"
MAX_STOPS = 16
# Characters of a stop string
MAX_STOP = 1024
MAX_ALTERNATIVES = 20  # of a token
MAX_PROMPT_NAME = 256  # characters
MAX_SEED = (1 << 64) - 1
_IN_WORDS = {GRAMMAR: "JSON Schemas for its answers: use a model in GGUF"}
_IN_WORDS |= {EMBEDDING: "embeddings", LOGPROBS: "log probabilities"}
_IN_WORDS |= {COMPLETION: "texts: it computes embeddings only"}
# Bounds of a batch of several texts: a long batch would delay the other requests of the worker
_TEXTS, _CHARACTERS = 16, 4096


def _list_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from the defaults."""
    return {
        name: given
        for name, default in _list_defaults(value.__class__)
        if (given := getattr(value, name)) is not default and given != default
    }


@cache
def _list_defaults(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Return the names of the fields of a dataclass and their defaults; MISSING without one."""
    return tuple(
        (
            each.name,
            each.default if each.default_factory is MISSING else each.default_factory(),
        )
        for each in fields(kind)
    )


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of sampling; None is the default of the model, else of its runtime.

    temperature: 0 takes the most probable token. top_k: 0 does not limit. The penalties are those
    of OpenAI's API, ``repetition_penalty`` that of Transformers. seed: None draws one.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults."""
        return _list_fields(self)

    def __post_init__(self) -> None:
        """Check the ranges. Raises UsageError."""
        limits: dict[str, tuple[float, float]] = {
            "temperature": (0, 100),
            "top_p": (0, 1),
            "top_k": (0, 1 << 31),
            "min_p": (0, 1),
            "repetition_penalty": (1e-3, 100),
            "presence_penalty": (-2, 2),
            "frequency_penalty": (-2, 2),
            "seed": (0, MAX_SEED),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and least <= value <= most):
                raise UsageError(f"{name} must be between {least:g} and {most:g}, not {value!r}")


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Tokens of a text, after which another process can continue the text.

    numbers: those of the tokens in order, with a text in place of tokens whose numbers the runtime
    does not state. text: of all tokens, with the marks of thoughts and calls, if the runtime needs
    it. held: tokens with log probabilities whose text is not part of an event yet. is_partial: more
    events follow from the same tokens.
    """

    numbers: tuple[int | str, ...] = ()
    count: int = 0
    text: str = ""
    held: tuple[Token, ...] = ()
    is_partial: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults."""
        stated = _list_fields(self)
        if self.held:
            stated["held"] = [token.to_json() for token in self.held]
        return stated

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DrawnTokens:
        """Return the tokens of ``to_json``."""
        held = tuple(map(Token.from_json, value.get("held", ())))
        return cls(**{**value, "numbers": tuple(value.get("numbers", ())), "held": held})

    def __add__(self, later: DrawnTokens) -> DrawnTokens:
        numbers, count = self.numbers + later.numbers, self.count + later.count
        return DrawnTokens(numbers, count, self.text + later.text, later.held, later.is_partial)


_NONE = DrawnTokens()


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for text: an answer to ``messages``, or the continuation of ``prompt``.

    messages: those of OpenAI's API: ``role``, ``content`` (a text, or a list of parts of the type
    text), ``tool_calls``, ``tool_call_id``, ``name``, ``reasoning_content``. prompt: used as it is,
    without a template. tools: functions that the model may call, as in OpenAI's API. max_tokens:
    None for as many as the context has room for. stop: strings that end the text and are not part
    of it. alternatives: the number of most probable tokens that are returned for each token, with
    its own log probability; None for no log probabilities. schema: the JSON Schema of the answer;
    an empty one is any JSON object. thinking: turns thinking on or off in the template; None for
    its default. effort: how much to think, in the words of OpenAI's API. template_options: further
    variables of the template. has_opening: the prompt ends with the beginning of an answer.
    is_continued: the last message is an answer that the text continues. must_call: names of tools
    of which the answer calls some, and says nothing else; one call if it ``has_one_call``. begun:
    tokens of the text that were drawn before. The text continues after them; ``max_tokens``
    includes them. owner: the client; what was computed of the prompts of one is used for its own.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    alternatives: int | None = None
    schema: Mapping[str, Any] | None = None
    thinking: bool | None = None
    effort: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    has_opening: bool = True
    is_continued: bool = False
    must_call: tuple[str, ...] = ()
    has_one_call: bool = False
    begun: DrawnTokens = _NONE
    owner: str = ""

    @property
    def has_grammar(self) -> bool:
        """Return True if the text has to follow a grammar."""
        return self.schema is not None or bool(self.must_call)

    def __post_init__(self) -> None:
        """Reject fields that are out of bounds. Raises UsageError."""
        if self.is_continued:
            self._check_continued()
        if bool(self.messages) == (self.prompt is not None):
            raise UsageError("a request has either messages or a prompt")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if len(self.stop) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP for stop in self.stop):
            raise UsageError(f"stop has up to {MAX_STOPS} strings of 1 to {MAX_STOP} characters")
        if self.alternatives is not None and not 0 <= self.alternatives <= MAX_ALTERNATIVES:
            raise UsageError(f"top_logprobs must be between 0 and {MAX_ALTERNATIVES}")

    def _check_continued(self) -> None:
        """Raise UsageError for an answer that cannot be continued."""
        if not self.messages or not is_answer(self.messages[-1]):
            message = "only a last message of the assistant with a text can be continued"
            raise UsageError(message, field="messages")
        for name, is_set in (("tools", bool(self.tools)), ("a schema", self.schema is not None)):
            if is_set:
                raise UsageError(
                    f"the last message of the assistant cannot be continued with {name}",
                    hint="end the messages with one of the user",
                    field="messages",
                )

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults."""
        stated = _list_fields(self)
        for name in stated.keys() & {"sampling", "begun"}:
            stated[name] = stated[name].to_json()
        return stated

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TextRequest:
        """Return the request of ``to_json``. Raises UsageError."""
        fields = {**value}
        for name in fields.keys() & {"messages", "tools", "stop", "must_call"}:
            fields[name] = tuple(value[name])
        if "sampling" in fields:
            fields["sampling"] = Sampling(**value["sampling"])
        if "begun" in fields:
            fields["begun"] = DrawnTokens.from_json(value["begun"])
        return cls(**fields)


def is_answer(message: Mapping[str, Any]) -> bool:
    """Return True for a message of the assistant with a text and without calls."""
    is_text = bool(message.get("content")) and not message.get("tool_calls")
    return is_text and message.get("role") == "assistant"


@dataclass(frozen=True, slots=True)
class Token:
    """A drawn token: its text and bytes, and its natural log probability, before sampling.

    ``alternatives`` are the most probable tokens, without alternatives of their own.
    """

    text: str
    data: tuple[int, ...]
    logprob: float
    alternatives: tuple[Token, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults."""
        stated = _list_fields(self)
        if self.alternatives:
            stated["alternatives"] = [token.to_json() for token in self.alternatives]
        return stated

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Token:
        """Return the token of ``to_json``."""
        alternatives = tuple(map(cls.from_json, value.get("alternatives", ())))
        return cls(value["text"], tuple(value["data"]), value["logprob"], alternatives)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """An increment of text; ``tokens`` if log probabilities were requested.

    kind: "content"; "thinking" for the thoughts before the answer, without their marks. drawn: the
    tokens since the event before.
    """

    text: str
    kind: str = "content"
    tokens: tuple[Token, ...] = ()
    drawn: DrawnTokens = field(default=_NONE, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults."""
        stated = _list_fields(self)
        if self.tokens:
            stated["tokens"] = [token.to_json() for token in self.tokens]
        if "drawn" in stated:
            stated["drawn"] = self.drawn.to_json()
        return stated


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function: its name, and its arguments, a JSON object as text."""

    name: str
    arguments: str
    drawn: DrawnTokens = field(default=_NONE, compare=False)


@dataclass(frozen=True, slots=True)
class TextEnd:
    """The end of a text and its counts of tokens; ``cached_tokens`` of the prompt were cached.

    reason: STOP, LENGTH or TOOL_CALLS. seconds: of the prompt, then of the text.
    """

    reason: str
    prompt_tokens: int
    tokens: int
    cached_tokens: int = 0
    prompt_seconds: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TextNotice:
    """Remarks on a request, before its text.

    warnings: sentences. ignored: fields without an effect on this model.
    """

    warnings: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


TextEvent = TextDelta | ToolCall | TextEnd | TextNotice


def begin_events(
    notice: TextNotice, events: Generator[TextEvent, None, None]
) -> Generator[TextEvent, None, None]:
    """Return the events, after the notice if it says something."""
    return _prepend(notice, events) if notice.warnings or notice.ignored else events


def _prepend(
    notice: TextNotice, events: Generator[TextEvent, None, None]
) -> Generator[TextEvent, None, None]:
    with closing(events):
        yield notice
        yield from events


def join_deltas(events: Iterable[TextEvent]) -> Iterator[TextEvent]:
    """Yield the events with adjacent deltas of the same kind joined."""
    for kind, group in groupby(events, lambda it: isinstance(it, TextDelta) and it.kind):
        if not kind:
            yield from group
            continue
        deltas = [delta for delta in group if isinstance(delta, TextDelta)]
        tokens = tuple(token for delta in deltas for token in delta.tokens)
        drawn = sum((delta.drawn for delta in deltas), _NONE)
        yield TextDelta("".join(delta.text for delta in deltas), kind, tokens, drawn)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts whose embeddings are requested, and the name of a prompt that the model's files have.

    None is the usual prompt of the model, if it has one.
    """

    texts: tuple[str, ...]
    prompt: str | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EmbeddingRequest:
        """Return the request of an ``asdict``."""
        return cls(tuple(value["texts"]), value.get("prompt"))

    def iter_batches(self) -> Iterator[EmbeddingRequest]:
        """Yield requests for a few texts each, so that other requests run between them."""
        batch: list[str] = []
        for text in self.texts:
            if batch and (len(batch) == _TEXTS or sum(map(len, batch)) + len(text) > _CHARACTERS):
                yield replace(self, texts=tuple(batch))
                batch = []
            batch.append(text)
        if batch:
            yield replace(self, texts=tuple(batch))


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embeddings of unit length in the order of the texts, and the number of their tokens.

    cut: texts of which only the first ``limit`` tokens were used.
    """

    vectors: tuple[tuple[float, ...], ...]
    tokens: int
    cut: int = 0
    limit: int = 0

    def list_warnings(self) -> list[str]:
        """Return a sentence if texts were cut."""
        if not self.cut:
            return []
        texts = (
            f"{self.cut} of {len(self.vectors)} texts were"
            if len(self.vectors) > 1
            else "the text was"
        )
        return [f"{texts} cut: the model reads {self.limit} tokens of a text"]

    def pack(self) -> bytes:
        """Return the numbers in order, as 64-bit floats, little-endian."""
        return b"".join(struct.pack(f"<{len(vector)}d", *vector) for vector in self.vectors)

    @classmethod
    def unpack(cls, data: bytes, count: int, *facts: int) -> Embeddings:
        """Return ``count`` packed embeddings; facts: the other fields."""
        numbers = struct.unpack(f"<{len(data) // 8}d", data)
        size = len(numbers) // max(1, count)
        vectors = tuple(numbers[at * size : (at + 1) * size] for at in range(count))
        return cls(vectors, *facts)


def join_embeddings(parts: Sequence[Embeddings]) -> Embeddings:
    """Return the embeddings of several batches as those of one."""
    vectors = tuple(vector for part in parts for vector in part.vectors)
    tokens, cut = sum(part.tokens for part in parts), sum(part.cut for part in parts)
    return Embeddings(vectors, tokens, cut, max((part.limit for part in parts), default=0))


class ContextError(UsageError):
    """A prompt has more tokens than the context of the model."""

    def __init__(self, tokens: int, context: int) -> None:
        super().__init__(f"the prompt has {tokens} tokens; the context of the model has {context}")
        self.facts |= {"tokens": str(tokens), "context": str(context)}


class LanguageModel(Protocol):
    """A loaded language model, used only on the thread that loaded it.

    ``parallel`` requests can be open at once: the worker advances all open generators in turns.
    """

    @property
    def capabilities(self) -> frozenset[str]:
        """Return the capabilities: CHAT, COMPLETION, EMBEDDING, TOOLS and so on."""

    @property
    def context(self) -> int:
        """Return the maximum number of tokens of a prompt and its text together."""

    @property
    def parallel(self) -> int:
        """Return the number of requests that it can serve at once."""

    @property
    def device(self) -> str:
        """Return the device and its library in words."""

    @property
    def dtype(self) -> str:
        """Return the type of the computation, or of the weights."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return sentences that the users of the model should know."""

    def try_schema(self, request: TextRequest, is_cancelled: Callable[[], bool]) -> None:
        """Try the schema of a request, on any thread, before the request takes a place.

        Raises UsageError, as ``generate``, if it cannot be used.
        """

    def prepare(self, request: TextRequest, is_cancelled: Callable[[], bool]) -> None:
        """Do work for a request that may take long, on any thread; ``generate`` needs its result.

        Raises UsageError, as ``generate``.
        """

    def generate(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        """Yield a TextNotice if needed, deltas, calls, and a TextEnd; closing it ends the request.

        A delta may be empty, so that other requests run while a prompt is read.

        Raises at once, or in place of the first event:
            ContextError: The prompt is too long.
            UsageError: The model cannot serve the request, such as tools without a template for
                them. The fact ``field`` names the field of the request.
            ModelError: Its template cannot be rendered.
        """

    def wake(self) -> None:
        """End a wait of ``generate`` for tokens, from any thread: other work has arrived."""

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return embeddings. Raises UsageError, ContextError."""


def require_characters(text: str) -> None:
    """Raise UsageError if a text has halves of surrogate pairs, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "the prompt has code points that are not characters (U+D800 to U+DFFF)"
        raise UsageError(message, field="prompt") from None


def require(capabilities: Sequence[str] | frozenset[str], capability: str, field_: str) -> None:
    """Raise UsageError, with the field of the request as a fact, if ``capability`` is missing."""
    if capability not in capabilities:
        label = _IN_WORDS.get(capability, capability)
        raise UsageError(f"the model does not support {label}", field=field_)
