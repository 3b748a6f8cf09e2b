"""Drawing of tokens from logits, with the samplers and penalties of mlx-lm.

The order is llama.cpp's: penalties, top_k, top_p, min_p, temperature. Each request has a random key
of its own: the same seed draws the same tokens, independently of other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clowder_aimage.model.backend import mx
from clowder_aimage.model.mlxlm.library import import_library_module
from clowder_aimage.model.text.language_model import Sampling

Processor = Callable[[mx.array, mx.array], mx.array]


class TokenSampler:
    """Draws the tokens of one request.

    Args:
        options: All are set, except the seed of a greedy request.
        prompt: The repetition penalty includes these tokens.
        context: The number of last tokens that penalties include.
        begun: The number of the last tokens of the prompt that are part of the text. The next ones
            are drawn as if this sampler had drawn these.
    """

    def __init__(
        self, options: Sampling, prompt: Sequence[int], context: int, drawn: int = 0
    ) -> None:
        self._temperature = options.temperature or 0.0
        library = import_library_module("sample_utils")
        self._filters = _build_filters(library, options) if self._temperature else []
        self._key = mx.random.key(options.seed or 0)
        for _ in range(drawn if self._temperature else 0):
            self._key, _ = mx.random.split(self._key)
        text = list(prompt[len(prompt) - drawn :])
        self._of_all, self._of_text = _build_penalties(library, options, context)
        before = list(prompt[: len(prompt) - drawn])
        self._prompt = mx.array(before, mx.int32) if self._of_all else None
        self._text = mx.array(text, mx.int32) if text else None

    def draw(self, logits: mx.array, previous: mx.array | None) -> mx.array:
        """Return a token (1,) for logits (1, vocabulary) after the token ``previous`` (1,).

        Nothing is evaluated.
        """
        logits = self._penalize(logits, previous)
        if not self._temperature:
            return mx.argmax(logits, axis=-1)
        logits = logits.astype(mx.float32)
        values = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        for apply_filter in self._filters:
            values = apply_filter(values)
        self._key, key = mx.random.split(self._key)
        return mx.random.categorical(values * (1 / self._temperature), key=key)

    def _penalize(self, logits: mx.array, previous: mx.array | None) -> mx.array:
        if not (self._of_all or self._of_text):
            return logits
        # A copy: the processors change their argument, and the original values are reported
        logits = mx.array(logits)
        if previous is not None:
            text = previous if self._text is None else mx.concatenate([self._text, previous])
            self._text = text
        text = mx.array([], mx.int32) if self._text is None else self._text
        everything = text if self._prompt is None else mx.concatenate([self._prompt, text])
        for processor in self._of_all:
            logits = processor(everything, logits)
        for processor in self._of_text:
            logits = processor(text, logits)
        return logits


def _build_filters(library: Any, options: Sampling) -> list[Callable[[mx.array], mx.array]]:
    top_k, top_p, min_p = options.top_k or 0, options.top_p, options.min_p
    filters: list[Callable[[mx.array], mx.array]] = []
    if top_k:
        filters.append(
            lambda x: library.apply_top_k(x, top_k) if top_k < x.shape[-1] else x  # else an error
        )
    if top_p is not None and top_p < 1:
        filters.append(lambda x: library.apply_top_p(x, max(top_p, 1e-9)))
    if min_p:
        filters.append(lambda x: library.apply_min_p(x, min_p))
    return filters


def _build_penalties(
    library: Any, options: Sampling, context: int
) -> tuple[list[Processor], list[Processor]]:
    """Return the penalties for tokens of prompt and text, and for those of the text."""
    of_all, of_text = [], []
    repetition, presence = options.repetition_penalty, options.presence_penalty
    frequency = options.frequency_penalty
    if repetition is not None and repetition != 1:
        of_all.append(library.make_repetition_penalty(repetition, context))
    if presence:
        of_text.append(library.make_presence_penalty(presence, context))
    if frequency:
        of_text.append(library.make_frequency_penalty(frequency, context))
    return of_all, of_text
