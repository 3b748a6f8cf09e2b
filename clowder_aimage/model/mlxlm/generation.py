"""The tokens of a text: the prompt in parts, then one token after another."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from clowder_aimage.model.backend import mx
from clowder_aimage.model.mlxlm.prompt_cache import Cache, PromptCache
from clowder_aimage.model.mlxlm.token_batch import TokenBatch
from clowder_aimage.model.mlxlm.token_sampler import TokenSampler
from clowder_aimage.model.text.language_model import (
    LENGTH,
    DrawnTokens,
    TextDelta,
    TextEnd,
    TextEvent,
    Token,
)
from clowder_aimage.model.text.stream import TextStream
from clowder_aimage.model.text.token_table import TokenTable

# Tokens of a prompt that are computed at once
_PART = 512
# Tokens after which unused memory is returned
_CLEARED = 256
# Yielded so that the worker can advance other requests
_YIELD = TextDelta("")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt, the number of tokens that follow, and of their alternatives.

    The last ones are those of the text that was ``begun`` before. owner: the client.
    """

    tokens: list[int]
    count: int
    alternatives: int | None
    begun: DrawnTokens
    owner: str = ""


@dataclass(slots=True)
class _Progress:
    # Tokens of prompt and text that are in the cache
    fed: int
    drawn: list[int]
    is_limited: bool = False
    # A token that was computed and not used
    coming: mx.array | None = None


class TextGeneration:
    """Generates texts with a network; ``ends`` are the tokens that end one.

    All open texts are in ``batch``.
    """

    def __init__(
        self,
        network: Any,
        batch: TokenBatch,
        prompt_cache: PromptCache,
        table: TokenTable,
        ends: frozenset[int],
    ) -> None:
        self._network, self._batch, self._prompt_cache = network, batch, prompt_cache
        self._table, self._ends = table, ends

    def run(
        self, prompt: Prompt, sampler: TokenSampler, stream: TextStream
    ) -> Generator[TextEvent, None, None]:
        """Yield the events of a text. After an empty delta other requests can run.

        The next token is computed while the caller has the delta of the one before.
        """
        start = time.perf_counter()
        cache, cached = self._prompt_cache.take(prompt.tokens, prompt.owner)
        progress = _Progress(cached, [])
        drawn_before = prompt.tokens[len(prompt.tokens) - prompt.begun.count :]
        shown = (number for number in drawn_before if not self._is_hidden(number, stream))
        stream.resume(prompt.begun, map(self._table.get_bytes, shown))
        # After an error of the network the cache may have other tokens than counted
        is_sound = False
        try:
            for _ in self._read(prompt.tokens[cached:], cache, progress):
                yield _YIELD
            first_token = start
            for token in self._draw(prompt, cache, sampler, progress):
                if len(progress.drawn) == 1:
                    first_token = time.perf_counter()
                number = progress.drawn[-1]
                is_hidden = self._is_hidden(number, stream)
                events = [] if is_hidden else stream.feed(self._table.get_bytes(number), token)
                yield from stream.attach_drawn(events, DrawnTokens((number,), 1))
                if not events:
                    yield _YIELD
                if stream.is_stopped:
                    break
            yield from stream.finish()
            is_sound = True
            reason = LENGTH if progress.is_limited and not stream.is_stopped else stream.reason
            end = time.perf_counter()
            counts = len(prompt.tokens), len(progress.drawn), cached
            yield TextEnd(reason, *counts, first_token - start, end - first_token)
        except GeneratorExit:
            is_sound = True
            raise
        finally:
            if is_sound:
                self._keep(prompt, cache, progress)

    def _keep(self, prompt: Prompt, cache: Cache, progress: _Progress) -> None:
        """Keep the cache for texts that begin alike."""
        tokens = [*prompt.tokens, *progress.drawn]
        if progress.coming is not None:
            tokens.append(progress.coming.item())  # type: ignore[arg-type]
        self._prompt_cache.put(tokens[: progress.fed], cache, prompt.owner)

    def _is_hidden(self, number: int, stream: TextStream) -> bool:
        """Return True for special tokens that are not marks, and for those that end a text."""
        if number in self._ends:
            return True
        text = self._table.get_bytes(number).decode("utf-8", "replace")
        return self._table.is_special(number) and text not in stream.marks

    def _read(self, tokens: Sequence[int], cache: Cache, progress: _Progress) -> Iterator[None]:
        """Compute all tokens of a prompt but the last, in parts."""
        for offset in range(0, len(tokens) - 1, _PART):
            chunk = tokens[offset : min(offset + _PART, len(tokens) - 1)]
            self._network(mx.array([chunk]), cache=cache)
            mx.eval([layer.state for layer in cache])
            progress.fed += len(chunk)
            mx.clear_cache()
            yield

    def _draw(
        self, prompt: Prompt, cache: Cache, sampler: TokenSampler, progress: _Progress
    ) -> Iterator[Token | None]:
        """Yield each drawn token's log probabilities, until an end or the limit."""
        text = self._batch.join(prompt.tokens[-1], cache, sampler, prompt.count)
        fed = progress.fed
        try:
            for count in range(1, prompt.count + 1):
                drawn, logits = self._batch.take(text)
                number: int = drawn.item()  # type: ignore[assignment]
                progress.drawn.append(number)
                if number in self._ends:
                    return
                yield self._score_token(number, logits, prompt.alternatives)
                if count % _CLEARED == 0:
                    mx.clear_cache()
            progress.is_limited = True
        finally:
            self._batch.leave(text)
            # The network may have read the token after the last one that was taken
            progress.fed, progress.coming = fed + text.fed, text.ready and text.ready[0]

    def _score_token(self, number: int, logits: mx.array, alternatives: int | None) -> Token | None:
        """Return the token with its log probability, before penalties and sampling."""
        if alternatives is None:
            return None
        row = logits[0].astype(mx.float32)
        row = row - mx.logsumexp(row)
        count = min(alternatives, row.size)
        best: list[int] = []
        if count:
            indices = mx.argpartition(-row, kth=count - 1)[:count]
            best = indices[mx.argsort(-row[indices])].tolist()  # type: ignore[assignment]
        top = tuple(self._make_token(index, row) for index in best)
        return self._make_token(number, row, top)

    def _make_token(
        self, number: int, row: mx.array, alternatives: tuple[Token, ...] = ()
    ) -> Token:
        data = self._table.get_bytes(number)
        text = data.decode("utf-8", "replace")
        logprob: float = row[number].item()  # type: ignore[assignment]
        return Token(text, tuple(data), logprob, alternatives)
